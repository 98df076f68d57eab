"""A handle that anybody touched is not a handle."""

from typing import Any

import msgspec
import pytest

from twinpool.errors import BadRequestError, HandleError, Reason
from twinpool.worker.signing import Handle, Signer

HANDLE = Handle(
    handle_id="ab" * 16,
    engine_id="cd" * 16,
    host="127.0.0.1",
    port=8100,
    prompt_tokens=3000,
    cached_tokens=256,
    expires_at=1000.5,
    prompt_sha256="ef" * 32,
    model="m",
)


def test_what_was_written_is_read() -> None:
    params = Signer("secret").write(HANDLE)
    through_two_services = msgspec.json.decode(msgspec.json.encode(params))
    assert Signer("secret").read(through_two_services) == HANDLE


def test_it_has_the_fields_of_the_nixl_connector() -> None:
    params = Signer("secret").write(HANDLE)
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    assert {
        "remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size", "dcp_size",
        "pp_size", "remote_num_tokens", "remote_blocks_expiry_time", "transfer_mode", "remote_prefill_cached_tokens",
    } <= params.keys()  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("remote_host", "169.254.169.254"),
        ("remote_port", 22),
        ("remote_engine_id", "00" * 16),
        ("remote_request_id", "00" * 16),
        ("remote_num_tokens", 3),
        ("remote_prefill_cached_tokens", 0),
        ("remote_blocks_expiry_time", 9e9),
        ("twinpool_prompt_sha256", "00" * 32),
        ("twinpool_model", "another"),
        ("twinpool_signature", "0" * 64),
        ("twinpool_signature", "ü"),
        ("twinpool_signature", None),
        ("twinpool_key_id", None),
    ],
)
def test_any_change_is_a_forgery(field: str, value: Any) -> None:
    params = Signer("secret").write(HANDLE) | {field: value}
    with pytest.raises(HandleError) as forged:
        Signer("secret").read(params)
    assert (forged.value.status, forged.value.reason) == (403, Reason.HANDLE_FORGED)


def test_another_fleet_is_foreign() -> None:
    with pytest.raises(HandleError) as foreign:
        Signer("ours").read(Signer("theirs").write(HANDLE))
    assert (foreign.value.status, foreign.value.reason) == (403, Reason.HANDLE_FOREIGN)


@pytest.mark.parametrize("params", [{}, {"remote_request_id": 5}, {"remote_port": "x"}])
def test_what_is_no_handle_is_a_bad_request(params: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError):
        Signer("secret").read(params)
