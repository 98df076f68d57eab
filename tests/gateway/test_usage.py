"""Every stream is asked for its usage; a client sees it only where it asked itself, and no other byte is changed."""

import json
from typing import Any

import msgspec
import pytest
from tests.core.stage import worker
from tests.gateway.house import CHAT, chat, house, raw_fields, text_of, told

from twinpool.config import Balance, BalanceMode, Routing, RoutingPolicy
from twinpool.engines.scripted import Reply, Script
from twinpool.gateway.usage import asking_for_usage, knows_the_wish, without_usage

USAGE = b'{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9}'
TOKENS = (
    b'data: {"id":"x","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}],"usage":null}\n\n'
    b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"\\"usage\\": {} \\"choices\\":[]"},"finish_reason":null}]}\n\n'
    b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"data:"},"finish_reason":"stop"}],"usage":' + USAGE + b"}\n\n"
)
ALONE = b'data: {"id":"x","choices": [],"usage":' + USAGE + b"}\n\n"
DONE = b"data: [DONE]\n\n"


def crlf(events: bytes) -> bytes:
    return events.replace(b"\n\n", b"\r\n\r\n")


# The wish


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (None, b'{"include_usage":true}'),
        (b"null", b'{"include_usage":true}'),
        (b"{}", b'{"include_usage":true}'),
        (b'{"include_usage": false}', b'{"include_usage":true}'),
        (b'{"x":1.0, "include_usage":null}', b'{"x":1.0,"include_usage":true}'),
        (b'{"include_usage":true}', None),
        (b'{"include_usage":"yes"}', None),  # the engine's to refuse
        (b'{"continuous_usage_stats":true}', None),  # it would come in every event
        (b'"x"', None),
        (b"[]", None),
    ],
)
def test_what_an_engine_is_asked(given: bytes | None, asked: bytes | None) -> None:
    fields = {"stream": msgspec.Raw(b"true")} | ({} if given is None else {"stream_options": msgspec.Raw(given)})
    found = asking_for_usage(fields)
    assert (None if found is None else bytes(found["stream_options"])) == asked


# What is taken out


@pytest.mark.parametrize("form", [bytes, crlf])
def test_the_event_that_has_it_alone_and_nothing_else_is_taken_out(form: Any) -> None:
    assert without_usage(form(TOKENS + ALONE + DONE)) == form(TOKENS + DONE)
    assert without_usage(form(ALONE)) == b""
    assert without_usage(form(TOKENS)) == form(TOKENS)


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices":[],"usage":null}\n\n',
        b'data: {"choices":[],"prompt_filter_results":[{"x":"usage"}]}\n\n',
        b': "usage" "choices":[]\n\n',
        b'data: {"choices":[],"usage":{"a":1}}\ndata: more\n\n',
        b'data: {"choices":[],"usage":{"a":1}',
    ],
)
def test_what_is_not_that_stays(event: bytes) -> None:
    assert without_usage(event) == event


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("form", [bytes, crlf])
async def test_however_a_stream_is_cut_its_bytes_are_the_engines_but_for_that_event(size: int, form: Any) -> None:
    sent = form(TOKENS + ALONE + DONE)
    pieces = [sent[at : at + size] for at in range(0, len(sent), size)]
    async with house(colocated=1) as h:
        for wants, seen in ((False, form(TOKENS + DONE)), (True, sent)):
            h.c.script.replies.append(Reply.stream(*pieces))
            options = {"stream_options": {"include_usage": True}} if wants else {}
            answer = await h.chat("n1", stream=True, **options)
            assert answer.body == seen
        assert await h.metric("twinpool_prompt_tokens_total") == 14, "both were counted"


async def test_a_client_that_did_not_ask_is_told_nothing_over_either_way() -> None:
    async with house(prefill=1, decode=1, colocated=1) as h:
        for nonce, body in (("n1", {}), ("n2", {"n": 2}), ("n3", {"stream_options": {"include_usage": False}})):
            answer = await h.chat(nonce, stream=True, **body)
            assert answer.events[-1] == "[DONE]"
            assert not any("usage" in event for event in answer.events[:-1])
        asked = [recorded for engine in h.engines.values() for recorded in engine.recorded if recorded.body.get("stream")]
        assert [json.loads(raw_fields(recorded)["stream_options"]) for recorded in asked] == [{"include_usage": True}] * 3


async def test_an_engine_that_may_not_know_the_wish_is_not_asked() -> None:
    async with house(colocated=Script(kind="openai"), is_stock=True) as h:
        answer = await h.chat("n1", stream=True)
        assert text_of(answer.events) == told("n1")
        assert "stream_options" not in raw_fields(h.c.last)
        sent = await h.ask(CHAT, chat("n2", stream=True, stream_options={"include_usage": True}))
        assert sent.events[-2]["usage"]["completion_tokens"] == 16


# What is learnt of it


def learning() -> dict[str, Any]:
    return {"balance": Balance(mode=BalanceMode.AUTO), "routing": Routing(policy=RoutingPolicy.LEAST_COST)}


STREAM, WHOLE = {"stream": True}, {"stream": False}


@pytest.mark.parametrize("asked", [STREAM, WHOLE], ids=["streamed", "not streamed"])
@pytest.mark.parametrize("is_pair", [False, True])
async def test_costs_are_learnt_from_any_traffic(asked: dict[str, Any], is_pair: bool) -> None:
    scripts = [Script(prefill_s_per_token=0.001, token_interval_s=0.002, answer_tokens=32) for _ in range(2)]
    engines: dict[str, Any] = {"prefill": scripts[0], "decode": scripts[1]} if is_pair else {"colocated": scripts[0]}
    async with house(**engines, **learning()) as h:
        for n in range(40):
            messages = [{"role": "user", "content": "word " * (5 + 7 * n % 40)}]
            assert (await h.chat(messages=messages, max_tokens=8 + n % 24, **asked)).status == 200
        costs, _ = h.controller.learnt()
        (found,) = costs.values()
        assert found.step_s + found.step_sequence_s > 0.001
        assert found.read_token_s > 0


async def test_where_the_engine_tells_no_usage_events_are_counted() -> None:
    script = Script(kind="openai", prefill_s_per_token=0.001, token_interval_s=0.002)
    async with house(colocated=script, is_stock=True, **learning()) as h:
        for n in range(40):
            assert (await h.chat(f"n{n}", stream=True)).status == 200
        assert len(h.controller.learnt()[0]) == 1
        finished = [event for line in h.journal.read_text().splitlines()[1:] if (event := json.loads(line)["event"])]
        counted = [event["written"] for event in finished if event["type"] == "RequestFinished"]
        assert set(counted) <= {15, 16, 17}
        assert await h.metric("twinpool_prompt_tokens_total") == 0, "an estimate is no count"


def test_kinds_that_are_told_apart_know_the_wish() -> None:
    kinds = ("embedded", "vllm", "sglang", "llama.cpp", "openai", "")
    known = [kind for kind in kinds if knows_the_wish(msgspec.structs.replace(worker("d1"), kind=kind))]
    assert known == ["embedded", "vllm", "sglang"]
