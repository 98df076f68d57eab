"""The guard beside a real process with processes of its own. Every wait is for a condition; pytest's limit ends the others."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.live.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="vLLM's processes are found in /proc")

FAKE = Path(__file__).with_name("fake_vllm.py")


@dataclass(frozen=True)
class Guarded:
    """`alive` is the end of the pipe that only a supervisor has."""

    process: "subprocess.Popen[str]"
    url: str
    alive: int
    pids: Path

    def until_ready(self) -> None:
        assert self.process.stdout is not None
        ready = json.loads(self.process.stdout.readline())
        assert (ready["event"], ready["url"]) == ("ready", self.url)

    def engine(self) -> list[int]:
        """The engine's process and the two that it started."""
        return [int(pid) for pid in self.pids.read_text().split()]

    def memory(self) -> Path:
        return Path("/dev/shm") / self.pids.with_suffix(".shm").read_text()  # noqa: S108

    def said(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def guarded(folder: Path, *options: str, stop_s: float = 10.0, port: int | None = None) -> Iterator[Guarded]:
    reads, writes = os.pipe()
    url, pids = f"http://127.0.0.1:{port or free_port()}", folder / "pids"
    engine = [sys.executable, str(FAKE), "serve", "m", "--port", url.rpartition(":")[2], "--pids", str(pids), *options]
    argv = [sys.executable, "-P", "-m", "twinpool.deploy.guard", str(reads), url, f"{stop_s:g}", *engine]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pass_fds=(reads,), start_new_session=True
    ) as process:
        os.close(reads)
        try:
            yield Guarded(process, url, writes, pids)
        finally:
            with suppress(OSError):
                os.close(writes)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def wait_for_ends(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            end = os.pidfd_open(pid)
            with os.fdopen(end):
                select.select([end], [], [])  # readable when the process has ended


def none_is_left(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_it_says_ready_when_the_engine_is_healthy_and_ends_all_of_it_when_asked(tmp_path: Path) -> None:
    with guarded(tmp_path) as it:
        it.until_ready()
        pids = it.engine()
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        it.process.terminate()
        assert it.process.wait() == 0
        assert none_is_left(pids)
        assert "INFO: this goes to standard output" in it.said()  # whose own output is for the ready line alone
        assert it.process.stdout is not None
        assert it.process.stdout.read() == ""


def test_an_engine_that_is_killed_takes_its_processes_and_its_shared_memory_with_it(tmp_path: Path) -> None:
    with guarded(tmp_path) as it:
        it.until_ready()
        pids = it.engine()
        memory = it.memory()
        assert memory.exists()
        os.kill(pids[0], signal.SIGKILL)
        assert it.process.wait() == -signal.SIGKILL  # as the engine ended
        assert none_is_left(pids)
        assert not memory.exists()


def test_nothing_outlives_the_supervisor(tmp_path: Path) -> None:
    with guarded(tmp_path) as it:
        it.until_ready()
        pids = it.engine()
        os.close(it.alive)
        it.process.wait()
        assert none_is_left(pids)


def test_an_engine_that_does_not_listen_is_killed_in_time(tmp_path: Path) -> None:
    with guarded(tmp_path, "--deaf", stop_s=0.2) as it:
        it.until_ready()
        pids = it.engine()
        it.process.terminate()
        assert it.process.wait() == -signal.SIGKILL
        assert none_is_left(pids)


def test_it_may_be_asked_to_end_before_the_engine_is_healthy(tmp_path: Path) -> None:
    with guarded(tmp_path, "--never-healthy", "--say", "here") as it:
        assert it.process.stderr is not None
        while it.process.stderr.readline() != "here\n":
            pass
        pids = it.engine()
        it.process.terminate()
        assert it.process.wait() == 0
        assert none_is_left(pids)
        assert it.process.stdout is not None
        assert it.process.stdout.read() == ""


def test_a_failed_start_ends_with_the_engine_s_code_and_words(tmp_path: Path) -> None:
    with guarded(tmp_path, "--say", "ValueError: no such model", "--fail", "3") as it:
        assert it.process.wait() == 3
        assert "ValueError: no such model" in it.said().splitlines()
        assert none_is_left(it.engine())


def test_a_guard_that_is_killed_outright_still_has_the_engine_end(tmp_path: Path) -> None:
    with guarded(tmp_path) as it:
        it.until_ready()
        engine = it.engine()[0]
        it.process.kill()
        wait_for_ends([engine])
        for child in it.engine()[1:]:  # what the fake leaves, which unlike vLLM does not see to its own
            os.kill(child, signal.SIGKILL)
        until(lambda: not it.memory().exists(), within_s=10)


def test_a_port_that_another_process_answers_on_is_no_engine_of_ours(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, guarded(tmp_path, port=other.getsockname()[1]) as it:
        assert it.process.wait() == 98
        assert it.said() == f"twinpool: another process answers at {it.url}\n"


def test_no_such_program(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    argv = [sys.executable, "-P", "-m", "twinpool.deploy.guard", str(reads), "http://127.0.0.1:1", "1", "/nonexistent/vllm"]
    ended = subprocess.run(argv, pass_fds=(reads,), capture_output=True, text=True, check=False)
    os.close(reads)
    os.close(writes)
    assert (ended.returncode, ended.stderr) == (127, "twinpool: /nonexistent/vllm: No such file or directory\n")
