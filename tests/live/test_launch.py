"""``serve --engine vllm`` from its command line to its end, with a program in vLLM's place that plays a stock engine."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.live import wire
from tests.live.service import END_S, TWINPOOL, process
from tests.live.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines' processes are found in /proc")


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of `serve` that take the program for vLLM."""
    program = tmp_path / "vllm"
    played = Path(__file__).with_name("scripted_vllm.py")
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(played))} "$@"\n')
    program.chmod(0o755)
    (tmp_path / "pids").mkdir()
    monkeypatch.setenv("SCRIPTED_VLLM_PIDS", str(tmp_path / "pids"))
    return ["--engine", "vllm", "--vllm", str(program), "--model", "org/m", "--log", str(tmp_path / "log")]


def pids(folder: Path) -> list[int]:
    """The engines and their children, those of the past too."""
    files = list((folder / "pids").iterdir())
    return [int(file.name.rpartition("-")[2]) for file in files] + [int(file.read_text()) for file in files]


def engine(folder: Path, url: str) -> tuple[int, int]:
    """The last process at that URL, and its child."""
    port = url.rpartition(":")[2]
    newest = max((folder / "pids").glob(f"{port}-*"), key=lambda file: file.stat().st_mtime_ns)
    return int(newest.name.rpartition("-")[2]), int(newest.read_text())


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def ask(ready: dict[str, Any]) -> dict[str, Any]:
    body = {"model": "org/m", "prompt": "One, two,", "max_tokens": 4}
    answer = wire.ask(ready["gateway"]["url"], "POST", "/v1/completions", json.dumps(body).encode())
    assert answer.status == 200, answer
    told: dict[str, Any] = answer.json()
    return told


def test_two_engines_come_up_and_answer_and_none_of_their_processes_is_left(tmp_path: Path, vllm: list[str]) -> None:
    with process(tmp_path, *vllm) as ready:
        workers = {worker["role"]: worker for worker in ready["workers"]}
        assert {role: worker["state"] for role, worker in workers.items()} == {"prefill": "ready", "decode": "ready"}
        assert ready["gateway"]["models"] == ["org/m"]
        assert ready["fabric"]["backend"] in ("UCX", "LIBFABRIC")
        assert "handoff_floor_gb_s" in ready
        assert ask(ready)["usage"]["completion_tokens"] == 4
        assert len(pids(tmp_path)) == 4
        assert all(map(is_there, pids(tmp_path)))
    assert not any(map(is_there, pids(tmp_path)))
    assert "starting 2 vLLM engines" in (tmp_path / "stderr").read_text()
    assert "Application startup complete." in (tmp_path / "log").read_text()


def test_an_engine_that_is_killed_comes_back_at_its_place_and_takes_its_child_along(tmp_path: Path, vllm: list[str]) -> None:
    with process(tmp_path, *vllm) as ready:
        url = next(worker["url"] for worker in ready["workers"] if worker["role"] == "decode")
        first, child = engine(tmp_path, url)
        os.kill(first, signal.SIGKILL)
        until(lambda: not is_there(child), within_s=10)
        until(lambda: "decode-0 is back" in (tmp_path / "stderr").read_text(), within_s=60)
        assert engine(tmp_path, url)[0] != first
        assert ask(ready)["choices"]
    assert not any(map(is_there, pids(tmp_path)))
    assert re.search(r"decode-0 was killed by signal 9; starting it again in 0\.5 s", (tmp_path / "stderr").read_text())


@contextmanager
def serving(folder: Path, *options: str) -> Iterator["subprocess.Popen[bytes]"]:
    argv = [*TWINPOOL, "serve", "--json", "--port", "0", "--admin-port", "0", *options]
    with (folder / "stderr").open("wb") as stderr, subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=stderr) as running:
        try:
            yield running
        finally:
            running.kill()


def test_kill_9_of_the_service_leaves_no_engine(tmp_path: Path, vllm: list[str]) -> None:
    with serving(tmp_path, *vllm) as running:
        assert running.stdout is not None
        assert json.loads(running.stdout.readline())["event"] == "ready"
        running.kill()
        until(lambda: not any(map(is_there, pids(tmp_path))), within_s=END_S)


def test_an_engine_that_cannot_start_ends_it_with_its_reason_and_its_last_lines(tmp_path: Path, vllm: list[str]) -> None:
    with serving(tmp_path, *vllm, "--engine-args=--fail") as running:
        assert running.wait(END_S) == 2
    said = (tmp_path / "stderr").read_text().splitlines()
    assert re.fullmatch(r"twinpool: (prefill|decode)-0 does not start: ValueError: no room for the KV cache", said[-1])
    assert "twinpool:   | RuntimeError: Engine core initialization failed." in said
