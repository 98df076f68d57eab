"""How a real `serve` with real workers ends, and that a worker's end is not the service's."""

# ruff: noqa: S310  # only what the test itself started is asked

import json
import os
import re
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.live.service import START_S, TWINPOOL, Worker, is_alive, process, wait_for_clean_end, worker_of
from tests.live.waiting import until

pytestmark = pytest.mark.model


def ask(ready: dict[str, Any], max_tokens: int = 4) -> dict[str, Any]:
    body = {"model": ready["gateway"]["models"][0], "max_tokens": max_tokens, "prompt": "One, two, three,", "ignore_eos": True}
    request = urllib.request.Request(
        f"{ready['gateway']['url']}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answered: dict[str, Any] = json.load(answer)
        return answered


def ask_in_vain(ready: dict[str, Any]) -> None:
    with pytest.raises(OSError, match=r"closed|reset|timed out"):
        ask(ready, max_tokens=8000)  # minutes of text


def state(ready: dict[str, Any]) -> dict[str, Any]:
    with urllib.request.urlopen(f"{ready['admin_url']}/admin/state", timeout=10) as answer:
        told: dict[str, Any] = json.load(answer)
        return told


def workers_now(ready: dict[str, Any]) -> dict[str, Worker]:
    return {worker["id"]: worker_of(worker) for worker in state(ready)["workers"]}


@contextmanager
def serve(folder: Path, *options: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Without any expectation of its end; it is killed at the latest with the block."""
    argv = [*TWINPOOL, "serve", "--json", "--port", "0", "--admin-port", "0", "--log", str(folder / "log"), *options]
    with (folder / "stderr").open("wb") as stderr, subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=stderr) as running:
        watchdog = threading.Timer(2 * START_S, running.kill)
        watchdog.start()
        try:
            yield running
        finally:
            watchdog.cancel()
            running.kill()


def first_line(running: "subprocess.Popen[bytes]") -> dict[str, Any]:
    assert running.stdout is not None
    ready: dict[str, Any] = json.loads(running.stdout.readline())
    return ready


def children(pid: int) -> list[int]:
    return [int(child) for tasks in Path(f"/proc/{pid}/task").glob("*/children") for child in tasks.read_text().split()]


def test_a_worker_that_dies_comes_back_and_the_service_lives(default_model: Path, tmp_path: Path) -> None:
    with process(tmp_path, "--model", str(default_model), "--log", str(tmp_path / "log")) as ready:
        before = workers_now(ready)
        os.kill(before["prefill-0"].pid, signal.SIGKILL)
        until(lambda: any(worker["state"] == "lost" for worker in state(ready)["workers"]), within_s=5)
        assert ask(ready)["usage"]["completion_tokens"] == 4  # one worker does it all meanwhile
        until(lambda: all(worker["state"] == "ready" for worker in state(ready)["workers"]), within_s=START_S)
        after = workers_now(ready)
        assert after["prefill-0"].pid != before["prefill-0"].pid
        assert after["decode-0"] == before["decode-0"]
        assert ask(ready)["usage"]["completion_tokens"] == 4
        assert state(ready)["decisions"][-1]["choice"] == "disaggregated"
    wait_for_clean_end(*before.values(), *after.values())
    news = (tmp_path / "stderr").read_text().splitlines()
    assert re.fullmatch(r"twinpool: prefill-0 was killed by signal 9; starting it again in 0\.5 s", news[0])
    assert news[1] == "twinpool: prefill-0 is back"


def test_kill_9_leaves_no_process_and_no_shared_memory(default_model: Path, tmp_path: Path) -> None:
    with serve(tmp_path, "--model", str(default_model)) as running:
        workers = workers_now(first_line(running)).values()
        assert all(is_alive(worker.pid) and worker.kv_folder.exists() for worker in workers)
        running.kill()
        wait_for_clean_end(*workers)


def test_a_second_ctrl_c_does_not_wait_for_running_answers(default_model: Path, tmp_path: Path) -> None:
    with serve(tmp_path, "--model", str(default_model)) as running:
        ready = first_line(running)
        workers = workers_now(ready).values()
        client = threading.Thread(target=ask_in_vain, args=(ready,))
        client.start()
        until(lambda: state(ready)["requests"]["live"] == 1, within_s=10)
        running.send_signal(signal.SIGINT)
        until(lambda: "Ctrl-C again ends at once" in (tmp_path / "stderr").read_text(), within_s=10)
        assert running.poll() is None
        running.send_signal(signal.SIGINT)
        assert running.wait(5) == 130
        client.join()
        until(lambda: not any(is_alive(worker.pid) for worker in workers), within_s=5)


def test_ctrl_c_in_the_middle_of_the_start(default_model: Path, tmp_path: Path) -> None:
    with serve(tmp_path, "--model", str(default_model)) as running:
        until(lambda: len(children(running.pid)) == 2, within_s=START_S)
        started = children(running.pid)
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 0
        assert running.stdout is not None
        assert running.stdout.read() == b""
        assert not any(is_alive(pid) for pid in started)


def test_a_model_that_cannot_be_loaded_ends_the_start_in_one_line(default_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(default_model.read_bytes()[:3_000_000])
    with serve(tmp_path, "--model", str(broken)) as running:
        assert running.wait(START_S) == 2
    said = (tmp_path / "stderr").read_text()
    assert re.fullmatch(rf"twinpool: (prefill|decode)-0 does not start: .*{re.escape(str(broken))}.*\n", said), said
