"""The journal of a running gateway: what `twinpool replay` feeds to a controller.

It begins anew at each start and whenever its file is full. A new file's header has a snapshot of what the controller knows, so
that each file replays on its own and the older ones may go.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec

from twinpool import __version__
from twinpool.config import Kept, Routing
from twinpool.core.commands import Command
from twinpool.core.events import Event
from twinpool.core.journal import Header, encode_header, encode_step
from twinpool.core.law import Law
from twinpool.gateway.lines import LineWriter


class Journal:
    """`remember` is the controller's; the controller is a fresh one."""

    def __init__(self, path: Path, rules: Routing, law: Law, kept: Kept, remember: Callable[[], msgspec.Raw]) -> None:
        self._rules = rules
        self._law = law
        self._max_bytes = kept.max_bytes
        self._remember = remember
        self._lines = LineWriter(path, "journal", appends=False, keep=kept.keep)
        self._full_at = self._begin(msgspec.UNSET)

    def write(self, event: Event, commands: list[Command]) -> None:
        """At once after the controller has taken in the event: a snapshot stands for all events up to this one."""
        self._lines.write(encode_step(event, commands))
        if self._lines.size > self._full_at and self._lines.turn_over():
            self._full_at = self._begin(self._remember())

    def close(self) -> None:
        self._lines.close()

    def _begin(self, snapshot: msgspec.Raw | msgspec.UnsetType) -> int:
        """Write a file's header; the size at which the file is full. Snapshots are never more than half of what is written,
        however large they are."""
        header = encode_header(Header(version=__version__, rules=self._rules, law=self._law, snapshot=snapshot))
        self._lines.write(header)
        return max(self._max_bytes, 2 * len(header))
