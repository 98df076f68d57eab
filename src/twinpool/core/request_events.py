"""What happened to requests, and what follows from it."""

from twinpool.core import commands as do
from twinpool.core import events as on
from twinpool.core.books import Books
from twinpool.core.cluster import LegKey, Worker
from twinpool.core.decisions import Why
from twinpool.core.dispatching import dispatch, hand_off, refuse_if_late, send_canaries
from twinpool.core.endings import cancel_legs, end, fail, refuse, release, resume, retry
from twinpool.core.lifecycle import RequestMove, RequestState
from twinpool.core.model import Failure, Incarnation, Leg, Usage
from twinpool.core.policies import Entrance
from twinpool.core.rebalancing import start_ticking
from twinpool.core.requests import Request
from twinpool.errors import Reason

_STRIKES = frozenset(set(Failure) - {Failure.REJECTED, Failure.BUSY, Failure.UNREACHABLE})
"""Failures that count against `max_attempts`. A busy or an absent worker does not: those are bounded by the deadlines."""

_MAY_BE_THE_PAIR = frozenset({Failure.ERROR, Failure.TIMED_OUT, Failure.HANDLE_REFUSED, Failure.SUSPECT, Failure.MISCOUNTED})
"""Failures of a decode leg for which the prefill worker may be as much at fault: a retry avoids both, and they count against
the pair."""

_FAILED_HANDOFFS = frozenset({Failure.NO_HANDLE, Failure.HANDLE_REFUSED, Failure.SUSPECT, Failure.MISCOUNTED})

_FEWEST_STEPS = 8
"""Of an answer that is not streamed, to learn from: in a shorter one it is mostly the way there that takes time."""

_CONNECTION_LOST = frozenset({Failure.UNREACHABLE, Failure.BROKEN})


# members under names of this module: through its class each takes 0.2 µs on Python 3.11, several dozen times a request
_PREFILL, _DECODE, _WHOLE = Leg
_QUEUE, _FIRST_TOKEN, _FINISH = RequestMove.QUEUE, RequestMove.FIRST_TOKEN, RequestMove.FINISH
_PREFILLING = RequestState.PREFILLING


def request_arrived(books: Books, event: on.RequestArrived, out: list[do.Command]) -> None:
    if event.request in books.requests:
        return
    tokens = books.policies.prompt_lengths.tokens(event.facts)
    start_ticking(books, event.at)
    books.policies.learner.arrived(event.at, event.facts, tokens)
    expires = event.at + books.rules.request_timeout_s
    turn = event.at - event.facts.priority * books.rules.priority_lead_s
    request = Request.arrived(event.request, event.facts, tokens, expires=expires, turn=turn)
    books.requests[event.request] = request
    refusal = books.policies.admit(event.facts, Entrance(len(books.waiting), books.is_draining))
    if refusal is not None and not (refusal is Why.QUEUE_FULL and _makes_room(books, request, out)):
        refuse(books, request, refusal, out)
        return
    books.alarm(request.expires)
    request.story.move(_QUEUE)
    books.begin_wait(request, event.at)
    books.waiting.append(request)
    if not (books.rules.refuse_late and _is_late(books, request, event.at, out)):
        dispatch(books, event.at, out)


def _makes_room(books: Books, request: Request, out: list[do.Command]) -> bool:
    """The queue is full: whoever fills it gives way to the others."""
    other = books.waiting.who_yields_to(request)
    if other is None:
        return False
    books.waiting.remove(other)
    refuse(books, other, Why.QUEUE_FULL, out)
    return True


def _is_late(books: Books, request: Request, at: float, out: list[do.Command]) -> bool:
    """One that has just come, with all that wait before it."""
    workers = books.cluster.routable(request.facts.model, at)
    decision = books.policies.route(request.pending(at, books.waiting.ahead_of(request)), workers)
    return refuse_if_late(books, request, decision, at, out)


def prefill_finished(books: Books, event: on.PrefillFinished, out: list[do.Command]) -> None:
    request = books.current(event.request, event.attempt)
    if request is None or _PREFILL not in request.out:
        return
    request.out.remove(_PREFILL)
    key = request.key(_PREFILL)
    cached = event.cached_tokens
    if cached is None:
        cached = min(request.cached_tokens, max(0, event.prompt_tokens - 1))
    _prompt_read(books, request, key, max(0, event.prompt_tokens - cached), cached)
    if event.cached_tokens is not None and request.prefill is not None:
        books.policies.learner.told(request.prefill.worker, request.held_tokens, event.cached_tokens)
    books.cluster.give_back(key)
    _learn_length(books, request, event.prompt_tokens)
    if request.story.state is _PREFILLING:
        hand_off(books, request, event, out)
    dispatch(books, event.at, out)


def first_token_arrived(books: Books, event: on.FirstTokenArrived, out: list[do.Command]) -> None:
    request = books.current(event.request, event.attempt)
    if request is None or not request.story.can(_FIRST_TOKEN):
        return
    request.story.move(_FIRST_TOKEN)
    _handoff_arrived(books, request)
    if _WHOLE in request.out:
        key = request.key(_WHOLE)
        _prompt_read(books, request, key, request.prompt_tokens - request.cached_tokens, request.cached_tokens)
        request.mark = books.cluster.begun(key)
        dispatch(books, event.at, out)
    elif _DECODE in request.out:
        request.mark = books.cluster.begun(request.key(_DECODE))
        if request.facts.prefix and request.decode is not None:
            _holds(books, request, books.cluster.get(request.decode.worker))  # what was handed over to it


def request_finished(books: Books, event: on.RequestFinished, out: list[do.Command]) -> None:
    request = books.current(event.request, event.attempt)
    if request is None or not request.story.can(_FINISH):
        return
    _handoff_arrived(books, request)
    if _WHOLE in request.out:
        if not request.facts.stream and request.mark is not None:  # only now does anybody know
            unread = request.prompt_tokens - request.cached_tokens
            _prompt_read(books, request, request.key(_WHOLE), unread, request.cached_tokens)
        if event.usage is not None and event.usage.cached_tokens is not None:
            _told_cached(books, request, event.usage.cached_tokens)
    _learn_speed(books, request, event)
    for leg in (_DECODE, _WHOLE):
        if leg in request.out:
            request.out.remove(leg)
    if event.usage is not None:
        _check_count(books, request, event, event.usage.prompt_tokens, out)
        _learn_length(books, request, event.usage.prompt_tokens)
    end(books, request, _FINISH, out)
    dispatch(books, event.at, out)


def _handoff_arrived(books: Books, request: Request) -> None:
    """D has written from the KV; nothing, where one worker does all."""
    books.handles.spend((request.id, request.attempt))
    if request.prefill is not None and request.decode is not None:
        due = books.pairs.arrived(request.prefill.worker, request.decode.worker)
        if due is not None:
            books.alarm(due)


def _check_count(books: Books, request: Request, event: on.RequestFinished, prompt_tokens: int, out: list[do.Command]) -> None:
    """Two engines that make other tokens of one prompt must not hand over; this client has its answer already."""
    was_told = request.counted_tokens and prompt_tokens  # an engine without usage has counted nothing
    if not was_told or request.counted_tokens == prompt_tokens or request.is_begun or request.prefill is None:
        return
    prefill, decode = request.engines()
    if not (prefill.vouches and decode.vouches):
        why = f"they count the same prompt differently: {request.counted_tokens} and {prompt_tokens} tokens"
        books.pairs.condemn(prefill.worker, decode.worker, why)
        send_canaries(books, event.at, out)


def leg_failed(books: Books, event: on.LegFailed, out: list[do.Command]) -> None:
    request = books.current(event.request, event.attempt)
    if request is None or event.leg not in request.out:
        return
    lose_leg(books, request, event, out)
    dispatch(books, event.at, out)


def lose_leg(books: Books, request: Request, event: on.LegFailed, out: list[do.Command]) -> None:
    _blame(books, request, event, out)
    request.out.remove(event.leg)
    if request.story.state is not RequestState.STREAMING:
        _after_failure(books, request, event, out)
    elif event.leg is _PREFILL:  # it ran beside, and the client has its tokens: nobody's loss by now
        books.cluster.give_back(request.key(_PREFILL))
    elif event.can_continue and request.strikes + 1 < books.rules.max_attempts:
        resume(books, request, event.at, out)
    else:
        fail(books, request, 502, Reason.UPSTREAM_FAILED, out)


def _blame(books: Books, request: Request, event: on.LegFailed, out: list[do.Command]) -> None:
    """What the failure says of the worker. A 4xx says nothing of it."""
    engine = request.prefill if event.leg is _PREFILL else request.decode
    worker = books.cluster.get(engine.worker) if engine is not None else None
    if worker is None or engine is None or worker.facts.incarnation != engine.incarnation:
        return
    if event.failure is Failure.BUSY:
        asked_s = event.retry_after_s if event.retry_after_s is not None else 0.0
        pause_s = min(max(books.rules.pause_s, asked_s), books.rules.max_pause_s)
        worker.paused_until = max(worker.paused_until, event.at + pause_s)
        books.alarm(worker.paused_until)
    elif event.failure in _CONNECTION_LOST:
        worker.lose()
        out.append(do.ProbeWorker(worker=engine.worker))
        send_canaries(books, event.at, out)
    if event.failure not in (Failure.BUSY, Failure.REJECTED):
        request.avoid |= {engine.worker}
        if event.leg is _DECODE and event.failure in _MAY_BE_THE_PAIR and request.prefill is not None:
            request.avoid |= {request.prefill.worker}
            if request.story.state is not RequestState.STREAMING:  # else its handoff went well
                _blame_pair(books, request, request.prefill, engine, event, out)


def _blame_pair(
    books: Books, request: Request, prefill: Incarnation, decode: Incarnation, event: on.LegFailed, out: list[do.Command]
) -> None:
    if event.failure is Failure.MISCOUNTED:
        books.pairs.condemn(prefill.worker, decode.worker, "the two count the same prompt's tokens differently")
    else:
        books.pairs.strike(prefill.worker, decode.worker, request.id, event.at, event.failure)
    send_canaries(books, event.at, out)


def _after_failure(books: Books, request: Request, event: on.LegFailed, out: list[do.Command]) -> None:
    """No token has reached the client: begin anew where that can help, else end with what is known."""
    cancel_legs(request, out)
    release(books, request, out)
    if event.failure is Failure.REJECTED:
        end(books, request, RequestMove.FAIL, out)
        out.append(do.RelayFailure(request=request.id))
        return
    request.strikes += event.failure in _STRIKES
    request.failed_handoffs += event.leg is _DECODE or event.failure is Failure.NO_HANDLE
    if request.strikes >= books.rules.max_attempts and event.at < request.expires:
        if event.status is not None and event.failure is Failure.ERROR:
            end(books, request, RequestMove.FAIL, out)
            out.append(do.RelayFailure(request=request.id))
        elif event.failure is Failure.TIMED_OUT:
            fail(books, request, 504, Reason.DEADLINE_EXCEEDED, out)
        elif event.failure in _FAILED_HANDOFFS:
            fail(books, request, 503, Reason.HANDOFF_FAILED, out, retry_after_s=1)
        else:
            fail(books, request, 502, Reason.UPSTREAM_FAILED, out)
    else:
        retry(books, request, event.at, out, waits_anew=event.failure in _STRIKES)


def client_left(books: Books, event: on.ClientLeft, out: list[do.Command]) -> None:
    request = books.requests.get(event.request)
    if request is None:
        return
    cancel_legs(request, out)
    release(books, request, out)
    end(books, request, RequestMove.LEAVE, out)
    dispatch(books, event.at, out)


def handle_released(books: Books, event: on.HandleReleased, out: list[do.Command]) -> None:
    lease_end = books.handles.released((event.request, event.attempt), freed=event.freed)
    if lease_end is not None:
        books.alarm(max(lease_end, event.at))


def _learn_length(books: Books, request: Request, prompt_tokens: int) -> None:
    if prompt_tokens > 0:
        books.policies.prompt_lengths.learn(request.facts, prompt_tokens)


def _prompt_read(books: Books, request: Request, key: LegKey, tokens: int, cached: int) -> None:
    """A worker has read a prompt: it holds its beginning from now on, and may have shown how fast it reads."""
    engine = request.prefill if key.leg is _PREFILL else request.decode
    seen = books.cluster.prompt_read(key, tokens, cached)
    worker = books.cluster.get(engine.worker) if engine is not None else None
    if worker is None:
        return
    if request.facts.prefix:
        learner, name = books.policies.learner, worker.facts.worker
        request.held_tokens = learner.held(name, request.facts.prefix, request.prompt_tokens)
        _holds(books, request, worker)
        learner.reused(tokens, cached)
    if seen is not None:
        books.policies.learner.read(worker.kind, seen)


def _holds(books: Books, request: Request, worker: Worker | None) -> None:
    if worker is None:
        return
    capacity = worker.facts.kv_capacity_tokens
    room = None if capacity is None else capacity - worker.kv_tokens
    books.policies.learner.holds(worker.facts.worker, request.facts.prefix, room)


def _told_cached(books: Books, request: Request, cached_tokens: int) -> None:
    if request.decode is not None:
        books.policies.learner.told(request.decode.worker, request.held_tokens, cached_tokens)


def _learn_speed(books: Books, request: Request, event: on.RequestFinished) -> None:
    """Of an answer that is not streamed, its first token was written in the time that is looked at; of a stream it was not."""
    learner = books.policies.learner
    usage = event.usage or _estimated(request, event)
    if usage is None:
        return
    learner.finished(request.facts, usage)
    worker = books.cluster.get(request.decode.worker) if request.decode is not None else None
    if worker is None or request.mark is None or not request.out:
        return
    leg = request.out[-1]
    seen = books.cluster.written(request.key(leg), request.mark)
    handoff_s = event.timeline.handoff_s if leg is _DECODE else None
    steps = usage.completion_tokens // request.facts.sequences - request.facts.stream
    if seen is not None and not request.facts.stream:
        seen = seen.without(handoff_s or 0.0) if steps >= _FEWEST_STEPS else None
    if seen is not None and steps > 0 and not request.is_begun:
        learner.wrote(worker.kind, seen, steps)
    if handoff_s is not None:
        learner.handed_over(worker.kind, usage.prompt_tokens, handoff_s)


def _estimated(request: Request, event: on.RequestFinished) -> Usage | None:
    """Where the engine has counted nothing, or only the prompt."""
    return None if event.written is None else Usage(request.counted_tokens or request.prompt_tokens, event.written)
