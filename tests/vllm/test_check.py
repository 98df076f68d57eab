"""``twinpool check`` on a vLLM that does everything itself: its streams stand still while it reads a long prompt."""

import pytest
from tests.live.checked import interference
from tests.vllm.engine import Engine

pytestmark = pytest.mark.vllm

LONG_PROMPT_TOKENS = 700


def test_one_vllm_alone_has_interference(engines: tuple[Engine, Engine]) -> None:
    found, advice = interference(engines[0].url, long_prompt_tokens=LONG_PROMPT_TOKENS)
    assert found == "yes", advice
    assert advice.startswith("Disaggregation would help the gaps here")
