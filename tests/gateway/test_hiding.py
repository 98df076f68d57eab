"""No client learns from a stream where KV lies."""

import json

import pytest

from twinpool.gateway.hiding import hide_handoff

HANDLE = {"remote_host": "10.0.0.5", "remote_port": 5600, "remote_block_ids": [[1]]}
CHUNK = {"id": "x", "choices": [{"index": 0, "delta": {"content": "kv"}}], "usage": None}


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(CHUNK | fields).encode() + b"\n\n"


@pytest.mark.parametrize("field", ["kv_transfer_params", "ec_transfer_params"])
@pytest.mark.parametrize("value", [HANDLE, None, "text"])
def test_a_handle_in_an_event_is_taken_out_and_nothing_else(field: str, value: object) -> None:
    others = event() + b": ping\n\n" + b"data: [DONE]\n\n"
    hidden = hide_handoff(event(**{field: value}) + others)
    assert b"10.0.0.5" not in hidden
    first, rest = hidden.split(b"\n\n", 1)
    assert json.loads(first.removeprefix(b"data: ")) == CHUNK
    assert rest == others


@pytest.mark.parametrize(
    "events",
    [
        event(),
        event(choices=[{"delta": {"content": 'say "kv_transfer_params": {}'}}]),
        b"data: [DONE]\n\n",
        b'data: {"kv_transfer_params": broken\n\n',
        b"",
    ],
)
def test_what_has_none_stays_as_it_came(events: bytes) -> None:
    assert hide_handoff(events) == events
