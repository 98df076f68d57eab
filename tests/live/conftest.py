"""One service for all tests here: a real model, read by one process and written by another, behind a real gateway."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from tests.live.service import Service, process, run, wait_for_clean_end, worker_of


@pytest.fixture(scope="session")
def service(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One prefill and one decode worker. At the end it must have ended well, and its whole journal must replay."""
    folder = tmp_path_factory.mktemp("service")
    journal = folder / "journal.jsonl"
    options = ["--expose-route", "--journal", str(journal), "--log", str(folder / "log")]
    if "TWINPOOL_TEST_MODEL" in os.environ:
        options += ["--model", str(default_model)]
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    began = time.monotonic()
    with process(folder, *options) as ready:
        took_s = time.monotonic() - began
        workers = {worker["role"]: worker_of(worker) for worker in ready["workers"]}
        gateway = ready["gateway"]
        yield Service(
            url=gateway["url"],
            model=gateway["models"][0],
            admin_url=ready["admin_url"],
            ready=ready,
            spawned_to_ready_s=took_s,
            load_when_spawned=load,
            journal=journal,
            prefill=workers["prefill"],
            decode=workers["decode"],
        )
    wait_for_clean_end(*workers.values())
    replayed = run("replay", str(journal))
    assert replayed.returncode == 0, replayed.stdout


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client
