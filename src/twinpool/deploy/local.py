"""Applies a plan on this machine: starts its workers, starts again what dies, and leaves none behind.

    ┌──────────────── back-off ◀──────────────┐
    ▼                                         │
spawn ──▶ waits for the ready line ──▶ serves ──▶ ended      (each worker in a task of its own)
                 │ ended or too late             ▲
                 └───────────────────────────────┘
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn, Self

from twinpool.deploy.process import Command, Ready, WorkerProcess
from twinpool.deploy.restarts import RestartPolicy, Restarts
from twinpool.errors import UserError


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker's process is gone. `code` is negative for a signal; `restart_in_s` is None when it will not be started again.

    `said` is the reason that it wrote to stderr and `lines` its last ones, empty when it had got as far as serving.
    """

    worker: str
    code: int
    said: str
    restart_in_s: float | None
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        how = f"was killed by signal {-self.code}" if self.code < 0 else f"ended with exit code {self.code}"
        why = f" ({self.said})" if self.said else ""
        then = "" if self.restart_in_s is None else f"; starting it again in {self.restart_in_s:g} s"
        return f"{self.worker} {how}{why}{then}"


@dataclass(frozen=True, slots=True)
class Hooks:
    """Called in the event loop, with a worker's id; must not block. `on_log` gets one line that it wrote."""

    on_ready: Callable[[str, Ready], None]
    on_end: Callable[[Ended], None]
    on_log: Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Deadlines:
    start_s: float = 120.0  # a model of many GB from a slow disk; the default one takes a second
    stop_s: float = 10.0  # the gateway has drained by then: nothing that a worker does is still wanted


class Supervisor:
    """Keeps these workers running for as long as it is entered.

    `command` says what to run for a worker, told the inherited descriptor where it reads EOF when this process is gone.
    """

    def __init__(
        self,
        workers: Sequence[str],
        command: Callable[[str, int], Command],
        hooks: Hooks,
        *,
        restarts: RestartPolicy | None = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        self._workers = tuple(workers)
        self._command = command
        self._hooks = hooks
        self._restarts = restarts or RestartPolicy()
        self._deadlines = deadlines or Deadlines()
        self._running: dict[str, WorkerProcess] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._alive: tuple[int, int] | None = None

    async def __aenter__(self) -> Self:
        self._alive = os.pipe()
        self._tasks = [asyncio.create_task(self._keep(worker), name=worker) for worker in self._workers]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends every worker: asked first, killed after `Deadlines.stop_s`."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for end in self._alive or ():
            os.close(end)
        self._alive = None

    async def failed(self) -> NoReturn:
        """Waits until a worker cannot be started, and raises why. Otherwise never returns."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        raise RuntimeError("a supervised worker's task ended without a reason")

    def kill(self) -> None:
        """Ends every worker this instant, without a word; for a second Ctrl-C."""
        for process in self._running.values():
            process.kill()

    def pids(self) -> dict[str, int]:
        """The process of each worker that has one now, by the worker's id."""
        return {name: process.pid for name, process in self._running.items()}

    async def _keep(self, worker: str) -> None:
        """Runs one worker over and over; returns only by an error."""
        record = Restarts(self._restarts)
        while True:
            life = await self._run(worker)
            delay_s = record.delay_after(ready=life.served_s is not None, ran_s=life.served_s or 0.0)
            self._hooks.on_end(Ended(worker, life.code, life.said, delay_s, life.lines))
            if delay_s is None:
                raise UserError(f"{worker} does not start: {life.said or f'exit code {life.code}, and not a word why'}")
            await asyncio.sleep(delay_s)

    async def _run(self, worker: str) -> "_Life":
        if self._alive is None:
            raise RuntimeError("a supervisor starts workers only while it is entered")
        alive_fd = self._alive[0]
        clock = asyncio.get_running_loop().time
        command = self._command(worker, alive_fd)
        try:
            process = await WorkerProcess.spawn(command, alive_fd, lambda line: self._hooks.on_log(worker, line))
        except OSError as problem:
            return _Life(127, said=f"{command.argv[0]}: {problem.strerror}")
        self._running[worker] = process
        try:
            ready = await process.ready(self._deadlines.start_s)
            if ready is None:
                return await self._failed_start(process)
            started = clock()
            self._hooks.on_ready(worker, ready)
            code = await process.wait()
            return _Life(code, served_s=clock() - started)
        finally:
            await process.stop(self._deadlines.stop_s)
            del self._running[worker]

    async def _failed_start(self, process: WorkerProcess) -> "_Life":
        """It ended before it was ready, or is still there and must not be."""
        said = ""
        if process.is_running:
            await process.stop(self._deadlines.stop_s)
            said = f"not ready within {self._deadlines.start_s:g} s"
        code = await process.wait()
        return _Life(code, said=said or process.last_words, lines=process.last_lines)


@dataclass(frozen=True, slots=True)
class _Life:
    """One life of a worker. `served_s` is None when it did not get that far; only then is there a reason."""

    code: int
    said: str = ""
    lines: tuple[str, ...] = ()
    served_s: float | None = None
