"""The beginning and the end of a stream, wherever the network cut its bytes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.engines.events import Opening, read_closing, read_error, read_opening

_ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
_TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
_STOP = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
_USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n'
_DONE = b"data: [DONE]\n\n"


def _event(choice: dict[str, object]) -> bytes:
    return b"data: %b\n\n" % json.dumps({"choices": [choice]}).encode()


@pytest.mark.parametrize(
    "event",
    [
        _TOKEN,
        _event({"text": "a"}),
        _event({"delta": {"reasoning_content": "hm"}}),
        _event({"delta": {"reasoning": "hm"}}),
        _event({"delta": {"tool_calls": [{"index": 0}]}}),
        b'data: {"a shape": "nobody knows", "choices": 3}\n\n',
        _TOKEN.replace(b"\n", b"\r\n"),
    ],
)
def test_the_first_event_with_content_opens_the_stream(event: bytes) -> None:
    assert read_opening(_ROLE + event)[0] is Opening.CONTENT


@pytest.mark.parametrize("data", [b"", _ROLE, _TOKEN[:-1], b": ping\n\n", _STOP, _USAGE, _DONE, _event({"text": ""})])
def test_before_it_nothing_does(data: bytes) -> None:
    assert read_opening(data)[0] is Opening.NOTHING


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"error":{"message":"m","code":500}}\n\n',
        b'error: {"message":"m"}\n\n',
        _event({"delta": {}, "finish_reason": "error"}),
        _event({"delta": {}, "finish_reason": "abort"}),
    ],
)
def test_an_error_before_the_first_token_is_seen(event: bytes) -> None:
    assert read_opening(_ROLE + event)[0] is Opening.ERROR


@given(st.integers(0, len(_ROLE + _TOKEN)))
def test_a_cut_anywhere_gives_the_same_opening(cut: int) -> None:
    whole = _ROLE + _TOKEN
    opening, seen = read_opening(whole[:cut])
    if opening is Opening.NOTHING:
        opening, _ = read_opening(whole[seen:])
    assert opening is Opening.CONTENT


def test_a_stream_ends_with_done_and_tells_its_usage() -> None:
    is_whole, ending = read_closing(_TOKEN + _STOP + _USAGE + _DONE)
    assert is_whole
    usage = ending.counted()
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 2)


@pytest.mark.parametrize("tail", [b"", _TOKEN, _STOP, _STOP + _USAGE, _event({"delta": {}, "finish_reason": "abort"}) + _DONE])
def test_without_done_or_with_a_bad_finish_it_is_not_whole(tail: bytes) -> None:
    assert not read_closing(tail)[0]


def test_done_inside_a_tokens_text_ends_nothing() -> None:
    assert not read_closing(_event({"text": "[DONE]" + " " * 40}))[0]


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b'data: {"error":{"message":"m","code":400}}\n\n', 400),
        (b'data: {"error":{"message":"m","code":"oops"}}\n\n', 502),
        (b'error: {"message":"m","code":503}\n\n', 503),
        (b"nothing of the kind", 502),
    ],
)
def test_an_error_in_the_stream_becomes_an_answer(data: bytes, status: int) -> None:
    found, body = read_error(data)
    assert found == status
    assert "message" in json.loads(body)["error"]
