"""Two real vLLM engines for all tests here, and one gateway before them; skipped, loudly, where vLLM cannot run."""

from collections.abc import Iterator

import openai
import pytest
from tests.vllm import environment
from tests.vllm.engine import Engine, two_engines
from tests.vllm.service import Front, front

LEASE_S = 15
"""Long enough for a handoff on a busy machine, short enough to wait for its end."""


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    """The first test to ask pays for building the environment, two minutes once a machine, and for the start, one minute."""
    if reason := environment.cannot_run():
        pytest.skip(f"NO HANDOFF BETWEEN REAL vLLM ENGINES WAS TESTED: {reason}")
    environment.build()
    with two_engines(tmp_path_factory.mktemp("engines"), lease_s=LEASE_S) as both:
        yield both


@pytest.fixture(scope="session")
def service(engines: tuple[Engine, Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """Engine `a` reads prompts and `b` writes, at first. The whole journal must replay at the end."""
    with front(tmp_path_factory.mktemp("front"), *engines, lease_s=LEASE_S) as behind:
        yield behind


@pytest.fixture
def client(service: Front) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="any", max_retries=0, timeout=300) as client:
        yield client
