"""Writes the journal from a thread of its own, so that no disk ever holds up the event loop.

The loop hands over finished lines; the thread writes what has gathered and flushes. A disk that fails is said once, loudly,
and ends the journal, not the service.
"""

import queue
import sys
import threading
from pathlib import Path

from twinpool import __version__
from twinpool.config import Routing
from twinpool.core.commands import Command
from twinpool.core.events import Event
from twinpool.core.journal import Header, encode_header, encode_step
from twinpool.errors import UserError


class JournalWriter:
    """One journal file, begun anew. `write` never blocks; `close` returns when everything is on its way to the disk."""

    def __init__(self, path: Path, rules: Routing) -> None:
        try:
            self._file = path.open("wb")
        except OSError as wrong:
            raise UserError(f"cannot write the journal {path}: {wrong.strerror}; choose another with --journal") from wrong
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._is_open = True
        self._lines.put(encode_header(Header(version=__version__, rules=rules)))
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def write(self, event: Event, commands: list[Command]) -> None:
        if self._is_open:
            self._lines.put(encode_step(event, commands))

    def close(self) -> None:
        self._lines.put(None)
        self._thread.join()

    def _run(self) -> None:
        with self._file:
            try:
                while (line := self._lines.get()) is not None:
                    self._file.write(line)
                    if self._lines.empty():
                        self._file.flush()
            except OSError as wrong:
                self._is_open = False
                print(f"twinpool: the journal ends here, the service goes on: {wrong}", file=sys.stderr)  # noqa: T201
