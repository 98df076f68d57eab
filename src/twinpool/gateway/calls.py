"""One client's request while the gateway has it: its body, its answer, and the moments that make its timeline."""

import asyncio
from collections.abc import Iterable

import msgspec

from twinpool.core.model import Leg
from twinpool.errors import RequestError
from twinpool.gateway.cache_epochs import Epoch, Watch
from twinpool.gateway.continuation import SentCopy
from twinpool.gateway.openai import Call
from twinpool.gateway.relay import EngineError, Handoff, Headers, StreamedAnswer
from twinpool.http1 import Responder
from twinpool.measure.gaps import Gaps
from twinpool.measure.timeline import Timeline


class ClientRequest:
    """Everything of one request that is not the controller's business. Times are seconds on `time.monotonic`.

    `handles` has the handle of each attempt that holds one, `legs` the task of each leg under way, `error` what the last
    engine said when it refused.
    """

    __slots__ = (
        "_passed_headers",
        "arrived",
        "attempt",
        "cached_tokens",
        "call",
        "copy",
        "decode",
        "ended",
        "error",
        "first_token",
        "gaps",
        "handles",
        "handoff",
        "id",
        "legs",
        "path",
        "prefill",
        "prefilled",
        "prompt_tokens",
        "read_in",
        "responder",
        "sent",
        "stream",
        "stream_has_error",
        "watch",
        "wire_id",
    )

    def __init__(
        self,
        request: str,
        wire_id: bytes,
        call: Call,
        responder: Responder,
        arrived: float,
        passed_headers: Headers,
    ) -> None:
        self.id = request
        self.wire_id = wire_id  # what the client calls it
        self.call = call
        self.responder = responder
        self.arrived = arrived
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.legs: dict[Leg, asyncio.Task[None]] = {}
        self.handles: dict[int, msgspec.Raw] = {}
        self._passed_headers = passed_headers
        self.error: EngineError | None = None
        self.gaps: Gaps | None = None
        self.stream: StreamedAnswer | None = None  # the last attempt's
        self.copy: SentCopy | None = None  # of what the client has, where another engine could go on with it
        self.stream_has_error = False
        self.read_in: Epoch | None = None  # what the last prefill could use of its engine's cache
        self.watch: Watch | None = None  # over the last decode leg of a handle, until it is judged
        self.prompt_tokens: int | None = None  # as an engine counted them
        self.cached_tokens: int | None = None  # of those, where the prompt was prefilled, as far as that is told
        self.begin(attempt=0, path="none", sent=None)

    @property
    def is_begun(self) -> bool:
        """The client has part of the answer."""
        return self.responder.started

    def begin(self, *, attempt: int, path: str, sent: float | None, prefill: str = "", decode: str = "") -> None:
        """A new attempt: the moments of the one before do not count for it, unless it gave the client a first token."""
        self.attempt = attempt
        self.path = path
        self.prefill = prefill
        self.decode = decode
        if self.is_begun:
            return
        self.sent = sent
        self.prefilled: float | None = None
        self.first_token: float | None = None
        self.handoff = Handoff()

    def timeline(self, ended: float) -> Timeline:
        return Timeline(
            arrived=self.arrived,
            sent=self.sent,
            prefilled=self.prefilled,
            first_token=self.first_token,
            handoff_s=self.handoff.seconds,
            ended=ended,
        )

    def leg_headers(self, leg: Leg) -> Headers:
        """For an engine. The id is new with each leg, so that no engine ever takes two for one."""
        leg_id = f"{self.id}-{self.attempt}-{leg}".encode()
        return [(b"content-type", b"application/json"), (b"x-request-id", leg_id), *self._passed_headers]

    def answer_headers(self, *, with_route: bool) -> Headers:
        """Ours, for the client's answer."""
        headers = [(b"x-request-id", self.wire_id)]
        if with_route and self.path != "none":
            headers.append((b"x-twinpool-path", self.path.encode()))
            if self.prefill:
                headers.append((b"x-twinpool-prefill", self.prefill.encode()))
            headers.append((b"x-twinpool-decode", self.decode.encode()))
        return headers

    def fail(self, error: RequestError, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Answer with the error; where the stream has begun, as one event in it and without an invented end."""
        if not self.responder.started:
            lines = [(b"content-type", b"application/json"), *headers]
            if error.retry_after_s is not None:
                lines.append((b"retry-after", b"%d" % error.retry_after_s))
            self.responder.send(error.status, lines, msgspec.json.encode(error.envelope()))
        elif not self.responder.is_over:
            if not self.stream_has_error:
                self.responder.write(b"data: %b\n\n" % msgspec.json.encode(error.envelope()))
            self.responder.finish()
