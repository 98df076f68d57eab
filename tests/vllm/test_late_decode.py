"""A decode leg that comes after P's lease has ended: stock vLLM answers 200 from whatever lies in that memory now."""

from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from tests.live import prompts
from tests.vllm.engine import MODEL, ask
from tests.vllm.late import arrive_late
from tests.vllm.service import Front

from twinpool.core import events as on
from twinpool.core.journal import Step
from twinpool.core.model import Failure

pytestmark = pytest.mark.vllm

QUESTION = f"{prompts.text(300)} Tell in one sentence what the note is about."


def test_a_handoff_that_came_too_late_is_prefilled_again_and_no_token_of_it_is_seen(service: Front) -> None:
    decode = service.engines[service.name_of_decode()]
    (prefill,) = (engine for engine in service.engines.values() if engine is not decode)
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 24}
    status, alone = ask(f"{decode.url}/v1/chat/completions", {**body, "cache_salt": "read anew"})
    assert status == 200, alone
    with ThreadPoolExecutor(1) as clients:
        asking = clients.submit(service.chat, QUESTION, max_tokens=24)
        arrive_late(service.relays[decode.name], prefill)
        answer = asking.result()
    assert answer.text == alone["choices"][0]["message"]["content"]
    failures = [step.event.failure for step in steps(service) if isinstance(step.event, on.LegFailed)]
    assert Failure.SUSPECT in failures
    assert service.chat(QUESTION, max_tokens=24).text == answer.text, "the garbage stayed in the decode engine's cache"


def steps(service: Front) -> list[Step]:
    """What the journal has so far; its last line may not be whole yet."""
    lines = service.journal.read_bytes().split(b"\n")[1:-1]
    return [msgspec.json.decode(line, type=Step) for line in lines]
