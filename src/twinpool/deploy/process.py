"""One worker process: started, heard, ended.

    spawn ──▶ {"event": "ready", "url": …} on its stdout ──▶ serves ──▶ ends

It leads a session of its own, so that a Ctrl-C in the terminal reaches only its parent. It inherits the reading end of a pipe
whose writing end only the parent has: whatever becomes of the parent, the worker reads EOF there and ends.
"""

import asyncio
import json
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from subprocess import DEVNULL

from twinpool.deploy.last_words import TAIL_LINES, reason

Log = Callable[[str], None]  # one line of a worker, without its end

_LONGEST_LINE = 1 << 16
_LINES_KEPT = 400  # an engine's traceback, once for each of its processes


@dataclass(frozen=True, slots=True)
class Command:
    """What to run: `argv`, and the whole environment."""

    argv: Sequence[str]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Ready:
    """What a worker tells when it can serve."""

    url: str
    incarnation: str


class WorkerProcess:
    """Made by `spawn`. Whoever has it must `stop` it."""

    def __init__(self, process: Process, log: Log) -> None:
        self._process = process
        self._log = log
        self._written: deque[str] = deque(maxlen=_LINES_KEPT)
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._listeners = [asyncio.create_task(self._hear_stdout()), asyncio.create_task(self._hear_stderr())]

    @classmethod
    async def spawn(cls, command: Command, alive_fd: int, log: Log) -> "WorkerProcess":
        """Raises `OSError` when there is no such program."""
        process = await asyncio.create_subprocess_exec(
            *command.argv,
            env=command.env,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            pass_fds=(alive_fd,),
            start_new_session=True,
        )
        return cls(process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    @property
    def last_words(self) -> str:
        """Of a failed start, the reason, as far as it wrote one to stderr."""
        return reason(self._written)

    @property
    def last_lines(self) -> tuple[str, ...]:
        return tuple(self._written)[-TAIL_LINES:]

    async def ready(self, timeout_s: float) -> Ready | None:
        """None when it ended, or said nothing in time."""
        ended = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait((self._ready, ended), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        return self._ready.result() if self._ready.done() else None

    async def wait(self) -> int:
        """Its exit code, negative for a signal; everything it wrote is in the log by then."""
        code = await self._process.wait()
        await asyncio.gather(*self._listeners)
        return code

    def kill(self) -> None:
        """Its whole group. Its id is ours to use only until it has been waited for."""
        if self.is_running:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self, timeout_s: float) -> None:
        """Asks it to end, and makes it and whatever it started end when it does not in time."""
        if self.is_running:
            with suppress(ProcessLookupError):
                self._process.terminate()  # it alone: it knows best in what order its own processes end
        try:
            await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            self._log(f"did not end within {timeout_s:g} s: killed")
        finally:
            self.kill()
        await self.wait()

    async def _hear_stdout(self) -> None:
        async for line in _lines(self._process.stdout):
            ready = _read_ready(line)
            if ready is None:
                self._log(line)
            elif not self._ready.done():
                self._ready.set_result(ready)

    async def _hear_stderr(self) -> None:
        async for line in _lines(self._process.stderr):
            self._log(line)
            self._written.append(line)


def _read_ready(line: str) -> Ready | None:
    if not line.startswith("{"):
        return None
    try:
        said = json.loads(line)
    except ValueError:
        return None
    if not isinstance(said, dict) or said.get("event") != "ready" or "url" not in said:
        return None
    return Ready(str(said["url"]), str(said.get("incarnation", "")))


async def _lines(stream: asyncio.StreamReader | None) -> AsyncIterator[str]:
    """Lines as they come; one that is too long comes in pieces."""
    if stream is None:
        return
    rest = b""
    while data := await stream.read(_LONGEST_LINE):
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace").rstrip("\r")
        if len(rest) > _LONGEST_LINE:
            yield rest.decode(errors="replace")
            rest = b""
    if rest:
        yield rest.decode(errors="replace")
