"""``twinpool replay``: the promise *same events, same commands*, tried on a recorded journal."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from twinpool.cli.printing import echo, json_text
from twinpool.errors import UserError

if TYPE_CHECKING:
    from twinpool.assemble import Replay

DIFFERS = 1


@click.command(short_help="Check a journal")
@click.argument("journal", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object, and nothing else.")
@click.pass_context
def command(ctx: click.Context, journal: Path, as_json: bool) -> None:
    """Feed the events of JOURNAL (a file of `serve --journal`, also an older one) to a controller and compare its commands.

    Exit code 0: every command is the same. 1: one differs, and is shown. 2: this is no journal of this version.
    """
    from twinpool.assemble import replay

    try:
        with journal.open("rb") as lines:
            outcome = replay(lines)
    except OSError as problem:
        raise UserError(f"cannot read the journal {journal}: {problem.strerror}") from None
    _show(outcome, as_json=as_json)
    if outcome.difference is not None:
        ctx.exit(DIFFERS)


def _show(outcome: "Replay", *, as_json: bool) -> None:
    import msgspec

    if as_json:
        click.echo(json_text(outcome))
        return
    if outcome.difference is None:
        echo(f"{outcome.events:,} events replayed: every command is the same.")
    else:
        recorded, now = (
            "\n".join(f"    {msgspec.json.encode(command).decode()}" for command in commands) or "    nothing"
            for commands in (outcome.difference.expected, outcome.difference.got)
        )
        echo(
            f"{outcome.events:,} events replayed: line {outcome.difference.line} differs.\n"
            f"  recorded:\n{recorded}\n  now:\n{now}"
        )
    if outcome.is_cut:
        echo("The journal's last line is cut short: its gateway was ended while it wrote.")
