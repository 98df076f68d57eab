"""What a command's helping processes do when it ends: they end too, however that was."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.live.waiting import until

from twinpool.cli.processes import working_processes

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens"
ROWS = [
    f"2023-11-16 {18 + n // 3600:02}:{n // 60 % 60:02}:{n % 60:02}.0,{9000 + 37 * n % 9000},{200 + n % 70}" for n in range(6000)
]


def children(pid: int) -> set[int]:
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return {int(line.split()[0]) for line in listed.splitlines() if int(line.split()[1]) == pid}


def is_gone(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout.strip()
    return not state or state.startswith("Z")


@contextmanager
def planning(folder: Path) -> Iterator["tuple[subprocess.Popen[str], set[int]]"]:
    """A plan that takes minutes, in a process group of its own, once its helpers work."""
    trace = folder / "trace.csv"
    trace.write_text("\n".join([HEAD, *ROWS]))
    command = [sys.executable, "-m", "twinpool", "plan", str(trace), "--profile", "llama-3.1-8b-h100-tp1", "--sample", "600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0) as process:
        try:
            until(lambda: len(children(process.pid)) > 0, within_s=100)
            yield process, children(process.pid)
        finally:
            process.kill()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("number", "to_group", "code"),
    [
        (signal.SIGINT, False, 130),
        (signal.SIGINT, True, 130),
        (signal.SIGTERM, False, 143),
        (signal.SIGTERM, True, 143),
        (signal.SIGKILL, False, -9),
    ],
)
def test_a_plan_ends_with_its_helpers(number: signal.Signals, to_group: bool, code: int, tmp_path: Path) -> None:
    with planning(tmp_path) as (process, helpers):
        (os.killpg if to_group else os.kill)(process.pid, number)
        _, said = process.communicate(timeout=60)
        assert (process.returncode, said.strip()) == (code, "")
        until(lambda: all(map(is_gone, helpers)), within_s=30)


def test_an_error_in_the_block_ends_what_they_do() -> None:
    with suppress(ZeroDivisionError), working_processes(1) as executor:
        endless = executor.submit(time.sleep, 3600)
        raise ZeroDivisionError
    assert isinstance(endless.exception(), BrokenProcessPool)


def test_their_results_come_back() -> None:
    with working_processes(2) as executor:
        assert [*executor.map(abs, [-1, -2, -3])] == [1, 2, 3]
