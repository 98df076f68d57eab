"""The ``twinpool`` command itself: its help, its version, how its errors look.

A person's mistake is one line on standard error that says what to do, and exit code 2: no traceback, no usage text. For the
other ways to end: `twinpool.cli.ending`.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import click

from twinpool import __version__
from twinpool.cli.ending import MISTAKE, no_reader_told_apart, with_codes
from twinpool.cli.printing import printable
from twinpool.errors import UserError

# Name and help of each command, in the order of `twinpool -h`. Kept here so that help imports none of them.
COMMANDS = {
    "serve": "Serve a model: engines started here, or engines that run already",
    "worker": "Run one embedded engine, for a gateway on this or another machine",
    "status": "Show the pools of a running gateway, and its last decisions",
    "bench": "Measure any OpenAI-compatible service under load",
    "check": "Judge any service by its two indicators",
    "compare": "Serve the same traffic colocated and disaggregated, and compare",
    "profile": "Measure a live engine's costs, for simulate and plan",
    "simulate": "Run a scenario in virtual time, with the decisions of the gateway",
    "plan": "Choose a split of workers, or none, for a trace of requests",
    "replay": "Feed a recorded journal to a fresh controller and compare",
}


class TwinpoolGroup(click.Group):
    """Imports a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"twinpool.cli.{cmd_name}").command
        if not isinstance(command, click.Command):
            raise TypeError(f"twinpool.cli.{cmd_name}.command is no command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Ends the program, unless it is told not to stand alone."""
        run: Callable[..., Any] = super().main
        if not kwargs.pop("standalone_mode", True):
            return run(*args, **kwargs, standalone_mode=False)
        with with_codes():
            code = run(*args, **kwargs, standalone_mode=False)
            sys.stdout.flush()
        sys.exit(code)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with no_reader_told_apart(), _mistakes_in_one_line():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with no_reader_told_apart(), _mistakes_in_one_line():
            return super().invoke(ctx)


class MistakeError(click.ClickException):
    """How a person's mistake ends the program."""

    exit_code = MISTAKE

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(printable(f"twinpool: {' '.join(self.message.split())}"), file=file, err=True)


@contextmanager
def _mistakes_in_one_line() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise MistakeError(str(error)) from error
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "twinpool"
        raise MistakeError(f"{error.format_message().rstrip('.')} (help: {where} -h)") from error


@click.group(
    cls=TwinpoolGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Begin with `twinpool serve`: a small real model, read by one process and written by another, on this machine.",
)
@click.version_option(__version__, prog_name="twinpool", message="%(prog)s %(version)s")
def cli() -> None:
    """Serve a language model from two pools of engines: one reads prompts (prefill), the other writes tokens (decode)."""
