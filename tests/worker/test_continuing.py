"""Going on behind a text that another engine wrote: what comes out again is dropped, wherever the pieces were cut."""

import itertools
import json
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.errors import BadRequestError
from twinpool.worker.asked import parse
from twinpool.worker.continuing import OtherwiseError, as_first, body_behind, skip_sent, writes_again
from twinpool.worker.engine import packed
from twinpool.worker.prompt import Prompt

ANSWER = "The sea is wide."


def chat_event(text: str | None, finish: str | None = None) -> bytes:
    delta = {} if text is None else {"content": text}
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}).encode()


async def stream(*events: bytes) -> AsyncIterator[bytes]:
    for event in events:
        yield event


def pieces(text: str, cuts: set[int]) -> list[str]:
    edges = [0, *sorted(cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


async def rest_of(events: AsyncIterator[bytes]) -> str:
    deltas = [json.loads(event[6:])["choices"][0]["delta"] for event in [event async for event in events]]
    return "".join(delta.get("content") or "" for delta in deltas)


@given(st.integers(0, len(ANSWER)), st.sets(st.integers(1, len(ANSWER) - 1)))
async def test_only_what_is_behind_the_sent_text_comes_out(sent: int, cuts: set[int]) -> None:
    events = stream(chat_event(None), *map(chat_event, pieces(ANSWER, cuts)), chat_event(None, "stop"))
    assert await rest_of(skip_sent(events, ANSWER[:sent])) == ANSWER[sent:]


@pytest.mark.parametrize("sent", ["The lake", "The sea is wide. And", "the"])
async def test_an_answer_that_comes_out_otherwise_is_noticed(sent: str) -> None:
    events = stream(*map(chat_event, ["The", " sea", " is wide."]), chat_event(None, "stop"), b"data: [DONE]")
    with pytest.raises(OtherwiseError):
        await rest_of(skip_sent(events, sent))


def asked_for(**fields: object):  # type: ignore[no-untyped-def]
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True, **fields}
    return parse("chat", json.dumps(body).encode(), "m")


@pytest.mark.parametrize(
    ("fields", "again"), [({"temperature": 0}, True), ({"seed": 1}, True), ({}, False), ({"temperature": 0.5}, False)]
)
def test_only_an_answer_that_comes_out_the_same_is_written_again(fields: dict[str, object], again: bool) -> None:
    assert writes_again(asked_for(**fields)) is again


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": False},
        {"n": 2},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"logprobs": True},
        {"twinpool_continue": {}},
        {"twinpool_continue": "text"},
    ],
)
def test_what_cannot_be_gone_on_with_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(BadRequestError):
        asked_for(**{"twinpool_continue": {"text": "The"}, **fields})


def test_the_rest_is_asked_for_behind_the_replayed_tokens() -> None:
    prompt = Prompt(packed([1, 2]))
    body = {"messages": [], "max_tokens": 10, "id_slot": 1, "temperature": 1}
    assert body_behind(body, prompt, [3, 4]) == {"prompt": [1, 2, 3, 4], "max_tokens": 8, "id_slot": 1, "temperature": 1}
    with pytest.raises(BadRequestError):
        body_behind({**body, "max_tokens": 2}, prompt, [3, 4])
    with pytest.raises(BadRequestError):
        body_behind({**body, "grammar": "root ::= x"}, prompt, [3])


def test_the_rest_looks_like_the_route_s_own_answer_and_counts_the_whole() -> None:
    usage = {"completion_tokens": 5, "prompt_tokens": 9}
    event = (
        b"data: " + json.dumps({"object": "text_completion", "choices": [{"index": 0, "text": "!"}], "usage": usage}).encode()
    )
    told = json.loads(as_first(event, asked_for(), 3)[6:])
    assert told["object"] == "chat.completion.chunk"
    assert told["choices"] == [{"index": 0, "delta": {"content": "!"}}]
    assert told["usage"]["completion_tokens"] == 8
