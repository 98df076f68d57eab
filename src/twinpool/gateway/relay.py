"""Takes an engine's answer and passes it on. The hot path: what is done here is done for every token.

    StreamedAnswer:  opening ──first token──► passing ──► whole, or lost
                     held back                every piece straight into the client's socket

Until the first token everything is held back, the head included, so that an attempt that fails before it leaves no trace and
the request can be begun anew. From then on a piece is looked at once: written, stamped, kept as the tail. Only whole events
are passed on, so that whatever comes after an engine died in the middle of one is still a stream. Only the beginning and the
end of a stream are ever parsed; and all of it, by `ContinuedAnswer`, where it goes on from what another engine began.

Both kinds of answer end by setting `done` to what became of the leg.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple, Protocol

import msgspec

from twinpool.core.model import Failure, Usage
from twinpool.engines.answers import failure_of_loss, failure_of_status, read_ending, retry_after_s
from twinpool.engines.events import DONE, Opening, read_closing, read_error, read_opening
from twinpool.gateway.continuation import Sent, SentCopy, join_event
from twinpool.gateway.usage import without_usage
from twinpool.handoff.body import OURS, put_together
from twinpool.http1 import Exchange, Responder, UpstreamLost
from twinpool.measure.gaps import Gaps

_MAX_OPENING_BYTES = 1 << 20  # of a stream without any token: beyond this it is passed on as it is
_MAX_EVENT_BYTES = 1 << 20
_TAIL_PIECES = 4  # the last of a stream, in which usage and [DONE] stand
_MAX_ERROR_BYTES = 64 << 10

_HANDOFF_HEADER = b"x-twinpool-handoff-s"
_BYTES_HEADER = b"x-twinpool-handoff-bytes"

Headers = list[tuple[bytes, bytes]]

Mend = Callable[[bytes], bytes]
"""Puts right what an engine cannot know, in whole events or a whole body."""


class EngineError(msgspec.Struct, frozen=True):
    """An engine's own words for its refusal, kept to be passed on as they came."""

    status: int
    headers: Headers
    body: bytes


class LegEnd(msgspec.Struct, frozen=True):
    """What became of a leg: a usage, or a failure and perhaps the engine's words for it. `written`: about how many tokens, by
    the events of a stream that tells no usage."""

    failure: Failure | None = None
    usage: Usage | None = None
    written: int | None = None
    error: EngineError | None = None
    retry_after_s: float | None = None


class Handoff(msgspec.Struct):
    """What the decoding engine says of its handoff, in the head of its answer; None where it says nothing."""

    seconds: float | None = None
    moved_bytes: int | None = None


class Doubt(Protocol):
    """Whether what a leg writes may be believed; see `guard`."""

    def is_safe(self, first_token: float) -> bool: ...
    def find_out(self, first_token: float, then: Callable[[bool], None]) -> None:
        """Calls `then`, some time later, with whether it may."""


class Reads(NamedTuple):
    """How an engine's stream is to be read. `hides_usage`: it was us who asked for it. `counts_events`: the engine is not known
    to tell it."""

    doubt: Doubt | None = None
    mends: Sequence[Mend] = ()
    hides_usage: bool = False
    counts_events: bool = False


class _Answer:
    """The half that both kinds share: the head, an answer that is not 200, one that must be found out about."""

    def __init__(self, doubt: Doubt | None = None) -> None:
        self._doubt = doubt
        self.done: asyncio.Future[LegEnd] = asyncio.get_running_loop().create_future()
        self.handoff = Handoff()
        self.content_type = b"application/json"
        self._status = 0
        self._headers: Headers = []
        self._body = bytearray()

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status
        self._headers = headers
        for name, value in headers:
            if name == b"content-type":
                self.content_type = value
            elif name == _HANDOFF_HEADER:
                self.handoff.seconds = _number(value)
            elif name == _BYTES_HEADER:
                moved = _number(value)
                self.handoff.moved_bytes = None if moved is None else int(moved)

    def on_lost(self, error: UpstreamLost) -> None:
        self._end(LegEnd(failure=failure_of_loss(error)))

    def _refused(self) -> LegEnd:
        body = bytes(self._body[:_MAX_ERROR_BYTES])
        kept = [(name, value) for name, value in self._headers if name in (b"content-type", b"retry-after")]
        return LegEnd(
            failure=failure_of_status(self._status, body),
            error=EngineError(self._status, kept, body),
            retry_after_s=retry_after_s(self._headers),
        )

    def _end(self, end: LegEnd) -> None:
        if not self.done.done():
            self.done.set_result(end)

    def _must_find_out(self, first_token: float) -> bool:
        """Whether the answer has to wait; then `_found_out` is called, unless the leg ends before."""
        doubt, self._doubt = self._doubt, None
        if doubt is None or doubt.is_safe(first_token):
            return False
        doubt.find_out(first_token, self._found_out)
        return True

    def _found_out(self, may_be_believed: bool) -> None:
        if self.done.done():
            return
        if may_be_believed:
            self._believe()
        else:
            self._end(LegEnd(failure=Failure.SUSPECT))

    def _believe(self) -> None:
        raise NotImplementedError


class WholeAnswer(_Answer):
    """An answer that is not streamed: kept until it is whole, so that one that breaks can be begun anew."""

    def __init__(self, doubt: Doubt | None = None, mends: Sequence[Mend] = (), prompt_tokens: int | None = None) -> None:
        """`prompt_tokens` is what another engine has counted, where this one must count the same."""
        super().__init__(doubt)
        self._mends = mends
        self._prompt_tokens = prompt_tokens
        self._usage: Usage | None = None

    @property
    def body(self) -> bytes:
        """The answer without what only engines may see."""
        body = bytes(self._body)
        for mend in self._mends:
            body = mend(body)
        if not any(name.encode() in body for name in OURS):
            return body
        try:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        except msgspec.DecodeError:
            return body
        return put_together({name: value for name, value in fields.items() if name not in OURS})

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_end(self) -> None:
        if self._status != 200:
            self._end(self._refused())
            return
        ending = read_ending(bytes(self._body))
        if ending is not None and ending.is_failure:
            self._end(LegEnd(failure=Failure.ERROR))
            return
        self._usage = ending.counted() if ending is not None else None
        if self._usage is not None and self._prompt_tokens not in (None, self._usage.prompt_tokens):
            self._end(LegEnd(failure=Failure.MISCOUNTED))
        elif not self._must_find_out(monotonic()):
            self._believe()

    def _believe(self) -> None:
        self._end(LegEnd(usage=self._usage))


class StreamedAnswer(_Answer):
    """A stream on its way to the client. `gaps` is None until the first token."""

    def __init__(
        self,
        responder: Responder,
        answer_headers: Headers,
        on_first_token: Callable[[float], None],
        copy: SentCopy | None,
        reads: Reads,
    ) -> None:
        super().__init__(reads.doubt)
        self.gaps: Gaps | None = None
        self._mends = reads.mends
        self._hides_usage = reads.hides_usage
        self._counts_events = reads.counts_events
        self._events = 0
        self._has_token = False
        self._is_held = False
        self._has_ended = False  # while it was held
        self.had_error = False
        """The engine has put an error into the stream, and the client has it."""
        self._responder = responder
        self._answer_headers = answer_headers
        self._on_first_token = on_first_token
        self._exchange: Exchange | None = None
        self._looked_at = 0
        self._copy = copy
        self._part = b""  # of an event that has not come whole
        self._tail: deque[bytes] = deque(maxlen=_TAIL_PIECES)

    def hold_back(self, exchange: Exchange) -> None:
        """From now on the engine is read no faster than the client reads."""
        self._exchange = exchange
        self._responder.on_pause = exchange.pause
        self._responder.on_resume = exchange.resume
        if self._responder.is_paused:
            exchange.pause()

    def client_has_all(self) -> bool:
        """Asked when the client has left: it may have read `[DONE]` and gone, as the openai client does, before the engine
        has ended its answer. That end is then waited for, however full the client's socket was."""
        has_all = self.gaps is not None and read_closing(b"".join(self._tail))[0]
        if has_all and self._exchange is not None:
            self._exchange.resume()
        return has_all

    def on_body(self, data: bytes) -> None:
        gaps = self.gaps
        if gaps is None:
            self._open(data)
            return
        gaps.stamp(monotonic())
        if self._part or not data.endswith(b"\n\n"):
            data = self._whole_events(data)
        self._pass(data)

    def break_off(self) -> None:
        """The engine is known to be gone."""
        self._end(LegEnd(failure=Failure.RESTARTED))

    def _pass(self, data: bytes) -> None:
        if not data:  # no event has come whole
            return
        for mend in self._mends:
            data = mend(data)
        self._tail.append(data)
        if b'data: {"error"' in data:  # inside a token's text the quotes would be escaped
            self.had_error = True
        if self._counts_events:
            self._events += data.count(b"data:")
        if self._hides_usage:
            data = without_usage(data)
        self._responder.write(data)
        if self._copy is not None:
            self._copy.add(data)

    def _whole_events(self, data: bytes) -> bytes:
        """What may be passed on; the rest waits for its end."""
        data = self._part + data
        ends = [at + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if (at := data.rfind(mark)) >= 0]
        end = max(ends, default=0)
        if not end and len(data) > _MAX_EVENT_BYTES:  # no event was ever so long: it is not ours to hold back
            end = len(data)
        self._part = data[end:]
        return data[:end]

    def _open(self, data: bytes) -> None:
        if self.done.done():
            return
        self._body += data
        if self._status != 200:
            return
        if self._is_held:
            if len(self._body) > _MAX_OPENING_BYTES and self._exchange is not None:
                self._exchange.pause()
            return
        opening, looked_at = read_opening(bytes(self._body[self._looked_at :]))
        self._looked_at += looked_at
        if opening is Opening.ERROR:
            status, body = read_error(bytes(self._body))
            error = EngineError(status, [(b"content-type", b"application/json")], body)
            self._end(LegEnd(failure=failure_of_status(status, body), error=error))
        elif opening is Opening.CONTENT or len(self._body) > _MAX_OPENING_BYTES:
            self._has_token = True
            self._is_held = self._must_find_out(monotonic())
            if not self._is_held:
                self._begin()

    def _begin(self) -> None:
        now = monotonic()
        self.gaps = Gaps(now)
        self._pass_opening()
        self._on_first_token(now)

    def _believe(self) -> None:
        self._is_held = False
        if self._exchange is not None and not self._responder.is_paused:
            self._exchange.resume()
        if self._has_token:
            self._begin()
        if self._has_ended:
            self.on_end()

    def _pass_opening(self) -> None:
        opening = bytes(self._body)
        self._body.clear()
        self._events = 1 - opening[: self._looked_at].count(b"data:")  # the first token's is the first that counts
        self._responder.start(200, [(b"content-type", self.content_type), *self._answer_headers])
        self._pass(self._whole_events(opening))

    def on_end(self) -> None:
        if self._status != 200:
            self._end(self._refused())
            return
        if self._is_held:
            self._has_ended = True
            return
        if DONE in self._part:  # some engines leave out the last blank line
            self._pass(self._part)
        tail = b"".join(self._tail) if self.gaps is not None else bytes(self._body)
        is_whole, ending = read_closing(tail)
        if self.had_error:
            self._end(LegEnd(failure=Failure.ERROR))
        elif not is_whole:
            self._end(LegEnd(failure=Failure.BROKEN))
        elif self.gaps is None and self._must_find_out(monotonic()):  # not a single token, and even that may be wrong
            self._is_held = self._has_ended = True
        else:
            if self.gaps is None:
                self._pass_opening()
            self._end(LegEnd(usage=ending.counted(), written=self._written()))

    def _written(self) -> int | None:
        """An estimate: an event a token, but for the last two, which say why it ended and that it did."""
        return max(1, self._events - 2) if self._counts_events and self.gaps is not None else None


class ContinuedAnswer(StreamedAnswer):
    """A stream that goes on where another engine's stopped: each event is rewritten to be the first one's."""

    def __init__(
        self,
        responder: Responder,
        on_first_token: Callable[[float], None],
        copy: SentCopy,
        sent: Sent,
        gaps: Gaps,
        reads: Reads,
    ) -> None:
        super().__init__(responder, [], on_first_token, copy, reads)
        self._sent = sent
        self._gaps_so_far = gaps

    def _pass_opening(self) -> None:
        self.gaps = self._gaps_so_far
        self.gaps.stamp(monotonic())
        opening = bytes(self._body)
        self._body.clear()
        self._pass(self._whole_events(opening))

    def _pass(self, data: bytes) -> None:
        joined = (join_event(event, self._sent) for event in data.split(b"\n\n") if event)
        super()._pass(b"".join(event + b"\n\n" for event in joined if event is not None))


def _number(value: bytes) -> float | None:
    """What an engine counts; None where it is nothing that can be counted."""
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None
