"""The check against real engines: a plain llama.cpp server, whose streams stand still while it reads, and Twinpool."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from tests.live.service import Service

from twinpool.bench.check import Asked, check_one, result_of
from twinpool.bench.target import target_of
from twinpool.config import Objectives
from twinpool.http1 import Pool

pytestmark = [pytest.mark.model, pytest.mark.timeout(400)]

ASKED = Asked(objectives=Objectives(long_prompt_tokens=150), duration_s=180.0)
"""Prompts of 200 tokens take about a second here, as long ones do on engines that are meant for them."""


@pytest.fixture
def llama(default_model: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [sys.executable, str(Path(__file__).with_name("llama_server.py")), str(default_model), str(port), "0"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def interference(url: str) -> tuple[str, str]:
    async def run() -> tuple[str, str]:
        pool = Pool()
        try:
            result = result_of(await check_one(pool, target_of(url), ASKED, enough_long=8, enough_windows=0), ASKED)
        finally:
            await pool.close()
        return result["interference"]["found"], result["advice"]

    return uvloop.run(run())


def test_a_plain_llama_cpp_server_has_it(llama: str) -> None:
    found, advice = interference(llama)
    assert found == "yes"
    assert advice.startswith("Disaggregation would help the gaps here")


def test_twinpool_has_it_not(service: Service) -> None:
    found, advice = interference(service.url)
    assert found == "no"
    assert advice.startswith("Disaggregation is on, and works")
    service.wait_until_idle()
