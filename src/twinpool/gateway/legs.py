"""The legs of a request: one task each, from the connection to the end.

Each reports one event to the driver, unless it is cancelled first: cancelling closes the socket, which is how an engine learns
that nobody waits.
"""

import asyncio
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any

import msgspec

from twinpool.config import Timeouts
from twinpool.core import events as on
from twinpool.core.model import Failure, Leg
from twinpool.engines.answers import failure_of_loss, failure_of_status, retry_after_s
from twinpool.gateway.calls import ClientRequest
from twinpool.gateway.continuation import Sent, SentCopy, read_sent
from twinpool.gateway.hiding import hide_handoff
from twinpool.gateway.openai import PATHS
from twinpool.gateway.place import Place
from twinpool.gateway.relay import ContinuedAnswer, Doubt, EngineError, LegEnd, Mend, Reads, StreamedAnswer, WholeAnswer
from twinpool.gateway.usage import asking_for_usage, knows_the_wish, prefill_cached
from twinpool.handoff import nixl
from twinpool.handoff.body import CONTINUE_FIELD, put_together, salted
from twinpool.http1 import Deadlines, Origin, Pool, Response, UpstreamLost


class Legs:
    """Runs legs over a pool of connections and tells `feed` what becomes of them."""

    def __init__(
        self,
        pool: Pool,
        timeouts: Timeouts,
        feed: Callable[[on.Event], None],
        release: Callable[[str, int, Origin, msgspec.Raw], None],
        *,
        expose_route: bool,
    ) -> None:
        self._pool = pool
        self._timeouts = timeouts
        self._feed = feed
        self._release = release
        self._expose_route = expose_route
        self._deadlines = Deadlines(timeouts.connect_s, timeouts.first_byte_s, timeouts.idle_s)
        self._tasks: set[asyncio.Task[None]] = set()

    def start_prefill(self, request: ClientRequest, place: Place) -> None:
        self._start(request, Leg.PREFILL, self._prefill(request, request.attempt, place))

    def start_decode(self, request: ClientRequest, place: Place, doubt: Doubt | None) -> None:
        """The handle of this attempt goes with it: it is presented once, whatever comes of it. `doubt`: what must be found
        out before the client may have any of it."""
        self._start_answer(request, Leg.DECODE, place, request.handles[request.attempt], doubt)

    def start_whole(self, request: ClientRequest, place: Place, doubt: Doubt | None) -> None:
        self._start_answer(request, Leg.WHOLE, place, None, doubt)

    def cancel(self, request: ClientRequest, leg: Leg) -> None:
        task = request.legs.pop(leg, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Cancel what is left and wait until it is gone."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def break_off(self, request: ClientRequest) -> None:
        """The engine that streams to this client is known to be gone."""
        if request.stream is not None:
            request.stream.break_off()

    def _start_answer(
        self, request: ClientRequest, leg: Leg, place: Place, handle: msgspec.Raw | None, doubt: Doubt | None
    ) -> None:
        fields = salted(request.call.fields, place.salt)
        answer: WholeAnswer | StreamedAnswer
        mends: list[Mend] = []
        if not place.facts.vouches:
            mends.append(hide_handoff)
        counted_tokens = None
        if handle is not None and doubt is not None:
            # who does not vouch for what it read does not know either what was cached where it was written
            mends.append(prefill_cached(request.cached_tokens or 0))
            counted_tokens = request.prompt_tokens or None
        if not request.call.facts.stream:
            answer = WholeAnswer(doubt, mends, counted_tokens)
        else:
            is_asked = knows_the_wish(place.facts)
            asking = asking_for_usage(fields) if is_asked else None
            fields = asking or fields
            if request.is_begun:
                answer, sent = self._continued(request, hides_usage=asking is not None)
                fields = {**fields, CONTINUE_FIELD: msgspec.Raw(msgspec.json.encode({"text": sent.text}))}
            else:
                reads = Reads(doubt, mends, hides_usage=asking is not None, counts_events=not is_asked)
                answer = self._streamed(request, place.facts.continues, reads)
        body = put_together(fields) if handle is None else nixl.decode_body(fields, handle)
        self._start(request, leg, self._answer(request, request.attempt, leg, place.origin, body, answer))

    def _start(self, request: ClientRequest, leg: Leg, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        request.legs[leg] = task
        self._tasks.add(task)

        def ended(_: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if request.legs.get(leg) is task:
                del request.legs[leg]

        task.add_done_callback(ended)

    # The prefill leg

    async def _prefill(self, request: ClientRequest, attempt: int, place: Place) -> None:
        worker, path = place.origin, PATHS[request.call.endpoint]
        body = nixl.prefill_body(salted(request.call.fields, place.salt))
        try:
            answer = await self._pool.fetch(
                worker,
                "POST",
                path,
                request.leg_headers(Leg.PREFILL),
                body,
                timeout_s=self._timeouts.connect_s + self._timeouts.prefill_s,
                deadlines=Deadlines(self._timeouts.connect_s, self._timeouts.prefill_s, self._timeouts.idle_s),
            )
        except UpstreamLost as lost:
            self._failed(request, attempt, Leg.PREFILL, LegEnd(failure=failure_of_loss(lost)))
            return
        if answer.status != 200:
            self._failed(request, attempt, Leg.PREFILL, _refusal(answer))
            return
        try:
            prefilled = nixl.read_prefill_answer(answer.body)
        except nixl.HandoffMissingError as missing:
            if missing.handle is not None:
                self._release(request.id, attempt, worker, missing.handle)
            self._failed(request, attempt, Leg.PREFILL, LegEnd(failure=Failure.NO_HANDLE))
            return
        request.prefilled = monotonic()
        request.handles[attempt] = prefilled.handle
        request.prompt_tokens = prefilled.prompt_tokens
        request.cached_tokens = prefilled.cached_tokens
        self._feed(
            on.PrefillFinished(
                at=request.prefilled,
                request=request.id,
                attempt=attempt,
                prompt_tokens=prefilled.prompt_tokens,
                cached_tokens=prefilled.cached_tokens,
            )
        )

    # The legs that answer the client

    async def _answer(
        self,
        request: ClientRequest,
        attempt: int,
        leg: Leg,
        worker: Origin,
        body: bytes,
        answer: WholeAnswer | StreamedAnswer,
    ) -> None:
        headers = request.leg_headers(leg)
        path = PATHS[request.call.endpoint]
        try:
            exchange = await self._pool.request(worker, "POST", path, headers, body, answer, self._deadlines)
        except UpstreamLost as lost:
            self._failed(request, attempt, leg, LegEnd(failure=failure_of_loss(lost)))
            return
        with exchange:
            if isinstance(answer, StreamedAnswer):
                answer.hold_back(exchange)
            end = await answer.done
        if isinstance(answer, StreamedAnswer):
            request.gaps = answer.gaps or request.gaps
            request.stream_has_error = answer.had_error
        if not isinstance(answer, ContinuedAnswer):
            request.handoff = answer.handoff
        if end.failure is not None:
            self._failed(request, attempt, leg, end)
            return
        now = monotonic()
        if isinstance(answer, WholeAnswer):
            ours = request.answer_headers(with_route=self._expose_route)
            request.responder.send(200, [(b"content-type", answer.content_type), *ours], answer.body)
        else:
            request.responder.finish()
        self._feed(
            on.RequestFinished(
                at=now,
                request=request.id,
                attempt=attempt,
                timeline=request.timeline(now),
                usage=end.usage,
                written=end.written if end.usage is None else None,
            )
        )

    def _streamed(self, request: ClientRequest, continues: bool, reads: Reads) -> StreamedAnswer:
        attempt = request.attempt

        def first_token(at: float) -> None:
            request.first_token = at
            request.handoff = answer.handoff
            self._feed(on.FirstTokenArrived(at=at, request=request.id, attempt=attempt))

        request.copy = SentCopy() if continues and request.call.can_continue else None
        headers = request.answer_headers(with_route=self._expose_route)
        answer = request.stream = StreamedAnswer(request.responder, headers, first_token, request.copy, reads)
        return answer

    def _continued(self, request: ClientRequest, *, hides_usage: bool) -> tuple[ContinuedAnswer, Sent]:
        attempt = request.attempt

        def first_token(at: float) -> None:
            self._feed(on.FirstTokenArrived(at=at, request=request.id, attempt=attempt))

        sent = _sent(request)
        if sent is None or request.copy is None or request.gaps is None:
            raise ValueError(f"{request.id} cannot be gone on with")  # it was reported as one that can
        answer = ContinuedAnswer(
            request.responder, first_token, request.copy, sent, request.gaps, Reads(hides_usage=hides_usage)
        )
        request.stream = answer
        return answer, sent

    def _failed(self, request: ClientRequest, attempt: int, leg: Leg, end: LegEnd) -> None:
        request.error = end.error
        self._feed(
            on.LegFailed(
                at=monotonic(),
                request=request.id,
                attempt=attempt,
                leg=leg,
                failure=end.failure or Failure.ERROR,
                status=end.error.status if end.error is not None else None,
                retry_after_s=end.retry_after_s,
                can_continue=request.is_begun and _sent(request) is not None,
            )
        )


def _sent(request: ClientRequest) -> Sent | None:
    """What the client has, where another engine can go on with it."""
    return None if request.copy is None or request.stream_has_error else read_sent(request.copy)


def _refusal(answer: Response) -> LegEnd:
    kept = [(name, value) for name, value in answer.headers if name in (b"content-type", b"retry-after")]
    return LegEnd(
        failure=failure_of_status(answer.status, answer.body),
        error=EngineError(answer.status, kept, answer.body),
        retry_after_s=retry_after_s(answer.headers),
    )
