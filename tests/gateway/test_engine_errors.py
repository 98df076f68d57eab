"""What an engine says is passed on when it is about the request, tried elsewhere when it is about the engine, and never taken
for an answer when it is neither."""

import gzip
import json
from typing import Any

import pytest
from tests.gateway.house import House, house, text_of, told

from twinpool.config import Routing
from twinpool.engines.scripted import Default, Recorded, Reply, Script, ScriptedEngine

QUICK = Routing(pause_s=0.02, queue_timeout_s=5.0)
LEGS = ["prefill", "decode", "whole"]
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def pools(leg: str, engines: int = 1) -> dict[str, int]:
    """So many engines that could serve that leg, and what it needs beside them."""
    return {"colocated": engines} if leg == "whole" else {"prefill": 1, "decode": 1, leg: engines}


def first(h: House, leg: str) -> ScriptedEngine:
    return {"prefill": h.prefill, "decode": h.decode, "whole": h.colocated}[leg][0]


def everyone(h: House, leg: str) -> list[ScriptedEngine]:
    return {"prefill": h.prefill, "decode": h.decode, "whole": h.colocated}[leg]


def refusal(status: int) -> Reply:
    """With a body and a Retry-After of its own."""
    return Reply.error(status, f"the engine's own words for {status}", headers=((b"retry-after", b"7"), (b"x-private", b"1")))


@STREAM
@pytest.mark.parametrize("leg", LEGS)
@pytest.mark.parametrize("status", [400, 403, 404, 413, 422])
async def test_what_is_the_requests_fault_is_passed_on_word_for_word_and_not_tried_again(
    status: int, leg: str, stream: bool
) -> None:
    async with house(**pools(leg, 2)) as h:
        for engine in everyone(h, leg):
            engine.script.replies.append(refusal(status))
        answer = await h.chat(stream=stream)
        assert answer.status == status
        assert answer.body == refusal(status).body
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["retry-after"] == "7"
        assert "x-private" not in answer.headers
        assert answer.headers["x-request-id"]
        assert sum(len(engine.recorded) for engine in everyone(h, leg)) == 1
        assert await h.outcomes() == {"rejected": 1}
        assert first(h, leg).script.replies or everyone(h, leg)[1].script.replies, "only one of them was asked"


@STREAM
@pytest.mark.parametrize("leg", LEGS)
@pytest.mark.parametrize("status", [429, 503])
async def test_back_pressure_is_no_death_and_no_error(status: int, leg: str, stream: bool) -> None:
    async with house(**pools(leg, 2), routing=QUICK) as h:
        for engine in everyone(h, leg):
            engine.script.replies.extend([Reply.error(status, headers=((b"retry-after", b"0"),))] * 3)
        for n in range(8):  # more than an engine that fails is tried
            answer = await h.chat(f"m{n}", stream=stream)
            assert answer.status == 200
            assert (text_of(answer.events) if stream else answer.text) == told(f"m{n}")
        assert len(set(h.presented())) == len(h.presented())
        assert await h.metric("twinpool_leg_failures_total", failure="busy", leg=leg) >= 2
        assert all(worker.story.state == "ready" for worker in h.controller.cluster)
        assert await h.outcomes() == {"ok": 8}


@STREAM
async def test_a_worker_that_is_at_its_limit_is_asked_again_for_as_long_as_the_request_may_wait(stream: bool) -> None:
    async with house(colocated=1, routing=QUICK) as h:
        h.c.script.replies.extend([Reply.error(503)] * 5)
        answer = await h.chat("n2", stream=stream)
        assert (text_of(answer.events) if stream else answer.text) == told("n2")
        assert len(h.c.recorded) == 6, "more often than an engine that fails"


async def test_a_worker_that_is_at_its_limit_is_left_alone_for_as_long_as_it_asks() -> None:
    async with house(colocated=1, routing=QUICK) as h:
        h.c.script.replies.append(Reply.error(503, headers=((b"retry-after", b"1"),)))
        assert (await h.chat("n3")).text == told("n3")
        refused, served = (recorded.arrived_at for recorded in h.c.recorded)
        assert 1.0 <= served - refused < 1.5


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_back_pressure_of_one_pool_does_not_send_its_work_to_the_other(leg: str) -> None:
    async with house(prefill=1, decode=1, routing=QUICK) as h:
        first(h, leg).script.replies.append(Reply.error(503))
        assert (await h.chat("n2")).headers["x-twinpool-path"] == "disaggregated"


@STREAM
async def test_workers_that_stay_at_their_limit_are_a_503_with_retry_after(stream: bool) -> None:
    async with house(colocated=2, routing=Routing(pause_s=0.05, queue_timeout_s=0.25)) as h:
        for engine in h.colocated:
            engine.script.on_request = lambda recorded: Reply.error(429)
        answer = await h.chat(stream=stream)
        assert (answer.status, answer.error["code"]) == (503, "queue_timeout")
        assert int(answer.headers["retry-after"]) > 0
        assert await h.outcomes() == {"refused": 1}


@STREAM
@pytest.mark.parametrize("leg", LEGS)
async def test_a_500_is_tried_elsewhere(leg: str, stream: bool) -> None:
    async with house(**pools(leg, 2)) as h:
        first(h, leg).script.on_request = lambda recorded: Reply.error(500)
        answer = await h.chat("n4", stream=stream)
        assert (text_of(answer.events) if stream else answer.text) == told("n4")
        assert [len(engine.recorded) for engine in everyone(h, leg)] == [1, 1]
        assert await h.outcomes() == {"ok": 1}


@STREAM
@pytest.mark.parametrize("leg", LEGS)
async def test_a_500_from_everyone_is_passed_on_and_evicts_nobody(leg: str, stream: bool) -> None:
    async with house(**pools(leg, 3)) as h:

        def poison(recorded: Recorded) -> Reply | None:
            return refusal(500) if "n5" in json.dumps(recorded.body["messages"]) else None

        for engine in everyone(h, leg):
            engine.script.on_request = poison
        for _ in range(4):
            answer = await h.chat("n5", stream=stream)
            assert (answer.status, answer.body) == (500, refusal(500).body)
            assert (await h.chat("n6")).text == told("n6")
        assert all(worker.story.state == "ready" for worker in h.controller.cluster)
        assert await h.outcomes() == {"failed": 4, "ok": 4}


@STREAM
@pytest.mark.parametrize("leg", ["decode", "whole"])
@pytest.mark.parametrize("reason", ["error", "abort"])
async def test_a_200_that_says_it_failed_is_tried_again_while_nothing_was_sent(reason: str, leg: str, stream: bool) -> None:
    def bad(recorded: Recorded) -> Default:
        return Default(finish_reason=reason, stops_after_events=None)

    async with house(**pools(leg, 2)) as h:
        engine = first(h, leg)
        if stream:  # before its first token
            event = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"%b"}]}\n\n' % reason.encode()
            engine.script.replies.append(Reply.stream(event, b"data: [DONE]\n\n"))
        else:
            engine.script.replies.append(bad(Recorded("", "", {}, None, b"", 0, 1, 1)))
        answer = await h.chat("n7", stream=stream)
        assert (text_of(answer.events) if stream else answer.text) == told("n7")
        assert [len(engine.recorded) for engine in everyone(h, leg)] == [1, 1]


@pytest.mark.parametrize("leg", ["decode", "whole"])
@pytest.mark.parametrize("reason", ["error", "abort"])
async def test_a_200_that_says_it_failed_is_no_success_when_everyone_says_so(reason: str, leg: str) -> None:
    async with house(**pools(leg)) as h:
        first(h, leg).script.on_request = lambda recorded: Default(finish_reason=reason)
        answer = await h.chat()
        assert answer.status == 502
        assert answer.error["code"] == "upstream_failed"
        assert await h.outcomes() == {"failed": 1}


async def test_a_clients_mistakes_are_never_held_against_a_worker() -> None:
    async with house(prefill=Script(max_model_tokens=50), decode=1) as h:
        for _ in range(20):
            answer = await h.chat(" ".join(["word"] * 60))
            assert answer.status == 400
            assert "maximum context length" in answer.error["message"]
        assert (await h.chat("n8")).text == told("n8")
        assert len(h.p.recorded) == 21
        assert await h.outcomes() == {"rejected": 20, "ok": 1}


@pytest.mark.parametrize(
    "raw",
    [b"HTTP/1.1 200 OK\r\nbad", b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n[[[[[", b"\0" * 100],
    ids=["half", "ssh", "short", "zeros"],
)
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_what_is_no_http_or_no_json_is_tried_elsewhere(raw: bytes, leg: str) -> None:
    async with house(**pools(leg, 2)) as h:
        first(h, leg).script.replies.append(Reply(chunks=((0, raw),), is_raw=True))
        assert (await h.chat("n9")).text == told("n9")
        assert await h.outcomes() == {"ok": 1}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_what_is_compressed_though_nobody_asked_for_that_is_tried_elsewhere(stream: bool) -> None:
    async with house(colocated=2) as h:
        headers = ((b"content-type", b"application/json"), (b"content-encoding", b"gzip"))
        h.c.script.replies.append(Reply(headers=headers, body=gzip.compress(b'{"choices":[]}')))
        answer = await h.chat("n9", stream=stream)
        assert (text_of(answer.events) if stream else answer.text) == told("n9")
        assert len(h.c.recorded) == 1
        assert await h.outcomes() == {"ok": 1}


async def test_an_engines_error_names_no_engine() -> None:
    """The topology is nobody's business."""
    async with house(prefill=1, decode=1, server={"expose_route": False}) as h:
        h.d.script.on_request = lambda recorded: Default(finish_reason="error")
        answers: list[Any] = [await h.chat(), await h.chat("n10", stream=True)]
        h.d.script.on_request = None
        answers.append(await h.chat())
        for answer in answers:
            assert not [name for name in answer.headers if name.startswith("x-twinpool")]
            assert str(h.d.port).encode() not in answer.body


@STREAM
@pytest.mark.parametrize("leg", LEGS)
@pytest.mark.parametrize("count", ["prompt_tokens", "completion_tokens"])
@pytest.mark.parametrize("lie", [-5, 10**400], ids=["negative", "endless"])
async def test_a_usage_that_counts_no_tokens_is_the_client_s_to_read_and_counted_nowhere(
    lie: int, count: str, leg: str, stream: bool
) -> None:
    async with house(**pools(leg)) as h:
        await h.proved()
        told_usage = f'"usage":{{"prompt_tokens":4,"completion_tokens":1,"{count}":{lie}}}'
        if leg == "prefill":
            first(h, leg).script.replies.append(Default(usage={count: -5}))
        elif stream:
            choice = '"choices":[{"index":0,"delta":{"content":"n1"},"finish_reason":"stop"}]'
            end = f'data: {{"choices":[],{told_usage}}}\n\ndata: [DONE]\n\n'
            first(h, leg).script.replies.append(Reply.stream(f"data: {{{choice}}}\n\n".encode(), end.encode()))
        else:
            choice = '"choices":[{"index":0,"message":{"content":"n1"},"finish_reason":"stop"}]'
            body = f"{{{choice},{told_usage}}}".encode()
            first(h, leg).script.replies.append(Reply(body=body, pulls_kv=True))
        answer = await h.chat("n1", stream=stream)
        assert answer.status == 200
        assert (await h.chat("n2")).text == told("n2")
        assert await h.outcomes() == {"ok": 2}


@pytest.mark.parametrize("count", [b"inf", b"nan", b"1e400", b"9" * 5000, b"-1"])
async def test_a_handoff_that_counts_nothing_in_its_head_is_an_answer_all_the_same(count: bytes) -> None:
    async with house(prefill=1, decode=1) as h:
        headers = (
            (b"content-type", b"application/json"),
            (b"x-twinpool-handoff-bytes", count),
            (b"x-twinpool-handoff-s", count),
        )
        body = b'{"choices":[{"index":0,"message":{"content":"n1"},"finish_reason":"stop"}]}'
        h.d.script.replies.append(Reply(headers=headers, body=body, pulls_kv=True))
        assert (await h.chat("n1")).text == "n1"
