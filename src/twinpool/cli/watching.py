"""`twinpool status --watch`: in place on a terminal, one below the other elsewhere, until Ctrl-C.

A gateway that is gone is asked again: it may be restarted meanwhile, and whoever watches wants to see it come back.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from io import StringIO
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.rule import Rule
from rich.text import Text

from twinpool.cli.printing import echo, json_text
from twinpool.cli.status_screen import age, show_status
from twinpool.cli.terminal import Screen, open_screen, tell
from twinpool.errors import UserError

Look = Callable[[], dict[str, Any]]


class Seen:
    """The last state that was had, and since when there has been none."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.state = state
        self.trouble: str | None = None
        self._lost_at = 0.0
        self._lost_since = ""

    def again(self, look: Look) -> None:
        try:
            self.state, self.trouble = look(), None
        except UserError as gone:
            if self.trouble is None:
                self._lost_at, self._lost_since = time.monotonic(), _clock()
            self.trouble = str(gone)

    def show(self, console: Console) -> None:
        if self.trouble is not None:
            gone_s = time.monotonic() - self._lost_at
            tell(console, f"[bold red]Gone since {self._lost_since}, {age(gone_s)} ago:[/] {escape(self.trouble)}")
            tell(console, "[dim]Asking again until it is back. What stands below is from before.[/]")
        show_status(console, self.state)


def watch_status(look: Look, state: Mapping[str, Any], every_s: float, *, as_json: bool) -> None:
    """Does not return: Ctrl-C ends it, as `KeyboardInterrupt`, and so does a reader of standard output who leaves."""
    seen = Seen(state)
    console = open_screen()
    show, shown = _json_lines(seen) if as_json else _in_place(seen, console) if console.is_terminal else _below(seen, console)
    with shown:
        while True:
            show()
            time.sleep(every_s)
            seen.again(look)


_Way = tuple[Callable[[], None], AbstractContextManager[Any]]


def _json_lines(seen: Seen) -> _Way:
    """A line a look at which there was a state."""

    def show() -> None:
        if seen.trouble is None:
            click.echo(json_text(seen.state))
        else:
            echo(f"twinpool: {seen.trouble}", err=True)

    return show, nullcontext()


def _below(seen: Seen, console: Console) -> _Way:
    def show() -> None:
        console.print(Rule(_clock(), align="left", characters="-"))
        seen.show(console)

    return show, nullcontext()


def _in_place(seen: Seen, console: Console) -> _Way:
    """On the terminal's second screen, so that what stood there before is back afterwards."""
    live = Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop")

    def show() -> None:
        paper = StringIO()
        drawing = Screen(file=paper, width=console.width, force_terminal=True, highlight=False)
        seen.show(drawing)
        lines = paper.getvalue().splitlines()
        room = max(console.height - 2, 0)  # two lines stand below
        hidden = len(lines) - room
        note = f"{hidden} more line{'s' * (hidden != 1)} below, a taller screen shows them; " if hidden > 0 else ""
        last = Text(f"{note}{_clock()}, Ctrl-C ends this", style="dim", no_wrap=True)
        live.update(Group(Text.from_ansi("\n".join(lines[:room])), Text(), last), refresh=True)

    return show, live


def _clock() -> str:
    return datetime.now().astimezone().strftime("%H:%M:%S")
