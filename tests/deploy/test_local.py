"""The supervisor against real processes. Every wait is for a condition; pytest's time limit ends what never comes."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from twinpool.deploy.local import Deadlines, Ended, Hooks, Supervisor
from twinpool.deploy.process import Command, Ready
from twinpool.deploy.restarts import RestartPolicy
from twinpool.errors import UserError

FAKE = Path(__file__).with_name("fake_worker.py")
QUICK = RestartPolicy(first_delay_s=0.01, longest_delay_s=0.05)


class Seen:
    """What the supervisor called back, to be waited for."""

    def __init__(self) -> None:
        self.ready: list[tuple[str, Ready]] = []
        self.ended: list[Ended] = []
        self.log: list[tuple[str, str]] = []
        self._news = asyncio.Event()
        self.hooks = Hooks(self._on_ready, self._on_end, self._on_log)

    def _on_ready(self, which: str, ready: Ready) -> None:
        self.ready.append((which, ready))
        self._news.set()

    def _on_end(self, ended: Ended) -> None:
        self.ended.append(ended)
        self._news.set()

    def _on_log(self, which: str, line: str) -> None:
        self.log.append((which, line))
        self._news.set()

    async def until(self, *, ready: int = 0, ended: int = 0, log: int = 0) -> None:
        while len(self.ready) < ready or len(self.ended) < ended or len(self.log) < log:
            self._news.clear()
            await self._news.wait()


def fake(*options: str) -> Callable[[str, int], Command]:
    return lambda which, fd: Command([sys.executable, str(FAKE), str(fd), *options], os.environ)


def is_alive(pid: int) -> bool:
    """A zombie that nobody has waited for yet is not alive."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    with suppress(OSError):
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    return not Path("/proc").is_dir()


async def test_all_workers_come_up_and_none_is_left() -> None:
    seen = Seen()
    async with Supervisor(["a", "b"], fake(), seen.hooks, restarts=QUICK) as supervisor:
        await seen.until(ready=2)
        pids = supervisor.pids()
        assert {name: int(ready.incarnation) for name, ready in seen.ready} == pids
        assert all(is_alive(pid) for pid in pids.values())
        assert all(os.getpgid(pid) == pid for pid in pids.values())  # a Ctrl-C in the terminal does not reach them
    assert not any(is_alive(pid) for pid in pids.values())
    assert supervisor.pids() == {}
    assert seen.ended == []  # asked for, so no news


async def test_a_dead_worker_is_started_again() -> None:
    seen = Seen()
    async with Supervisor(["a"], fake(), seen.hooks, restarts=QUICK) as supervisor:
        await seen.until(ready=1)
        first = supervisor.pids()["a"]
        os.kill(first, signal.SIGKILL)
        await seen.until(ready=2, ended=1)
        assert supervisor.pids()["a"] != first
    [ended] = seen.ended
    assert (ended.code, ended.restart_in_s) == (-9, 0.01)
    assert str(ended) == "a was killed by signal 9; starting it again in 0.01 s"


async def test_a_worker_that_cannot_start_ends_it_all_with_its_own_words() -> None:
    seen = Seen()
    command = fake("--say", "twinpool: the model is no model", "--before-ready", "2")
    async with Supervisor(["a"], command, seen.hooks, restarts=QUICK) as supervisor:
        with pytest.raises(UserError, match=r"^a does not start: the model is no model$"):
            await supervisor.failed()
    assert [ended.restart_in_s for ended in seen.ended] == [0.01, 0.02, None]


async def test_a_start_that_failed_once_is_forgiven(tmp_path: Path) -> None:
    seen = Seen()
    command = fake("--once", str(tmp_path / "tried"), "2")
    async with Supervisor(["a"], command, seen.hooks, restarts=QUICK):
        await seen.until(ready=1)
    assert [ended.code for ended in seen.ended] == [2]


async def test_a_worker_that_is_never_ready_is_ended() -> None:
    seen = Seen()
    deadlines = Deadlines(start_s=0.3, stop_s=5)
    command = fake("--never-ready")
    async with Supervisor(["a"], command, seen.hooks, restarts=RestartPolicy(start_tries=1), deadlines=deadlines) as it:
        with pytest.raises(UserError, match=r"^a does not start: not ready within 0\.3 s$"):
            await it.failed()
        assert it.pids() == {}


async def test_one_that_does_not_listen_is_killed() -> None:
    seen = Seen()
    deadlines = Deadlines(stop_s=0.1)
    async with Supervisor(["a"], fake("--deaf"), seen.hooks, deadlines=deadlines) as supervisor:
        await seen.until(ready=1)
        pid = supervisor.pids()["a"]
    assert not is_alive(pid)
    assert ("a", "did not end within 0.1 s: killed") in seen.log


async def test_an_end_in_the_middle_of_a_start_leaves_nothing() -> None:
    seen = Seen()
    async with Supervisor(["a"], fake("--never-ready", "--say", "here"), seen.hooks) as supervisor:
        await seen.until(log=1)
        pid = supervisor.pids()["a"]
    assert not is_alive(pid)


async def test_an_end_during_the_back_off_starts_nothing_more() -> None:
    seen = Seen()
    async with Supervisor(["a"], fake("--before-ready", "1"), seen.hooks) as supervisor:
        await seen.until(ended=1)
        assert supervisor.pids() == {}
    assert len(seen.ended) == 1


async def test_what_a_worker_writes_reaches_the_log_however_long_a_line() -> None:
    seen = Seen()
    async with Supervisor(["a"], fake("--noise", "300000"), seen.hooks):
        await seen.until(ready=1, log=2)
        while sum(len(line) for _, line in seen.log) < 300000 + len("loading"):
            await seen.until(log=len(seen.log) + 1)
    assert ("a", "loading") in seen.log


async def test_no_such_program_is_a_failed_start() -> None:
    seen = Seen()

    def command(which: str, fd: int) -> Command:
        return Command(["/nonexistent/python"], {})

    async with Supervisor(["a"], command, seen.hooks, restarts=QUICK) as supervisor:
        with pytest.raises(UserError, match="/nonexistent/python: No such file"):
            await supervisor.failed()


async def test_kill_leaves_no_time() -> None:
    seen = Seen()
    async with Supervisor(["a"], fake("--deaf"), seen.hooks, restarts=RestartPolicy(first_delay_s=60)) as supervisor:
        await seen.until(ready=1)
        supervisor.kill()
        await seen.until(ended=1)
    assert seen.ended[0].code == -9


PARENT = """
import asyncio, os, sys
from twinpool.deploy.local import Hooks, Supervisor
from twinpool.deploy.process import Command

async def main():
    hooks = Hooks(lambda worker, ready: print(ready.incarnation, flush=True), lambda ended: None, lambda worker, line: None)
    async with Supervisor("ab", lambda worker, fd: Command([sys.executable, sys.argv[1], str(fd)], os.environ), hooks):
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_kill_9_of_the_parent_leaves_no_worker() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(FAKE)], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()), int(parent.stdout.readline())]
        ends = [os.pidfd_open(pid) for pid in pids]
        assert all(is_alive(pid) for pid in pids)
        parent.kill()
    for end in ends:
        with os.fdopen(end):
            wait_for_end(end)


def wait_for_end(pidfd: int) -> None:
    """A process descriptor can be read when its process has ended; pytest's time limit is the deadline."""
    select.select([pidfd], [], [])
