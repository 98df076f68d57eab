"""Writes files of lines from a thread of its own, so that no disk ever holds up the event loop.

The loop hands over finished lines; the thread writes what has gathered and flushes. A disk that fails is said once, loudly,
and ends the file, not the service.
"""

import queue
import sys
import threading
from pathlib import Path

from twinpool.errors import UserError


class LineWriter:
    """One file, begun anew or gone on with. `write` never blocks; `close` returns when everything is on its way to the disk."""

    def __init__(self, path: Path, what: str, *, appends: bool) -> None:
        self._what = what
        try:
            self._file = path.open("ab" if appends else "wb")
        except OSError as wrong:
            raise UserError(f"cannot write the {what} {path}: {wrong.strerror}; choose another file") from wrong
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name=what, daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """`line` has its end."""
        if self._is_open:
            self._lines.put(line)

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
                print(f"twinpool: the {self._what} ends here, the service goes on: {wrong}", file=sys.stderr)  # noqa: T201
