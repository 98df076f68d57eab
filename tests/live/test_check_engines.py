"""The check against real engines: a plain llama.cpp server, whose streams stand still while it reads, and Twinpool."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.live.checked import interference
from tests.live.service import Service

pytestmark = [pytest.mark.model, pytest.mark.timeout(400)]

LONG_PROMPT_TOKENS = 150


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


def test_a_plain_llama_cpp_server_has_it(llama: str) -> None:
    found, advice = interference(llama, long_prompt_tokens=LONG_PROMPT_TOKENS)
    assert found == "yes"
    assert advice.startswith("Disaggregation would help the gaps here")


def test_twinpool_has_it_not(service: Service) -> None:
    found, advice = interference(service.url, long_prompt_tokens=LONG_PROMPT_TOKENS)
    assert found == "no"
    assert advice.startswith("Disaggregation is on, and works")
    service.wait_until_idle()
