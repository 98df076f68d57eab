"""A JSON body as its top-level fields, each kept as the bytes that came.

Nothing is parsed that routing does not need, so nothing can be changed by the way: big integers, `1.0`, nulls and unknown
keys leave as they arrived.
"""

from collections.abc import Mapping

import msgspec

from twinpool.errors import BadRequestError, Reason

Fields = dict[str, msgspec.Raw]

_MAX_FIELDS = 1000  # engines take seconds over a hundred thousand

_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])

CONTINUE_FIELD = "twinpool_continue"
"""Asks the embedded worker to go on with an answer that another engine began; has the text that the client was sent."""

OURS = frozenset(
    {
        "kv_transfer_params",
        "ec_transfer_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "bootstrap_pair_key",
        "disagg_prefill_dp_rank",
        "routed_dp_rank",
        "data_parallel_rank",
        "data_parallel_rank_decode",
        "decode_tp_size",
        CONTINUE_FIELD,
    }
)
"""Fields that steer which engines connect to which. From a client they are dropped: only ours ever reach an engine."""

_SALT = "cache_salt"

_UNFOLDED = frozenset({"extra_body", "vllm_xargs"})
"""Objects whose fields some engine takes for the request's own: vLLM passes `vllm_xargs` on beside its `kv_transfer_params`."""


def take_apart(body: bytes) -> Fields:
    """The top-level fields of a client's body without those of `OURS`; raises `BadRequestError` for anything else than an
    object. Of a key that stands twice the last one counts, for us and so for every engine."""
    try:
        fields = _DECODER.decode(body)
    except msgspec.ValidationError as wrong:
        raise BadRequestError("the body must be a JSON object", Reason.INVALID_JSON) from wrong
    except (msgspec.DecodeError, UnicodeDecodeError) as broken:
        raise BadRequestError(f"the body is not valid JSON: {broken}", Reason.INVALID_JSON) from broken
    except RecursionError as deep:
        raise BadRequestError("the body is nested too deeply", Reason.INVALID_JSON) from deep
    if len(fields) > _MAX_FIELDS:
        raise BadRequestError(f"the body has more than {_MAX_FIELDS} fields", Reason.INVALID_REQUEST)
    for name in OURS & fields.keys():
        del fields[name]
    for name in _UNFOLDED & fields.keys():
        try:
            inner = _DECODER.decode(fields[name])
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue  # no object: nothing can stand in it
        if OURS & inner.keys():
            fields[name] = msgspec.Raw(put_together({key: value for key, value in inner.items() if key not in OURS}))
    return fields


def salted(fields: Fields, salt: str | None) -> Fields:
    """The body for an engine that shares what it has cached only under the same `cache_salt`. A client's own is kept: who has
    another one shares nothing with it. One that is no string stays as it is, for the engine to refuse."""
    if salt is None:
        return fields
    try:
        own = msgspec.json.decode(fields.get(_SALT, b"null"), type=str | None)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return fields
    return {**fields, _SALT: msgspec.Raw(msgspec.json.encode(salt if own is None else f"{salt} {own}"))}


def put_together(fields: Mapping[str, msgspec.Raw | bytes]) -> bytes:
    """The object with these fields, in their order."""
    return b"{%b}" % b",".join(b"%b:%b" % (msgspec.json.encode(name), bytes(value)) for name, value in fields.items())
