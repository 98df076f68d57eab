"""Joining another engine's answer to what a client has: read once from the copy, then event by event."""

import json

import pytest

from twinpool.gateway.continuation import Sent, SentCopy, join_event, read_sent


def event(**choice: object) -> bytes:
    return b"data: %b\n\n" % json.dumps({"id": "chatcmpl-1", "created": 7, "choices": [{"index": 0, **choice}]}).encode()


def copy_of(*events: bytes) -> SentCopy:
    copy = SentCopy()
    for one in events:
        copy.add(one)
    return copy


ROLE = event(delta={"role": "assistant", "content": None})


def test_the_copy_tells_text_id_and_creation() -> None:
    chat = copy_of(ROLE, event(delta={"content": "Bon"}), event(delta={"content": "jour é"}))
    assert read_sent(chat) == Sent("Bonjour é", "chatcmpl-1", 7)
    assert read_sent(copy_of(event(text="Bon"), event(text="jour"))) == Sent("Bonjour", "chatcmpl-1", 7)


@pytest.mark.parametrize(
    "more",
    [
        event(delta={"tool_calls": [{"index": 0}]}),
        event(delta={"reasoning_content": "hm"}),
        event(delta={"content": "a"}, logprobs={"content": []}),
        event(delta={"content": "a"}, finish_reason="stop"),
        event(delta={"content": "a"}).replace(b'"index": 0', b'"index": 1'),
        b'data: {"error": {"message": "m"}}\n\n',
        b"data: not json\n\n",
    ],
)
def test_what_is_more_than_one_choice_s_text_is_not_gone_on_with(more: bytes) -> None:
    assert read_sent(copy_of(event(delta={"content": "a"}), more)) is None


def test_nothing_sent_is_nothing_to_go_on_with() -> None:
    assert read_sent(SentCopy()) is None


def test_a_copy_is_bounded() -> None:
    copy = SentCopy()
    piece = event(delta={"content": "a" * 1000})
    for _ in range(2000):
        copy.add(piece)
        assert len(copy.raw) <= (1 << 20) + len(piece)
    assert not copy.is_whole
    assert read_sent(copy) is None


SENT = Sent("Bonjour", "chatcmpl-first", 7)


def test_later_events_are_the_first_engine_s() -> None:
    joined = join_event(event(delta={"content": "!"})[:-2], SENT)
    assert joined is not None
    told = json.loads(joined[6:])
    assert (told["id"], told["created"]) == ("chatcmpl-first", 7)
    assert told["choices"][0]["delta"] == {"content": "!"}


def test_the_role_is_not_said_twice() -> None:
    assert join_event(ROLE[:-2], SENT) is None
    with_text = join_event(event(delta={"role": "assistant", "content": "!"})[:-2], SENT)
    assert with_text is not None
    assert json.loads(with_text[6:])["choices"][0]["delta"] == {"content": "!"}


def test_usage_belongs_to_the_same_answer() -> None:
    joined = join_event(b'data: {"id":"other","created":9,"choices":[],"usage":{"prompt_tokens":3}}', SENT)
    assert joined is not None
    assert json.loads(joined[6:])["id"] == "chatcmpl-first"


@pytest.mark.parametrize("line", [b"data: [DONE]", b": ping", b'data: {"error":{"message":"m"}}'])
def test_what_is_no_event_of_the_answer_passes_as_it_is(line: bytes) -> None:
    assert join_event(line, SENT) == line
