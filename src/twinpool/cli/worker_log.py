"""Where the workers' own messages go: one file of bounded size, out of the way of the person at the terminal."""

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from twinpool.cli.printing import printable
from twinpool.errors import UserError

LARGEST_BYTES = 8 << 20  # days of an engine's chatter; with the one before it, all that anybody reads


class WorkerLog:
    """Begun anew by each `serve`, and when full; what was there before is kept as ``NAME.1``.

    A disk that fails ends the log, not the service.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO | None = self._begin()
        except OSError as problem:
            raise UserError(f"cannot write the log {path}: {problem.strerror}; choose another place with --log FILE") from None

    def write(self, worker: str, line: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {worker}: {line}\n")
            if self._file.tell() > LARGEST_BYTES:
                self._file.close()
                self._file = self._begin()
        except OSError as problem:
            with suppress(OSError):
                self._file.close()
            self._file = None
            print(f"twinpool: the log {self.path} ends here, the service goes on: {problem.strerror}", file=sys.stderr)  # noqa: T201

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin(self) -> TextIO:
        if self.path.is_file():
            self.path.replace(self.path.with_name(f"{self.path.name}.1"))
        return self.path.open("w", buffering=1, encoding="utf-8", errors="replace")


class Terminal:
    """The same for ``--log -``: standard error, for containers and service managers, which keep it themselves."""

    path = None

    def write(self, worker: str, line: str) -> None:
        print(printable(f"{worker}: {line}"), file=sys.stderr, flush=True)  # noqa: T201

    def close(self) -> None:
        pass
