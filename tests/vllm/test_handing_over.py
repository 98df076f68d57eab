"""What one engine read, the other goes on from: the same answer as from one engine alone, by KV that really moved."""

import math

import pytest
from tests.live import prompts
from tests.live.scrape import Scrape
from tests.live.waiting import until
from tests.vllm.engine import BLOCK_TOKENS, MODEL, ask, kv_bytes_a_token
from tests.vllm.service import Front

pytestmark = pytest.mark.vllm

# Around the borders of blocks, where a token too few or too many would show.
LENGTHS = (20, 60, 100, 126, 127, 128, 129, 130, 180, 200, 240, 254, 255, 256, 257, 300, 350, 384, 400, 513)


@pytest.mark.parametrize("length", LENGTHS)
def test_first_tokens_agree_with_one_engine_alone_and_their_kv_was_moved(service: Front, length: int) -> None:
    """Compared are log-probabilities: at a near tie two ways to the same sum may differ in the word.

    vLLM moves whole blocks of all prompt tokens, the last one's included, though decode computes that one again.
    """
    decode = service.engines[service.name_of_decode()]
    asked = {"prompt": prompts.tokens(length), "max_tokens": 1, "logprobs": 5}
    before, failed = decode.moved_bytes(), failed_decodes(service)
    answer = service.complete(**asked)
    assert answer.path == "disaggregated", answer
    assert answer.content["usage"]["prompt_tokens"] == length
    expected = math.ceil(length / BLOCK_TOKENS) * BLOCK_TOKENS * kv_bytes_a_token()
    until(lambda: decode.moved_bytes() > before, within_s=60)
    # an engine too busy to answer for its lease is not believed: then the prompt was read and moved again, as a whole
    tries = 1 + failed_decodes(service) - failed
    assert decode.moved_bytes() - before in [expected * times for times in range(1, int(tries) + 1)]

    salted = {"model": MODEL, "temperature": 0, "cache_salt": "read anew", **asked}
    status, alone = ask(f"{decode.url}/v1/completions", salted)
    assert status == 200, alone
    (found,), (told,) = answer.content["choices"], alone["choices"]
    (ours,), (theirs,) = found["logprobs"]["top_logprobs"], told["logprobs"]["top_logprobs"]
    (token,) = found["logprobs"]["tokens"]  # not the text: after half a character vLLM repeats the prompt there
    assert token in theirs, (ours, theirs)
    assert ours[token] == pytest.approx(theirs[token], abs=0.1)


def failed_decodes(service: Front) -> float:
    return Scrape(service.url).total("twinpool_leg_failures_total", leg="decode")


def test_whole_answers_agree_with_one_engine_alone(service: Front) -> None:
    text = f"{prompts.text(150)} Write one sentence about it."
    answer = service.chat(text, max_tokens=24)
    assert answer.path == "disaggregated"
    decode = service.engines[service.name_of_decode()]
    body = {"model": MODEL, "temperature": 0, "max_tokens": 24, "cache_salt": "read anew"}
    status, alone = ask(f"{decode.url}/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]})
    assert status == 200, alone
    assert answer.text == alone["choices"][0]["message"]["content"]
    assert answer.content["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]


def test_nothing_of_the_handoff_reaches_the_client(service: Front) -> None:
    answer = service.chat(prompts.text(20), max_tokens=2)
    assert answer.path == "disaggregated"
    assert not answer.content.get("kv_transfer_params")
    assert "remote_" not in str(answer)
