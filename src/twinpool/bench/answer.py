"""One streamed answer, as it comes: when its pieces came, what its usage says, and how it ended.

A piece is an event with content. The engine says how many tokens there were; pieces are only counted where it does not.
"""

import asyncio
from array import array
from enum import StrEnum
from time import monotonic
from typing import Annotated, Any

import msgspec

from twinpool.bench.target import message_of
from twinpool.engines.answers import BAD_ENDS
from twinpool.http1 import Loss, UpstreamLost
from twinpool.http1.urls import redirection


class Failed(StrEnum):
    """What became of a request that got no whole answer."""

    REFUSED = "refused"  # 429 or 503
    REJECTED = "rejected"  # another 4xx
    SERVER_ERROR = "server_error"  # another 5xx, or no HTTP
    ERROR_IN_STREAM = "error_in_stream"  # an error event, or a finish reason that is one, under HTTP 200
    TRUNCATED = "truncated"  # the stream ended without its end
    EMPTY = "empty"  # it ended well, and held no token
    UNREACHABLE = "unreachable"
    TIMED_OUT = "timed_out"
    NOT_SENT = "not_sent"  # by us: too many were under way already


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]


class _Details(msgspec.Struct, gc=False):
    cached_tokens: _Tokens | None = None


class Usage(msgspec.Struct, gc=False):
    """As the engine counts."""

    prompt_tokens: _Tokens = 0
    completion_tokens: _Tokens = 0
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int:
        details = self.prompt_tokens_details
        return min(details.cached_tokens or 0, self.prompt_tokens) if details is not None else 0


class _Event(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode
_LOST = {
    Loss.CONNECT: Failed.UNREACHABLE,
    Loss.CONNECT_TIMEOUT: Failed.UNREACHABLE,
    Loss.CLOSED_BEFORE_HEAD: Failed.UNREACHABLE,
    Loss.RESET_MID_BODY: Failed.TRUNCATED,
    Loss.TRUNCATED: Failed.TRUNCATED,
    Loss.HEAD_TIMEOUT: Failed.TIMED_OUT,
    Loss.IDLE_TIMEOUT: Failed.TIMED_OUT,
    Loss.PROTOCOL: Failed.SERVER_ERROR,
    Loss.TOO_LARGE: Failed.SERVER_ERROR,
    Loss.CLOSED_BY_US: Failed.TIMED_OUT,
}
_KEPT_BYTES = 64 << 10  # of an answer that is no stream
_LONGEST_EVENT = 1 << 20  # of a stream: a piece has some hundred bytes


class StreamedAnswer:
    """Receives one answer; `over` is done when there is no more to come. Times are on `time.monotonic`."""

    __slots__ = (
        "_body",
        "_finish",
        "_is_done",
        "_is_over",
        "_tail",
        "ended_at",
        "failure",
        "headers",
        "is_stale",
        "message",
        "over",
        "pieces",
        "status",
        "usage",
    )

    def __init__(self, over: "asyncio.Future[None]") -> None:
        self.over = over
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.pieces = array("d")
        self.usage: Usage | None = None
        self.failure: Failed | None = None
        self.message = ""
        self.ended_at = 0.0
        self._tail = bytearray()  # of an event whose end is to come
        self._body = b""
        self._finish: str | None = None
        self._is_done = False
        self.is_stale = False
        self._is_over = False  # not the future's: whoever stops waiting cancels that

    def lose(self, failure: Failed, message: str = "") -> None:
        """It has failed, and is over."""
        if self._is_over:
            return
        self.failure = self.failure or failure
        self.message = self.message or message
        self._end()

    # The receiver's side

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status, self.headers = status, headers

    def on_body(self, data: bytes) -> None:
        now = monotonic()
        if self.status != 200:
            if len(self._body) < _KEPT_BYTES:
                self._body += data
            return
        if self._is_over:
            return
        tail = self._tail
        if tail.endswith(b"\r"):
            del tail[-1:]
            data = b"\r" + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        begin, searched = 0, max(0, len(tail) - 1)
        tail += data
        while (end := tail.find(b"\n\n", searched)) >= 0:
            self._take(bytes(tail[begin:end]), now)
            begin = searched = end + 2
        del tail[:begin]
        if len(tail) > _LONGEST_EVENT:
            tail.clear()
            self.lose(Failed.ERROR_IN_STREAM, f"an event of more than {_LONGEST_EVENT >> 20} MiB that has no end")

    def believed_tokens(self, most: int) -> int | None:
        """Of the answer, as the engine counts; None where it does not, or counts none, or more than the `most` it was asked
        for."""
        counted = self.usage.completion_tokens if self.usage is not None else 0
        return counted if 0 < counted <= most else None

    def on_end(self) -> None:
        if self.status != 200:
            self.failure = failure_of_status(self.status)
            self.message = f"{self.status} {self._said()}".strip()
        else:
            if self._tail:
                self._take(bytes(self._tail), monotonic())
            if self.failure is None and not (self._is_done and self._finish):
                self.failure = Failed.TRUNCATED
                self.message = "the stream ended without [DONE]" if not self._is_done else "no finish reason in the stream"
            if self.failure is None and not self.pieces:
                self.failure = Failed.EMPTY
        self._end()

    def _said(self) -> str:
        """Of an answer that is not 200."""
        location = next((value.decode("latin-1") for name, value in self.headers if name == b"location"), None)
        leads_to = redirection(self.status, "", location)
        return f"leads to {leads_to}" if leads_to else message_of(self._body)

    def on_lost(self, error: UpstreamLost) -> None:
        if error.is_reused and error.loss is Loss.CLOSED_BEFORE_HEAD and not self.is_stale:
            self.is_stale = True
            if not self.over.done():
                self.over.set_result(None)
            return
        self.lose(_LOST[error.loss], str(error).partition(": ")[2])

    def _end(self) -> None:
        self._is_over = True
        self.ended_at = self.ended_at or monotonic()
        if not self.over.done():
            self.over.set_result(None)

    def _take(self, event: bytes, now: float) -> None:
        for line in event.split(b"\n"):
            if line.startswith(b"data:"):
                self._take_payload(line[5:].strip(), now)
            elif line.startswith(b"error:"):
                self._error(line[6:].strip())

    def _take_payload(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self._is_done = True
            self.ended_at = now
            return
        try:
            told = _decode(payload)
        except msgspec.ValidationError as wrong:
            self._error(payload, message_of(payload) or f"an event that is not understood: {wrong}")
            return
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._error(payload)
            return
        if told.error is not None:
            self._error(payload)
            return
        if told.usage is not None:
            self.usage = told.usage
        for choice in told.choices:
            if choice.finish_reason is not None:
                self._finish = choice.finish_reason
                if choice.finish_reason in BAD_ENDS:
                    self._error(b"", f"finish reason {choice.finish_reason}")
            delta = choice.delta
            if (
                choice.text
                if delta is None
                else (delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls or delta.refusal)
            ):
                self.pieces.append(now)
                break

    def _error(self, payload: bytes, message: str = "") -> None:
        self.failure = self.failure or Failed.ERROR_IN_STREAM
        self.message = self.message or message or message_of(payload) or "an event that is not understood"


def failure_of_status(status: int) -> Failed:
    if status in (429, 503):
        return Failed.REFUSED
    return Failed.REJECTED if 400 <= status < 500 else Failed.SERVER_ERROR
