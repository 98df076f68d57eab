"""``kill -9`` of the engine that writes, with answers under way; then it comes back at the same address. Comes last by name."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from tests.live import prompts
from tests.live.waiting import until
from tests.vllm.engine import MODEL, Engine, ask
from tests.vllm.service import Front

pytestmark = pytest.mark.vllm

STREAMS = 3
WHOLE = 2
TOKENS = 60


def test_its_answers_go_on_or_end_with_an_error_and_all_others_are_right(service: Front, client: openai.OpenAI) -> None:
    decode = service.engines[service.name_of_decode()]
    (prefill,) = (engine for engine in service.engines.values() if engine is not decode)
    questions = [f"{prompts.text(60)} Write two sentences about it." for _ in range(STREAMS + WHOLE)]
    before = {name: service.worker(name)["incarnation"] for name in service.engines}
    started: list[str] = []

    with ThreadPoolExecutor(STREAMS + WHOLE) as clients:
        streams = [clients.submit(read_stream, client, question, started) for question in questions[:STREAMS]]
        until(lambda: len(set(started)) == STREAMS, within_s=240)
        whole = [clients.submit(read_whole, client, question) for question in questions[STREAMS:]]
        until(lambda: decode.scrape().total("vllm:num_requests_running") > STREAMS, within_s=240)
        decode.kill()
        streamed = [one.result() for one in streams]
        answered = [one.result() for one in whole]

    right = [alone(prefill, question) for question in questions]
    for (text, is_broken), expected in zip(streamed, right[:STREAMS], strict=True):
        assert expected.startswith(text) if is_broken else text == expected
    assert answered == right[STREAMS:], "nothing of them was sent: they are begun anew"

    meanwhile = service.chat(prompts.text(30), max_tokens=4)
    assert meanwhile.path == "colocated"
    assert service.name_of(meanwhile.headers["x-twinpool-decode"]) == prefill.name

    decode.start()
    decode.wait_until_up()
    # Until it is seen the pairs are remembered as they were: proved, of an engine that is lost.
    until(lambda: service.worker(decode.name)["incarnation"] != before[decode.name], within_s=60)
    service.wait_until_proved()
    assert service.worker(prefill.name)["incarnation"] == before[prefill.name]
    moved = decode.moved_bytes()
    question = prompts.text(150)
    answer = service.chat(question, max_tokens=8)
    assert answer.path == "disaggregated"
    until(lambda: decode.moved_bytes() > moved, within_s=60)
    assert answer.text == alone(prefill, question, max_tokens=8)
    service.wait_until_idle(within_s=60)


def read_stream(client: openai.OpenAI, question: str, started: list[str]) -> tuple[str, bool]:
    """The text that came, and whether the stream ended with an error."""
    text = ""
    try:
        for chunk in client.chat.completions.create(**asked(question), stream=True):
            text += chunk.choices[0].delta.content or ""
            started.append(question)
    except openai.APIError:
        return text, True
    return text, False


def read_whole(client: openai.OpenAI, question: str) -> str:
    return client.chat.completions.create(**asked(question)).choices[0].message.content or ""


def asked(question: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": TOKENS}


def alone(engine: Engine, question: str, **fields: Any) -> str:
    """What one engine answers by itself, having read the prompt anew."""
    body = {**asked(question), "cache_salt": "read anew", **fields}
    status, answer = ask(f"{engine.url}/v1/chat/completions", body)
    assert status == 200, answer
    text: str = answer["choices"][0]["message"]["content"]
    return text
