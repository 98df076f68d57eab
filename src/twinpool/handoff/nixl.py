"""The dialect of vLLM's NIXL connector, which the embedded worker speaks too: one leg after the other.

    gateway ──body, one token, kv_transfer_params: do_remote_decode──► P
    gateway ◄──kv_transfer_params: where the KV lies (the handle)───── P
    gateway ──the client's own body + the handle, verbatim───────────► D  ──pulls the KV from P, writes every token

The handle is opaque: nothing in it is rebuilt or guessed from a request's id. Source: vLLM's nixl connector, 0.32.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from twinpool.core.model import TokenCount
from twinpool.handoff.body import Fields, put_together

_ASK = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"remote_host":null,"remote_port":null,"twinpool_max_tokens":%b}'
)
"""The last field is the client's own limit: the embedded worker refuses what cannot fit before it reads a long prompt."""

_NOT_FOR_PREFILL = ("stream_options", "min_tokens", "min_completion_tokens")
"""They contradict one token and no stream, and engines refuse the contradiction."""

_OUTPUT_LIMITS = ("max_completion_tokens", "max_output_tokens")
"""Spellings beside `max_tokens`: each that the client used is 1 too."""


class HandoffMissingError(Exception):
    """A prefill answered 200 without a handle, or was cut short: a failed handoff, never a reason to decode anyway. `handle` is
    what must be given back where one came with a prompt that was not read to its end."""

    def __init__(self, message: str, handle: msgspec.Raw | None = None) -> None:
        super().__init__(message)
        self.handle = handle


class PrefillAnswer(msgspec.Struct, frozen=True):
    """What P said: the handle as it came, and how much of the prompt it read and had in its cache, where it tells."""

    handle: msgspec.Raw
    prompt_tokens: int
    cached_tokens: int | None


class _Details(msgspec.Struct):
    cached_tokens: TokenCount | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: TokenCount = 0
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    usage: msgspec.Raw = msgspec.Raw(b"null")
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_ANSWER = msgspec.json.Decoder(_Answer)
_USAGE = msgspec.json.Decoder(_Usage | None)


def prefill_body(fields: Fields) -> bytes:
    """The body of the prefill leg: the client's, with one token, no stream, and the wish for a handle."""
    limit = bytes(fields.get("max_completion_tokens", fields.get("max_tokens", b"null")))
    return put_together({**_one_token(fields), "kv_transfer_params": _ASK % limit})


def read_and_drop_body(fields: Fields, handle: msgspec.Raw) -> bytes:
    """A decode leg that nobody wants the answer of: once D has read the KV, P frees it."""
    return put_together({**_one_token(fields), "kv_transfer_params": handle})


def _one_token(fields: Fields) -> dict[str, msgspec.Raw | bytes]:
    leg: dict[str, msgspec.Raw | bytes] = {name: value for name, value in fields.items() if name not in _NOT_FOR_PREFILL}
    for name in _OUTPUT_LIMITS:
        if name in leg:
            leg[name] = b"1"
    return {**leg, "max_tokens": b"1", "stream": b"false"}


def decode_body(fields: Mapping[str, msgspec.Raw | bytes], handle: msgspec.Raw) -> bytes:
    """The body of the decode leg: the client's own and the handle, nothing else."""
    return put_together({**fields, "kv_transfer_params": handle})


def read_prefill_answer(body: bytes) -> PrefillAnswer:
    """Take P's answer apart; raises `HandoffMissingError` where it has no handle or its prompt was not read to the end."""
    try:
        answer = _ANSWER.decode(body)
        handle: Any = msgspec.json.decode(answer.kv_transfer_params)
    except (msgspec.DecodeError, UnicodeDecodeError) as broken:
        raise HandoffMissingError(f"the prefill's answer cannot be read: {broken}") from broken
    if not isinstance(handle, dict) or not handle.get("do_remote_prefill"):
        raise HandoffMissingError("the prefill answered without a handle")
    for choice in answer.choices:
        if choice.finish_reason in ("abort", "error"):
            unread = msgspec.Raw(bytes(answer.kv_transfer_params))
            raise HandoffMissingError(f"the prefill ended with finish reason {choice.finish_reason!r}", unread)
    usage = _usage(answer.usage)
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
    return PrefillAnswer(msgspec.Raw(bytes(answer.kv_transfer_params)), usage.prompt_tokens, cached)


def _usage(raw: msgspec.Raw) -> _Usage:
    """What P counted; nothing, where that makes no sense. Its handle holds KV all the same."""
    try:
        return _USAGE.decode(raw) or _Usage()
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Usage()
