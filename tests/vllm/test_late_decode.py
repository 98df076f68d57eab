"""A decode leg that comes after P's lease has ended: stock vLLM answers 200 from whatever lies in that memory now."""

import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from tests.live import prompts
from tests.vllm.conftest import LEASE_S
from tests.vllm.engine import BLOCK_TOKENS, BLOCKS, MODEL, Engine, ask
from tests.vllm.service import Front

from twinpool.core import events as on
from twinpool.core.journal import Step
from twinpool.core.model import Failure

pytestmark = pytest.mark.vllm

QUESTION = f"{prompts.text(300)} Tell in one sentence what the note is about."


def write_over(prefill: Engine, until: threading.Event) -> None:
    """Let the engine read prompts of others until every block of its memory has been used anew, at least."""
    read = 0
    while not until.is_set() or read < 2 * BLOCKS * BLOCK_TOKENS:
        body = {"model": MODEL, "prompt": prompts.tokens(750), "max_tokens": 1}
        assert ask(f"{prefill.url}/v1/completions", body)[0] == 200
        read += 750


def test_a_handoff_that_came_too_late_is_prefilled_again_and_no_token_of_it_is_seen(service: Front) -> None:
    decode = service.engines[service.name_of_decode()]
    (prefill,) = (engine for engine in service.engines.values() if engine is not decode)
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 24}
    status, alone = ask(f"{decode.url}/v1/chat/completions", {**body, "cache_salt": "read anew"})
    assert status == 200, alone
    expired = prefill.expired()
    network = service.relays[decode.name]
    answered = threading.Event()
    network.delay_next(LEASE_S + 5.0)
    with ThreadPoolExecutor(1) as others:
        writing = others.submit(write_over, prefill, answered)
        try:
            answer = service.chat(QUESTION, max_tokens=24)
        finally:
            answered.set()
        writing.result()
    assert answer.text == alone["choices"][0]["message"]["content"]
    assert prefill.expired() > expired
    failures = [step.event.failure for step in steps(service) if isinstance(step.event, on.LegFailed)]
    assert Failure.SUSPECT in failures


def steps(service: Front) -> list[Step]:
    """What the journal has so far; its last line may not be whole yet."""
    lines = service.journal.read_bytes().split(b"\n")[1:-1]
    return [msgspec.json.decode(line, type=Step) for line in lines]
