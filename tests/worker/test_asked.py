"""What a client may ask for, and what it is told where it may not."""

from typing import Any

import msgspec
import pytest

from twinpool.errors import BadRequestError, NotFoundError, Reason, RequestError
from twinpool.worker.asked import Asked, Endpoint, parse

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}


def ask(endpoint: Endpoint = "chat", **fields: Any) -> Asked:
    return parse(endpoint, msgspec.json.encode((CHAT if endpoint == "chat" else TEXT) | fields), "m")


def test_unknown_fields_go_to_the_engine_as_they_came() -> None:
    asked = ask(min_p=0.1, response_format={"type": "json_object"}, something_new=[1, {"a": None}])
    assert asked.rest["min_p"] == 0.1
    assert asked.rest["response_format"] == {"type": "json_object"}
    assert asked.rest["something_new"] == [1, {"a": None}]


@pytest.mark.parametrize("field", ["id_slot", "n_predict", "n_cmpl", "return_progress", "n_keep", "kv_transfer_params"])
def test_fields_that_reach_past_the_request_do_not(field: str) -> None:
    assert field not in ask(**{field: None if field == "kv_transfer_params" else 3}).rest


@pytest.mark.parametrize(
    ("endpoint", "fields", "param"),
    [
        ("chat", {"max_tokens": 0}, "max_tokens"),
        ("chat", {"max_tokens": -1}, "max_tokens"),
        ("chat", {"max_tokens": 1.5}, "max_tokens"),
        ("chat", {"max_tokens": "7"}, "max_tokens"),
        ("chat", {"max_tokens": True}, "max_tokens"),
        ("chat", {"max_completion_tokens": 0}, "max_completion_tokens"),
        ("chat", {"temperature": -0.1}, "temperature"),
        ("chat", {"temperature": "hot"}, "temperature"),
        ("chat", {"top_p": 1.1}, "top_p"),
        ("chat", {"n": 0}, "n"),
        ("chat", {"n": 129}, "n"),
        ("chat", {"messages": []}, "messages"),
        ("chat", {"messages": "hi"}, "messages"),
        ("chat", {"messages": [{"content": "hi"}]}, "messages"),
        ("chat", {"stream": "yes"}, "stream"),
        ("chat", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("chat", {"stop": 5}, "stop"),
        ("chat", {"stop": ""}, "stop"),
        ("chat", {"stop": ["a", ""]}, "stop"),
        ("chat", {"stop": ["a", 5]}, "stop"),
        ("chat", {"seed": "x"}, "seed"),
        ("chat", {"top_logprobs": 2}, "top_logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat", {"kv_transfer_params": 3}, "kv_transfer_params"),
        ("chat", {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": True}}, "kv_transfer_params"),
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [""]}, "prompt"),
        ("completions", {"prompt": [1, "a"]}, "prompt"),
        ("completions", {"prompt": [-1]}, "prompt"),
        ("completions", {"echo": True}, "echo"),
        ("completions", {"suffix": "x"}, "suffix"),
        ("completions", {"best_of": 2}, "best_of"),
        ("completions", {"logprobs": -1}, "logprobs"),
        ("completions", {"prompt": ["a"] * 65, "n": 2}, "n"),
        ("completions", {"prompt": ["a", "b"], "kv_transfer_params": {"do_remote_decode": True}}, "prompt"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(endpoint: Endpoint, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        ask(endpoint, **fields)
    assert refused.value.param == param
    assert param in refused.value.message or "handoff" in refused.value.message or "choices" in refused.value.message


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"3", b'"x"', b"\xff\xfe"])
def test_what_is_no_json_object(raw: bytes) -> None:
    with pytest.raises(BadRequestError) as refused:
        parse("chat", raw, "m")
    assert refused.value.reason == Reason.INVALID_JSON


@pytest.mark.parametrize(
    ("body", "kind", "reason"),
    [
        ({"messages": CHAT["messages"]}, BadRequestError, Reason.MISSING_FIELD),
        ({"model": "m"}, BadRequestError, Reason.MISSING_FIELD),
        (CHAT | {"model": "other"}, NotFoundError, Reason.MODEL_NOT_FOUND),
        (CHAT | {"model": 3}, BadRequestError, Reason.INVALID_VALUE),
    ],
)
def test_the_model_and_the_messages_must_be_there(body: Any, kind: type[RequestError], reason: Reason) -> None:
    with pytest.raises(kind) as refused:
        parse("chat", msgspec.json.encode(body), "m")
    assert refused.value.reason == reason


def test_null_is_the_same_as_nothing() -> None:
    names = ("max_tokens", "temperature", "n", "stop", "stream", "stream_options", "logprobs", "seed", "kv_transfer_params")
    asked = ask(**dict.fromkeys(names))
    assert (asked.choices, asked.max_tokens, asked.stream, asked.handle) == (1, None, False, None)


def test_the_newer_limit_wins_and_completions_have_openais_default() -> None:
    assert ask(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert ask("completions").max_tokens == 16
    assert ask().max_tokens is None


def test_prompts_are_text_or_token_ids_one_or_many() -> None:
    assert ask("completions").prompts == ("hi",)
    assert ask("completions", prompt=[1, 2]).prompts == ((1, 2),)
    assert ask("completions", prompt=["a", [3]]).prompts == ("a", (3,))
    assert ask("completions", n=2, best_of=2).choices == 2


def test_the_legs_of_a_handoff() -> None:
    prefill = ask(kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None})
    assert (prefill.makes_handle, prefill.handle) == (True, None)
    handle = {"do_remote_decode": False, "do_remote_prefill": True, "remote_host": "p"}
    decode = ask(kv_transfer_params=handle)
    assert (decode.makes_handle, decode.handle) == (False, handle)
    neither = ask(kv_transfer_params={"do_remote_decode": False, "do_remote_prefill": False})
    assert (neither.makes_handle, neither.handle) == (False, None)
