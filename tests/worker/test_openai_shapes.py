"""llama.cpp's events as they come (recorded from the pinned version), and what clients get."""

from typing import Any

import msgspec
import pytest

from twinpool.worker.asked import Endpoint, parse
from twinpool.worker.openai_shapes import ChoiceEvents, Finished, Usage, WholeChoice, usage_event, whole_answer

HEAD = '"created":1,"id":"chatcmpl-x","model":"m","system_fingerprint":"b0","object":"chat.completion.chunk"'
TEXT_HEAD = '"created":1,"model":"m","system_fingerprint":"b0","object":"text_completion"'
TIMINGS = '"timings":{"cache_n":31,"prompt_n":1,"predicted_n":2}'
USAGE = '"usage":{"completion_tokens":2,"prompt_tokens":32,"total_tokens":34,"prompt_tokens_details":{"cached_tokens":31}}'

CHAT = [
    f'data: {{"choices":[{{"finish_reason":null,"index":0,"delta":{{"role":"assistant","content":null}}}}],{HEAD}}}',
    f'data: {{"choices":[{{"finish_reason":null,"index":0,"delta":{{"content":"Say \\"timings\\""}}}}],{HEAD}}}',
    f'data: {{"choices":[{{"finish_reason":null,"index":0,"delta":{{"content":" ☃"}}}}],{HEAD}}}',
    f'data: {{"choices":[{{"finish_reason":"length","index":0,"delta":{{}}}}],{HEAD},{TIMINGS}}}',
    f'data: {{"choices":[],{HEAD},{USAGE},{TIMINGS}}}',
    "data: [DONE]",
]
LOGPROB = (
    '{"id":28,"token":",","bytes":[44],"logprob":-0.5,'
    '"top_logprobs":[{"id":28,"token":",","logprob":-0.5},{"id":9,"token":" in","logprob":-4.0}]}'
)
RARE = (
    '{"id":7,"token":" rare","bytes":[],"logprob":-9.0,'
    '"top_logprobs":[{"id":28,"token":",","logprob":-0.5},{"id":9,"token":" in","logprob":-4.0}]}'
)
TEXT = [
    f'data: {{"choices":[{{"text":",","index":0,"logprobs":{{"content":[{LOGPROB}]}},"finish_reason":null}}],{TEXT_HEAD},'
    '"id":"chatcmpl-y"}',
    f'data: {{"choices":[{{"text":" rare","index":0,"logprobs":{{"content":[{RARE}]}},"finish_reason":null}}],{TEXT_HEAD},'
    '"id":"chatcmpl-y"}',
    f'data: {{"choices":[{{"text":"","index":0,"logprobs":null,"finish_reason":"length"}}],{TEXT_HEAD},{USAGE},'
    f'"id":"chatcmpl-y",{TIMINGS}}}',
    "data: [DONE]",
]


def asked(endpoint: Endpoint, **fields: Any) -> Any:
    about: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if endpoint == "chat" else {"prompt": "x"}
    return parse(endpoint, msgspec.json.encode({"model": "m", **about, **fields}), "m")


def mended(choice: ChoiceEvents, events: list[str]) -> list[bytes]:
    return [event for event in (choice.mend(event.encode()) for event in events) if event is not None]


def test_plain_chat_events_pass_untouched() -> None:
    choice = ChoiceEvents(asked("chat"), 0)
    out = mended(choice, CHAT)
    assert out[:3] == [event.encode() + b"\n\n" for event in CHAT[:3]]
    assert len(out) == 4, "usage and [DONE] are not a choice's to send"
    assert b"timings" not in out[3]
    assert msgspec.json.decode(out[3][6:])["choices"][0]["finish_reason"] == "length"
    assert choice.finished == Finished(completion_tokens=2, computed_prompt_tokens=1)


def test_completions_get_ids_of_their_own_and_no_usage_in_a_choice() -> None:
    out = mended(ChoiceEvents(asked("completions"), 0), TEXT)
    assert len(out) == 3
    assert all(b'"id":"cmpl-y"' in event for event in out)
    assert all(b"usage" not in event and b"timings" not in event for event in out)


def test_legacy_log_probabilities() -> None:
    choice = ChoiceEvents(asked("completions", logprobs=2), 0)
    out = [msgspec.json.decode(event[6:])["choices"][0]["logprobs"] for event in mended(choice, TEXT)]
    assert out[0] == {
        "tokens": [","],
        "token_logprobs": [-0.5],
        "top_logprobs": [{",": -0.5, " in": -4.0}],
        "text_offset": [0],
    }
    assert out[1]["text_offset"] == [1]
    assert out[1]["top_logprobs"] == [{",": -0.5, " in": -4.0, " rare": -9.0}], "the token taken is always there"
    assert out[2] is None


def test_logprobs_0_has_the_tokens_own_and_no_others() -> None:
    whole = WholeChoice(asked("completions", logprobs=0), 0)
    for event in TEXT:
        whole.add(event.encode())
    assert whole.whole()["logprobs"] == {
        "tokens": [",", " rare"],
        "token_logprobs": [-0.5, -9.0],
        "top_logprobs": None,
        "text_offset": [0, 1],
    }


@pytest.mark.parametrize(("fields", "alternatives"), [({}, 0), ({"top_logprobs": 2}, 2)])
def test_chat_has_as_many_alternatives_as_asked(fields: dict[str, Any], alternatives: int) -> None:
    event = f'data: {{"choices":[{{"index":0,"delta":{{"content":","}},"logprobs":{{"content":[{LOGPROB}]}}}}],{HEAD}}}'
    out = ChoiceEvents(asked("chat", logprobs=True, **fields), 0).mend(event.encode())
    assert out is not None
    (entry,) = msgspec.json.decode(out[6:])["choices"][0]["logprobs"]["content"]
    assert len(entry["top_logprobs"]) == alternatives


def test_one_of_several_choices_has_its_index_and_the_shared_id() -> None:
    out = mended(ChoiceEvents(asked("chat", n=3), 2, "chatcmpl-shared"), CHAT)
    parsed = [msgspec.json.decode(event[6:]) for event in out]
    assert {event["id"] for event in parsed} == {"chatcmpl-shared"}
    assert {event["choices"][0]["index"] for event in parsed} == {2}


def test_timings_stay_where_they_were_asked_for() -> None:
    out = mended(ChoiceEvents(asked("chat", timings_per_token=True), 0), CHAT)
    assert msgspec.json.decode(out[3][6:])["timings"]["prompt_n"] == 1


def test_a_whole_chat_answer() -> None:
    question = asked("chat")
    choice = WholeChoice(question, 0)
    for event in CHAT:
        choice.add(event.encode())
    answer = whole_answer(question, choice.events.kept, [choice.whole()], Usage(32, 2, 5))
    assert answer == {
        "id": "chatcmpl-x",
        "created": 1,
        "model": "m",
        "system_fingerprint": "b0",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": 'Say "timings" ☃'},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": 32,
            "completion_tokens": 2,
            "total_tokens": 34,
            "prompt_tokens_details": {"cached_tokens": 5},
        },
    }


def test_tool_calls_and_reasoning_are_put_together() -> None:
    deltas = [
        '{"role":"assistant","content":null}',
        '{"reasoning_content":"let me "}',
        '{"reasoning_content":"see"}',
        '{"tool_calls":[{"index":0,"id":"c1","type":"function","function":{"name":"f","arguments":"{\\"a\\""}}]}',
        '{"tool_calls":[{"index":0,"function":{"arguments":":1}"}}]}',
        '{"tool_calls":[{"index":1,"id":"c2","type":"function","function":{"name":"g","arguments":"{}"}}]}',
    ]
    choice = WholeChoice(asked("chat"), 0)
    for delta in deltas:
        choice.add(f'data: {{"choices":[{{"index":0,"finish_reason":null,"delta":{delta}}}],{HEAD}}}'.encode())
    assert choice.whole()["message"] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "let me see",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
            {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }


def test_the_usage_chunk_has_no_choices() -> None:
    question = asked("chat", stream=True, stream_options={"include_usage": True})
    chunk = msgspec.json.decode(usage_event(question, {"id": "chatcmpl-x", "model": "m"}, Usage(1, 2, 0))[6:])
    assert chunk["choices"] == []
    assert chunk["object"] == "chat.completion.chunk"
    assert chunk["usage"]["total_tokens"] == 3
