"""The two bodies of a handoff: the decode leg is the client's own, the prefill leg asks for one token and a handle."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.errors import BadRequestError
from twinpool.handoff.body import OURS, put_together, take_apart
from twinpool.handoff.nixl import HandoffMissingError, decode_body, prefill_body, read_prefill_answer

_HANDLE = msgspec.Raw(b'{"do_remote_prefill":true,"remote_request_id":"cmpl-7","extra":[1.0,null]}')

_json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_bodies = st.dictionaries(
    st.text(max_size=12) | st.sampled_from(["model", "stream", "max_tokens", "min_tokens", "stream_options", "n"]),
    _json_values,
    max_size=8,
)


@given(_bodies)
def test_the_decode_leg_is_the_clients_body_and_the_handle(body: dict[str, object]) -> None:
    leg = json.loads(decode_body(take_apart(json.dumps(body).encode()), _HANDLE))
    assert leg.pop("kv_transfer_params") == json.loads(bytes(_HANDLE))
    assert leg == {key: value for key, value in body.items() if key not in OURS}


@given(_bodies)
def test_the_prefill_leg_asks_for_one_token_and_no_stream(body: dict[str, object]) -> None:
    leg = json.loads(prefill_body(take_apart(json.dumps(body).encode())))
    assert leg["max_tokens"] == 1
    assert leg["stream"] is False
    assert leg["kv_transfer_params"]["do_remote_decode"] is True
    assert not {"min_tokens", "stream_options"} & leg.keys()
    changed = {"max_tokens", "stream", "min_tokens", "min_completion_tokens", "stream_options", *OURS}
    assert {k: v for k, v in leg.items() if k not in changed} == {k: v for k, v in body.items() if k not in changed}


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_every_spelling_of_the_output_limit_is_one_on_the_prefill_leg(limit: str) -> None:
    fields = take_apart(json.dumps({"model": "m", limit: 50}).encode())
    assert json.loads(prefill_body(fields))[limit] == 1
    assert json.loads(decode_body(fields, _HANDLE))[limit] == 50


def test_an_absent_limit_stays_absent_on_the_decode_leg() -> None:
    leg = json.loads(decode_body(take_apart(b'{"model":"m"}'), _HANDLE))
    assert "max_tokens" not in leg


@pytest.mark.parametrize(
    "written", ["1e400", "12345678901234567890123", "1.0", "0.10000000000000000555", '"\\ud83d\\ude00"', "-0"]
)
def test_a_value_leaves_as_it_was_written(written: str) -> None:
    body = b'{"x":%b}' % written.encode()
    assert put_together(take_apart(body)) == body


@pytest.mark.parametrize("name", sorted(OURS))
def test_what_steers_engines_never_comes_from_a_client(name: str) -> None:
    body = json.dumps({"model": "m", name: {"remote_host": "169.254.169.254"}}).encode()
    assert name not in take_apart(body)


@pytest.mark.parametrize("body", [b"", b"[]", b'"x"', b"{", b'{"a":1', b'{"a":1}x', b"\xff", b"null", b'{"a":NaN}'])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequestError):
        take_apart(body)


def test_the_answer_of_a_prefill_gives_its_handle_as_it_came() -> None:
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
    answer = read_prefill_answer(b'{"usage":%b,"kv_transfer_params":%b}' % (json.dumps(usage).encode(), bytes(_HANDLE)))
    assert bytes(answer.handle) == bytes(_HANDLE)
    assert (answer.prompt_tokens, answer.cached_tokens) == (9, 4)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"kv_transfer_params": None},
        {"kv_transfer_params": {}},
        {"kv_transfer_params": {"do_remote_prefill": False}},
        {"kv_transfer_params": [1]},
        {"kv_transfer_params": {"do_remote_prefill": True}, "choices": [{"finish_reason": "abort"}]},
        {"kv_transfer_params": {"do_remote_prefill": True}, "choices": [{"finish_reason": "error"}]},
    ],
)
def test_a_prefill_without_a_good_handle_is_a_failed_handoff(answer: dict[str, object]) -> None:
    with pytest.raises(HandoffMissingError):
        read_prefill_answer(json.dumps(answer).encode())


def test_a_prefill_that_ended_by_stop_hands_off_all_the_same() -> None:
    answer = {"kv_transfer_params": {"do_remote_prefill": True}, "choices": [{"finish_reason": "stop"}]}
    assert read_prefill_answer(json.dumps(answer).encode()).handle


@pytest.mark.parametrize("container", ["extra_body", "vllm_xargs"])
def test_no_field_of_ours_comes_in_through_an_object_that_an_engine_unfolds(container: str) -> None:
    forged = dict.fromkeys(OURS, 1) | {"kept": 2}
    assert json.loads(put_together(take_apart(json.dumps({container: forged}).encode()))) == {container: {"kept": 2}}
    untouched = b'{"%b":{"a" : 1.0}}' % container.encode()
    assert put_together(take_apart(untouched)) == untouched
