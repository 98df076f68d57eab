"""A stream: every event at once, and never a broken answer that looks like a whole one."""

import asyncio
from dataclasses import replace
from itertools import repeat
from typing import Any

import pytest
from tests.gateway.house import CHAT, House, Stream, chat, finish_reasons, house, parse_events, text_of, told, until

from twinpool.config import Timeouts
from twinpool.engines.scripted import Default, End, Reply, Script

POOLS = [pytest.param({"prefill": 1, "decode": 1}, id="disaggregated"), pytest.param({"colocated": 1}, id="colocated")]
BREAKS = [End.RESET, End.CLOSE, End.HANG]


def answers_with(h: House) -> Script:
    """The script of the engine that writes the tokens."""
    return (h.decode or h.colocated)[0].script


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("extra", [{}, {"logprobs": True, "top_logprobs": 2}], ids=["plain", "logprobs"])
async def test_each_event_is_at_the_client_before_the_engine_writes_the_next(pools: dict[str, int], extra: Any) -> None:
    async with house(**pools) as h:
        steps = answers_with(h).steps = asyncio.Semaphore(1)  # the head comes with the first token
        async with h.stream("n2", max_tokens=6, **extra) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert (await stream.event())["choices"][0]["delta"]["role"] == "assistant"
            got = [await stream.event()]
            for _ in range(5):
                steps.release()
                got.append(await stream.event())
            assert text_of(got) == told("n2", 6)
            assert all(event["choices"][0]["logprobs"] for event in got) == bool(extra)
            assert finish_reasons(await stream.rest()) == ["length"]


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("pools", POOLS)
async def test_the_edges_of_an_engines_packets_change_nothing(pools: dict[str, int], size: int) -> None:
    whole = b"".join(
        b"data: " + event + b"\n\n"
        for event in (
            b'{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}',
            '{"choices":[{"index":0,"delta":{"content":"жук"}}]}'.encode(),
            b'{"choices":[{"index":0,"delta":{"content":" {\\"error\\""}}]}',
            b'{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}',
            b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}',
            b"[DONE]",
        )
    )
    async with house(**pools) as h:
        answers_with(h).replies.append(Reply.stream(*(whole[at : at + size] for at in range(0, len(whole), size))))
        answer = await h.chat(stream=True, stream_options={"include_usage": True})
        assert answer.body == whole
        assert await h.outcomes() == {"ok": 1}


@pytest.mark.parametrize("end", BREAKS)
@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("tokens", [1, 4])
async def test_a_stream_that_breaks_ends_in_one_error_and_no_invented_end(pools: dict[str, int], end: End, tokens: int) -> None:
    async with house(**pools, timeouts=Timeouts(idle_s=0.1)) as h:
        answers_with(h).replies.append(Default(stops_after_events=1 + tokens, end=end))
        answer = await h.chat("n3", stream=True)
        *events, last = answer.events
        assert answer.status == 200
        assert text_of(events) == told("n3", tokens)
        assert last["error"]["code"] == "upstream_failed"
        assert "[DONE]" not in events
        assert finish_reasons(events) == []
        assert sum("error" in event for event in answer.events) == 1
        assert await h.outcomes() == {"failed": 1}
        assert await h.metric("twinpool_e2e_seconds_count") == 0


@pytest.mark.parametrize("pools", POOLS)
async def test_a_stream_without_its_done_is_broken(pools: dict[str, int]) -> None:
    events = [b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'] * 3
    async with house(**pools) as h:
        answers_with(h).replies.append(Reply.stream(*events))
        answer = await h.chat(stream=True)
        assert text_of(answer.events) == "aaa"
        assert answer.events[-1]["error"]["code"] == "upstream_failed"
        assert await h.outcomes() == {"failed": 1}


async def test_a_broken_stream_still_tells_its_ttft() -> None:
    async with house(prefill=1, decode=1) as h:
        h.d.script.replies.append(Default(stops_after_events=4, end=End.RESET))
        assert "error" in (await h.chat(stream=True)).events[-1]
        assert await h.metric("twinpool_ttft_seconds_count") == 1
        parts = await h.metric("twinpool_ttft_part_seconds_sum")
        assert parts == pytest.approx(await h.metric("twinpool_ttft_seconds_sum"))
        assert await h.metric("twinpool_itl_seconds_count") == 2


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("reason", ["error", "abort"])
async def test_a_bad_finish_reason_is_a_failure_that_the_client_can_see(pools: dict[str, int], reason: str) -> None:
    async with house(**pools) as h:
        answers_with(h).replies.append(Default(finish_reason=reason))
        answer = await h.chat(stream=True)
        assert any(isinstance(event, dict) and "error" in event for event in answer.events)
        assert await h.outcomes() == {"failed": 1}


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("cut", [0, 3, 12, 20])
async def test_an_engines_own_error_in_a_stream_reaches_the_client_once(pools: dict[str, int], cut: int) -> None:
    token = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    error = b'data: {"error":{"message":"out of memory","type":"server_error","param":null,"code":500}}\n\n'
    async with house(**pools) as h:
        parts = [token, error[:cut], error[cut:], b"data: [DONE]\n\n"]
        answers_with(h).replies.append(Reply.stream(*filter(None, parts)))
        answer = await h.chat(stream=True)
        errors = [event for event in answer.events if isinstance(event, dict) and "error" in event]
        assert [event["error"]["message"] for event in errors] == ["out of memory"]
        assert await h.outcomes() == {"failed": 1}


@pytest.mark.parametrize("end", BREAKS)
@pytest.mark.parametrize("events", [0, 1])
async def test_what_breaks_before_its_first_token_is_begun_anew_and_leaves_no_trace(end: End, events: int) -> None:
    """After the role alone, or before anything."""
    async with house(prefill=1, decode=2, timeouts=Timeouts(idle_s=0.1)) as h:
        h.d.script.replies.append(Default(stops_after_events=events, end=end))
        answer = await h.chat("n4", stream=True)
        assert text_of(answer.events) == told("n4")
        assert answer.body.count(b'"role"') == 1
        assert answer.events[-1] == "[DONE]"
        assert len(set(h.presented())) == len(h.presented()) == 2
        assert await h.outcomes() == {"ok": 1}


async def test_a_slow_reader_holds_the_engine_back_and_costs_no_memory() -> None:
    event = b"data: " + b'{"choices":[{"index":0,"delta":{"content":"%b"}}]}' % (b"x" * 65_000) + b"\n\n"
    total = 200_000_000
    written = 0

    def events() -> Any:
        nonlocal written
        while written < total:
            written += len(event)
            yield 0.0, event
        yield 0.0, b"data: [DONE]\n\n"

    async with house(prefill=1, decode=1) as h:
        h.d.script.replies.append(replace(Reply.stream(), chunks=events()))
        async with await h.connect() as wire:
            wire.reader._limit = 1 << 16  # type: ignore[attr-defined]
            wire.post(chat(stream=True))
            seen = -1
            while seen != written or not written:  # until the engine has been stopped
                seen = written
                await _some_turns()
            assert written < 32_000_000, "sockets hold some megabytes each, and nobody else should hold more"
            read = 0
            while read < total:
                data = await asyncio.wait_for(wire.reader.read(1 << 20), 5)
                assert data
                read += len(data)
        assert written >= total


async def _some_turns() -> None:
    done = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.1, done.set_result, None)
    await done


async def test_a_slow_reader_that_leaves_frees_the_engine() -> None:
    event = b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % (b"x" * 65_000)
    async with house(prefill=1, decode=1) as h:
        h.d.script.replies.append(replace(Reply.stream(), chunks=repeat((0.0, event))))
        async with await h.connect() as wire:
            wire.post(chat(stream=True))
            await until(lambda: h.d.running == 1 and h.load("d0")[2] == 1)
            await wire.reader.readuntil(b"data: ")
            left = await wire.leave()
        await until(lambda: h.d.running == 0, 1)
        assert h.d.last.disconnected_at is not None
        assert h.d.last.disconnected_at - left < 1


@pytest.mark.parametrize("pools", POOLS)
async def test_an_answer_without_a_token_is_whole(pools: dict[str, int]) -> None:
    events = [b'data: {"choices":[{"index":0,"delta":{"role":"assistant"},"finish_reason":"stop"}]}\n\n', b"data: [DONE]\n\n"]
    async with house(**pools) as h:
        answers_with(h).replies.append(Reply.stream(*events))
        assert (await h.ask(CHAT, chat(stream=True))).body == b"".join(events)
        assert await h.outcomes() == {"ok": 1}


async def test_usage_comes_as_the_engine_counted_it() -> None:
    async with house(prefill=1, decode=1) as h:
        answer = await h.chat("n5", stream=True, max_tokens=3, stream_options={"include_usage": True})
        assert answer.events[-2]["usage"]["completion_tokens"] == 3
        assert answer.events[-2]["usage"]["prompt_tokens"] == 4


async def test_other_streams_go_on_when_one_breaks() -> None:
    async with house(prefill=1, decode=1) as h:
        steps = h.d.script.steps = asyncio.Semaphore(1)
        async with h.stream("n6", max_tokens=2) as held:
            await held.event()
            h.d.script.steps = None
            h.d.script.replies.append(Default(stops_after_events=3, end=End.CLOSE))
            assert "error" in (await h.chat("n7", stream=True)).events[-1]
            steps.release()
            assert text_of(await _whole(held)) == told("n6", 2)


async def _whole(stream: Stream) -> list[Any]:
    return parse_events(await stream.response.content.read())
