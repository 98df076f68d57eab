"""The journal of a running gateway: what `twinpool replay` feeds to a fresh controller. Begun anew at each start."""

from pathlib import Path

from twinpool import __version__
from twinpool.config import Routing
from twinpool.core.commands import Command
from twinpool.core.events import Event
from twinpool.core.journal import Header, encode_header, encode_step
from twinpool.gateway.lines import LineWriter


class Journal:
    """One file."""

    def __init__(self, path: Path, rules: Routing) -> None:
        self._lines = LineWriter(path, "journal", appends=False)
        self._lines.write(encode_header(Header(version=__version__, rules=rules)))

    def write(self, event: Event, commands: list[Command]) -> None:
        self._lines.write(encode_step(event, commands))

    def close(self) -> None:
        self._lines.close()
