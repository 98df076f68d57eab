"""What an engine's answer, or the loss of it, means to the router."""

from collections.abc import Iterable

import msgspec

from twinpool.core.model import Failure, TokenCount, Usage
from twinpool.errors import Reason
from twinpool.http1 import Loss, UpstreamLost

_LOSSES = {
    Loss.CONNECT: Failure.UNREACHABLE,
    Loss.CONNECT_TIMEOUT: Failure.UNREACHABLE,
    Loss.CLOSED_BEFORE_HEAD: Failure.BROKEN,
    Loss.RESET_MID_BODY: Failure.BROKEN,
    Loss.TRUNCATED: Failure.BROKEN,
    Loss.CLOSED_BY_US: Failure.BROKEN,
    Loss.HEAD_TIMEOUT: Failure.TIMED_OUT,
    Loss.IDLE_TIMEOUT: Failure.TIMED_OUT,
    Loss.PROTOCOL: Failure.ERROR,
    Loss.TOO_LARGE: Failure.ERROR,
}

_MANY_DIGITS = 10  # of seconds: nobody means that

BAD_ENDS = frozenset({"error", "abort"})
"""Finish reasons with which engines report a failure under HTTP 200."""


class _Error(msgspec.Struct):
    code: str | int | None = None


class _Envelope(msgspec.Struct):
    error: _Error


class _Details(msgspec.Struct):
    cached_tokens: TokenCount | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: TokenCount = 0
    completion_tokens: TokenCount | None = 0
    prompt_tokens_details: _Details | None = None


class _Timings(msgspec.Struct):
    """llama.cpp's: prompt tokens read and found in its cache, tokens written."""

    prompt_n: TokenCount
    cache_n: TokenCount
    predicted_n: TokenCount


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class Ending(msgspec.Struct):
    """What the end of an answer tells: its usage, and how its choices finished. `timings`: llama.cpp tells them unasked."""

    usage: msgspec.Raw = msgspec.Raw(b"null")
    choices: list[_Choice] = []
    timings: msgspec.Raw = msgspec.Raw(b"null")

    def counted(self) -> Usage | None:
        """The usage as the core knows it; None where the engine told none, or no numbers of tokens."""
        try:
            usage = _USAGE.decode(self.usage)
            timings = _TIMINGS.decode(self.timings) if usage is None else None
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if usage is None:
            if timings is None:
                return None
            return Usage(timings.prompt_n + timings.cache_n, timings.predicted_n, timings.cache_n)
        details = usage.prompt_tokens_details
        cached = details.cached_tokens if details is not None else None
        return Usage(usage.prompt_tokens, usage.completion_tokens or 0, cached)

    @property
    def tells_usage(self) -> bool:
        return bytes(self.usage) != b"null"

    @property
    def is_failure(self) -> bool:
        return any(choice.finish_reason in BAD_ENDS for choice in self.choices)


_TIMINGS = msgspec.json.Decoder(_Timings | None)
_USAGE = msgspec.json.Decoder(_Usage | None)
_ENVELOPE = msgspec.json.Decoder(_Envelope)
_ENDING = msgspec.json.Decoder(Ending)


def failure_of_loss(lost: UpstreamLost) -> Failure:
    """What the loss of an answer says. A connection that had served before and was closed before it answered was most likely
    closed for being idle: that is an engine out of reach, not one that broke an answer."""
    if lost.loss is Loss.CLOSED_BEFORE_HEAD and lost.is_reused:
        return Failure.UNREACHABLE
    return _LOSSES[lost.loss]


def failure_of_status(status: int, body: bytes) -> Failure:
    """What an answer that is not 200 says. A refused handle is a failed handoff, whatever its status; so is a prompt whose KV
    finds no room, on a worker that is not busy otherwise. A 401 is about our key and not the client's: nobody is served there
    until a probe gets in."""
    if status == 401:
        return Failure.UNREACHABLE
    if status in (429, 503):
        return Failure.NO_HANDLE if _code(body) == Reason.HANDOFF_FAILED else Failure.BUSY
    if 400 <= status < 500:
        return Failure.HANDLE_REFUSED if _code(body).startswith("handle_") else Failure.REJECTED
    return Failure.ERROR


def retry_after_s(headers: Iterable[tuple[bytes, bytes]]) -> float | None:
    """The Retry-After of an answer, where it is a number of seconds."""
    for name, value in headers:
        if name == b"retry-after":
            return float(value) if value.isdigit() and len(value) < _MANY_DIGITS else None
    return None


def read_ending(body: bytes) -> Ending | None:
    """The ending of a whole JSON answer, or of one event of a stream; None for what cannot be read as either."""
    try:
        return _ENDING.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _code(body: bytes) -> str:
    try:
        return str(_ENVELOPE.decode(body).error.code)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
