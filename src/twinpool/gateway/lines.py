"""Writes files of lines from a thread of its own, so that no disk ever holds up the event loop.

The loop hands over finished lines; the thread writes what has gathered and flushes. A file that is turned over becomes FILE.1,
what was FILE.1 becomes FILE.2, and so on up to the number that is kept. A disk that fails is said once, loudly, and ends the
file, not the service.
"""

import os
import queue
import stat
import sys
import threading
from contextlib import suppress
from enum import Enum
from pathlib import Path

from twinpool.errors import UserError


class _Order(Enum):
    TURN_OVER = "turn over"
    END = "end"


class LineWriter:
    """One file and the `keep` before it. `write` and `turn_over` never block; `close` returns when everything is on its way to
    the disk."""

    def __init__(self, path: Path, what: str, *, appends: bool, keep: int) -> None:
        self._what = what
        is_no_file = path.exists() and not path.is_file()
        self._path = path if is_no_file else Path(os.path.realpath(path))  # a link stays where it is
        self._keep = keep
        try:
            if not appends and not is_no_file and _has_lines(self._path):
                self._shift()
            self._file = self._path.open("ab" if appends else "wb")
            opened = os.fstat(self._file.fileno())
        except OSError as wrong:
            raise UserError(f"cannot write the {what} {path}: {wrong.strerror}; choose another file") from wrong
        self.size = opened.st_size
        self._can_turn_over = stat.S_ISREG(opened.st_mode)
        self._lines: queue.SimpleQueue[bytes | _Order] = queue.SimpleQueue()
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name=what, daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """`line` has its end."""
        if self._is_open:
            self.size += len(line)
            self._lines.put(line)

    def turn_over(self) -> bool:
        """Begin a new file with the next line. False where there can be none: at a pipe or a device, or after an error."""
        if not (self._can_turn_over and self._is_open):
            return False
        self.size = 0
        self._lines.put(_Order.TURN_OVER)
        return True

    def close(self) -> None:
        self._lines.put(_Order.END)
        self._thread.join()

    # The thread

    def _run(self) -> None:
        try:
            while (line := self._lines.get()) is not _Order.END:
                if line is _Order.TURN_OVER:
                    self._file.close()
                    self._shift()
                    self._file = self._path.open("wb")
                else:
                    self._file.write(line)
                    if self._lines.empty():
                        self._file.flush()
            self._file.close()
        except OSError as wrong:
            self._is_open = False
            print(f"twinpool: the {self._what} ends here, the service goes on: {wrong}", file=sys.stderr)  # noqa: T201
            with suppress(OSError):  # what could not be written cannot be written now
                self._file.close()

    def _shift(self) -> None:
        """FILE to FILE.1 and so on, up to the first number that is free; where none is, the last file goes."""
        free = 0
        while free < self._keep and self._numbered(free).exists():
            free += 1
        for number in range(free, 0, -1):
            os.replace(self._numbered(number - 1), self._numbered(number))

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}") if number else self._path


def _has_lines(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False
