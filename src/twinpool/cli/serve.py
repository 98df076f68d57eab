"""``twinpool serve``: what can be asked for, and what is shown when it runs."""

import json
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from twinpool.cli.help import Option, Sections
from twinpool.cli.prepare import Asked, Local, dry_run, prepare

if TYPE_CHECKING:
    from twinpool.cli.prepare import Service

PORT = click.IntRange(0, 65535)
SECONDS = click.FloatRange(0, min_open=True)
FILE = click.Path(path_type=Path)


class ServeCommand(Sections):
    """Takes ``--prefill URL URL`` as well as ``--prefill URL --prefill URL``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread: list[str] = []
        option = ""
        for position, arg in enumerate(args):
            if arg.startswith("-"):
                option = arg if arg in ("--prefill", "--decode", "--colocated") else ""
            elif option and args[position - 1] != option:
                spread.append(option)
            spread.append(arg)
        return super().parse_args(ctx, spread)


ATTACH = partial(click.option, cls=Option, section="Engines that run already", metavar="URL...", multiple=True)
START = partial(click.option, cls=Option, section="Engines started here")
LISTEN = partial(click.option, cls=Option, section="Who may ask, and where")
WATCH = partial(click.option, cls=Option, section="Objectives and records")
OTHER = partial(click.option, cls=Option)


@click.command(cls=ServeCommand, short_help="Serve a model")
@START("--model", metavar="MODEL", help="GGUF file, or repo/name[:file] on the hub.  [default: SmolLM2-135M-Instruct]")
@START("--prefill-workers", type=click.IntRange(0), metavar="N", help="Workers that read prompts.  [default: 1]")
@START("--decode-workers", type=click.IntRange(0), metavar="N", help="Workers that write tokens.  [default: 1]")
@START("--colocated-workers", type=click.IntRange(0), metavar="N", help="Workers that do both.  [default: 0]")
@START("--handoff-secret-file", type=FILE, metavar="FILE", help="What signs their KV handles.  [default: a fresh one]")
@START("--log", metavar="FILE", help="Their messages, - for standard error.  [default: in the cache folder]")
@ATTACH("--prefill", help="They read prompts.")
@ATTACH("--decode", help="They write tokens.")
@ATTACH("--colocated", help="They do both.")
@ATTACH("--engine-api-key-file", type=FILE, metavar="FILE", multiple=False, help="Send them the key in this file.")
@LISTEN("--host", metavar="HOST", help="[default: 127.0.0.1]")
@LISTEN("--port", type=PORT, metavar="PORT", help="OpenAI's routes.  [default: 8000]")
@LISTEN("--api-key-file", type=FILE, metavar="FILE", help="Ask clients for one of these keys, one a line.")
@LISTEN("--admin-port", type=PORT, metavar="PORT", help="State and control, on loopback.  [default: 8001]")
@LISTEN("--admin-token-file", type=FILE, metavar="FILE", help="Ask for this token there.")
@LISTEN("--expose-route", is_flag=True, default=None, help="Tell clients which workers served them: x-twinpool-*.")
@WATCH("--slo-ttft", "slo_ttft_s", type=SECONDS, metavar="S", help="Time to the first token.  [default: 1.3]")
@WATCH("--slo-itl", "slo_itl_s", type=SECONDS, metavar="S", help="Gap between two tokens.  [default: 0.05]")
@WATCH("--journal", type=FILE, metavar="FILE", help="Record events and commands, for twinpool replay.")
@WATCH("--access-log", type=FILE, metavar="FILE", help="A JSON line a request, without its content.")
@OTHER("--config", type=FILE, metavar="FILE", help="All this and more in TOML; options here win over it.")
@OTHER("--dry-run", "is_dry_run", is_flag=True, help="Show what would run where, and end.")
@OTHER("--json", "as_json", is_flag=True, help="One JSON object when ready (or planned), nothing else.")
def command(*, is_dry_run: bool, as_json: bool, **options: Any) -> None:
    """Serve a language model behind OpenAI's HTTP API.

    Without options: a small real model, one worker that reads prompts and one that writes tokens, on this machine.
    With --prefill, --decode or --colocated: engines that run already, such as `twinpool worker` on other machines.
    """
    began = time.monotonic()
    asked = Asked(**options)
    if is_dry_run:
        _show_dry_run(asked, as_json=as_json)
        return
    service = prepare(asked)
    from rich.console import Console
    from uvloop import run

    from twinpool.cli.running import Running

    news = Console(stderr=True, highlight=False)

    def say(text: str) -> None:
        news.print(f"twinpool: {text}", markup=False, soft_wrap=True)

    def show(admin_url: str, state: Mapping[str, Any]) -> None:
        _show_ready(service, admin_url, state, ready_s=time.monotonic() - began, as_json=as_json)

    try:
        run(Running(service, say, show).run())
    finally:
        if isinstance(service.fleet, Local):
            service.fleet.log.close()


def _show_dry_run(asked: Asked, *, as_json: bool) -> None:
    planned = dry_run(asked)
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(planned)))
        return
    from rich.console import Console

    from twinpool.cli.screen import show_plan

    show_plan(Console(highlight=False), planned)


def _show_ready(service: "Service", admin_url: str, state: Mapping[str, Any], *, ready_s: float, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"event": "ready", "ready_s": round(ready_s, 3), "admin_url": admin_url, **state}))
        return
    from rich.console import Console

    from twinpool.cli.screen import core_list, show_first_screen

    local = service.fleet if isinstance(service.fleet, Local) else None
    show_first_screen(
        Console(highlight=False),
        state,
        ready_s=ready_s,
        admin_url=admin_url,
        cores={worker.id: core_list(worker.cores) for worker in local.plan.workers} if local else {},
        notes=local.plan.notes if local else (),
        log=local.log.path if local else None,
        needs_key=bool(service.api_keys),
    )
