"""Starts Twinpool as a person does, by its command line, and sees to it that it ends as it should."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.live.scrape import Scrape
from tests.live.waiting import until

TWINPOOL = (sys.executable, "-m", "twinpool")
START_S = 60.0  # a start takes 3 s; this is for a machine that does much else
END_S = 30.0


@dataclass(frozen=True)
class Worker:
    id: str
    url: str
    pid: int
    kv_folder: Path

    def scrape(self) -> Scrape:
        return Scrape(self.url)

    def prompt_tokens_computed(self) -> float:
        return self.scrape().total("twinpool_worker_prompt_tokens_computed_total")

    def requests_running(self) -> float:
        return self.scrape().total("twinpool_worker_requests_running")


@dataclass(frozen=True)
class Service:
    """A gateway and one worker of each pool."""

    url: str
    model: str
    admin_url: str
    ready: dict[str, Any]
    spawned_to_ready_s: float
    load_when_spawned: float
    """Runnable processes a core, in the minute before."""
    journal: Path
    prefill: Worker
    decode: Worker

    def scrape(self) -> Scrape:
        return Scrape(self.url)

    def at_work(self) -> dict[str, float]:
        """Whatever runs, waits or is held anywhere."""
        gateway = self.scrape()
        found = {name: gateway.total(name) for name in ("twinpool_requests_live", "twinpool_kv_handles")}
        for worker in (self.prefill, self.decode):
            scrape = worker.scrape()
            for name in ("requests_running", "requests_waiting", "kv_handles", "kv_held_bytes"):
                found[f"{worker.id} {name}"] = scrape.total(f"twinpool_worker_{name}")
        return {name: value for name, value in found.items() if value}

    def wait_until_idle(self, within_s: float = 3.0) -> None:
        """An engine leaves a request that nobody waits for at the end of its step, which can take a second."""
        until(lambda: not self.at_work(), within_s=within_s, story=self.at_work)


def run(*arguments: str, timeout_s: float = START_S) -> "subprocess.CompletedProcess[str]":
    """A command that ends by itself."""
    return subprocess.run([*TWINPOOL, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False)


@contextmanager
def process(folder: Path, *arguments: str) -> Iterator[dict[str, Any]]:
    """``twinpool serve`` with these arguments, on free ports, until the end of the block; gives what it printed when ready.

    Asserts a clean end: exit code 0, that one object on standard output, and no traceback.
    """
    argv = [*TWINPOOL, "serve", "--json", "--port", "0", "--admin-port", "0", *arguments]
    errors = folder / "stderr"
    with errors.open("wb") as stderr, subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=stderr) as running:
        watchdog = threading.Timer(START_S, running.kill)
        watchdog.start()
        try:
            line = running.stdout.readline()
            watchdog.cancel()
            assert line, f"it did not start:\n{errors.read_text()}"
            yield json.loads(line)
        finally:
            watchdog.cancel()
            running.send_signal(signal.SIGTERM)
            try:
                rest, _ = running.communicate(timeout=END_S)
            except subprocess.TimeoutExpired:
                running.kill()
                raise
    assert rest == b"", "standard output is for one JSON object"
    assert running.returncode == 0, errors.read_text()
    assert "Traceback" not in errors.read_text(), errors.read_text()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def worker_of(described: dict[str, Any]) -> Worker:
    """A worker of this machine, as `/admin/state` describes it. Its folder of KV has its pid and incarnation as name."""
    (folder,) = Path(f"/dev/shm/twinpool-{os.getuid()}").glob(f"*-{described['incarnation']}")  # noqa: S108
    return Worker(described["id"], described["url"], int(folder.name.partition("-")[0]), folder)


def ended_clean(*workers: Worker) -> bool:
    """Neither their processes nor their shared memory are left."""
    return not any(
        is_alive(worker.pid) or worker.kv_folder.exists() or worker.kv_folder.with_suffix(".lock").exists()
        for worker in workers
    )


def wait_for_clean_end(*workers: Worker) -> None:
    until(lambda: ended_clean(*workers), within_s=5.0)
