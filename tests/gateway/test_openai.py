"""What routing reads from a request, and what it leaves to the engine to judge."""

import json

import pytest

from twinpool.core.decisions import Why
from twinpool.errors import BadRequestError, Reason
from twinpool.gateway.openai import Call, Endpoint, read_call


def _chat(**fields: object) -> Call:
    return read_call(Endpoint.CHAT, json.dumps({"model": "m", **fields}, ensure_ascii=False).encode())


def _completion(**fields: object) -> Call:
    return read_call(Endpoint.COMPLETIONS, json.dumps({"model": "m", **fields}).encode())


def test_the_length_of_a_chat_is_that_of_its_texts() -> None:
    parts = [{"type": "text", "text": "cd"}, {"type": "image_url", "image_url": {"url": "data:x"}}]
    facts = _chat(messages=[{"role": "system", "content": "ab"}, {"role": "user", "content": parts}]).facts
    assert facts.prompt_chars == 4
    assert facts.is_ascii


@pytest.mark.parametrize("other", [{"type": "text", "text": None}, {"type": "image_url", "text": 7}, "ef", 7, None])
def test_no_part_hides_how_long_the_others_are(other: object) -> None:
    parts = [{"type": "text", "text": "abcd"}, other]
    assert _chat(messages=[{"role": "user", "content": parts}]).facts.prompt_chars == (6 if other == "ef" else 4)


@pytest.mark.parametrize("prompt", [[[1, 2, 3], [4, 5]], [1, 2, 3, 4, 5]])
def test_tokens_are_as_long_as_four_letters_each(prompt: object) -> None:
    assert _completion(prompt=prompt).facts.prompt_chars == 16


def test_escaped_characters_count_as_the_characters_they_are() -> None:
    facts = read_call(Endpoint.CHAT, json.dumps({"model": "m", "messages": [{"content": "日本"}]}).encode()).facts
    assert (facts.prompt_chars, facts.is_ascii) == (2, False)


@pytest.mark.parametrize(
    ("fields", "sequences", "obstacle"),
    [
        ({"prompt": "a"}, 1, None),
        ({"prompt": "a", "n": 1}, 1, None),
        ({"prompt": "a", "n": 3}, 3, Why.N_CHOICES),
        ({"prompt": "a", "n": None}, 1, None),
        ({"prompt": "a", "n": 1.0}, 1, None),
        ({"prompt": "a", "n": "3"}, 3, Why.N_CHOICES),
        ({"prompt": "a", "n": "many"}, 1, Why.N_CHOICES),
        ({"prompt": "a", "n": [2]}, 1, Why.N_CHOICES),
        ({"prompt": "a", "n": "inf"}, 1, Why.N_CHOICES),
        ({"prompt": "a", "best_of": 2}, 2, Why.BEST_OF),
        ({"prompt": "a", "use_beam_search": True}, 1, Why.BEAM_SEARCH),
        ({"prompt": "a", "use_beam_search": False}, 1, None),
        ({"prompt": "a", "prompt_logprobs": 0}, 1, Why.PROMPT_LOGPROBS),
        ({"prompt": "a", "prompt_logprobs": None}, 1, None),
        ({"prompt": "a", "echo": True}, 1, Why.ECHO),
        ({"prompt": "a", "echo": "yes"}, 1, Why.ECHO),
        ({"prompt": "a", "logprobs": 3}, 1, None),
        ({"prompt_embeds": "AAAA"}, 1, Why.PROMPT_EMBEDS),
        ({"prompt": ["a", "b"], "n": 2}, 4, Why.PROMPT_LIST),
        ({"prompt": ["a"]}, 1, Why.PROMPT_LIST),
        ({"prompt": [1, 2, 3]}, 1, None),
        ({"prompt": [[1, 2], [3]]}, 2, Why.PROMPT_LIST),
    ],
)
def test_what_one_handle_cannot_serve_is_an_obstacle(fields: dict[str, object], sequences: int, obstacle: Why | None) -> None:
    facts = _completion(**fields).facts
    assert (facts.sequences, facts.obstacle) == (sequences, obstacle)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": "not a list"},
        {"messages": [{"role": "latest_reminder", "content": "x"}]},
        {"messages": [{"role": "user"}], "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": [], "n": "three", "max_tokens": -1, "stream": "yes"},
        {},
    ],
)
def test_what_the_engine_must_judge_passes(fields: dict[str, object]) -> None:
    assert _chat(**fields).facts.model == "m"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{}", Reason.MISSING_FIELD),
        (b'{"model":""}', Reason.INVALID_VALUE),
        (b'{"model":7}', Reason.INVALID_VALUE),
        (b'{"model":null}', Reason.INVALID_VALUE),
        (b"[]", Reason.INVALID_JSON),
        (b"{", Reason.INVALID_JSON),
        (b'{"model":"m","x":' + b"[" * 200_000 + b"]" * 200_000 + b"}", Reason.INVALID_JSON),
    ],
)
def test_a_body_that_names_no_model_is_refused(body: bytes, reason: Reason) -> None:
    with pytest.raises(BadRequestError) as refused:
        read_call(Endpoint.CHAT, body)
    assert refused.value.reason is reason


@pytest.mark.parametrize(
    ("fields", "limit"), [({"max_completion_tokens": 5, "max_tokens": 9}, 5), ({"max_tokens": 9}, 9), ({}, None)]
)
def test_the_output_limit_in_any_spelling(fields: dict[str, object], limit: int | None) -> None:
    assert _chat(**fields).facts.max_tokens == limit
