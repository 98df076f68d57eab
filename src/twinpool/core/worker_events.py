"""What happened to workers and to pairs of them, and what follows from it."""

from twinpool.core import commands as do
from twinpool.core import events as on
from twinpool.core.books import Books
from twinpool.core.cluster import Worker
from twinpool.core.decisions import WhyBalance
from twinpool.core.dispatching import dispatch, send_canaries
from twinpool.core.lifecycle import RequestState, WorkerState
from twinpool.core.model import Failure, Incarnation, Leg, WorkerFacts
from twinpool.core.rebalancing import change_role
from twinpool.core.request_events import lose_leg
from twinpool.core.requests import Request


def worker_joined(books: Books, event: on.WorkerJoined, out: list[do.Command]) -> None:
    facts = event.facts
    worker = books.cluster.get(facts.worker)
    served = [model for model in facts.models if books.cluster.has_ready(model)]
    is_new_engine = worker is None or worker.facts.incarnation != facts.incarnation or _may_be_another(worker, facts)
    if worker is None or worker.facts.incarnation != facts.incarnation:
        _lose_older_engines(books, facts, event.at, out)
    if worker is None:
        worker = books.cluster.join(facts)
    else:
        worker.learn(facts)
    if is_new_engine:
        books.policies.learner.forget(facts.worker)
    books.pairs.meet(worker, event.at, is_new_engine=is_new_engine)
    send_canaries(books, event.at, out)
    for request in books.waiting:  # who waited for a first worker waits for its turn now, and no longer than for that
        if request.facts.model in facts.models and request.facts.model not in served:
            request.deadline = min(request.waits_since + books.rules.queue_timeout_s, request.expires)
            books.alarm(request.deadline)
    dispatch(books, event.at, out)


def _lose_older_engines(books: Books, facts: WorkerFacts, at: float, out: list[do.Command]) -> None:
    """Another engine answers at this address: whatever an older one was doing or holding is gone."""

    def is_older(other: Incarnation | None) -> bool:
        return other is not None and other.worker == facts.worker and other.incarnation != facts.incarnation

    books.handles.expire_of(is_older)
    for request in list(books.requests.values()):
        if request.story.state is RequestState.DECODING and is_older(request.prefill):
            _begin_anew(books, request, Leg.DECODE, at, out)  # its KV is gone, whatever D makes of the handle
            continue
        for leg in request.out:
            if is_older(request.prefill if leg is Leg.PREFILL else request.decode):
                if request.story.state is RequestState.STREAMING and leg is not Leg.PREFILL:
                    # only the driver knows whether another engine can go on with what the client has
                    out.append(do.BreakLeg(request=request.id, attempt=request.attempt, leg=leg))
                else:
                    _begin_anew(books, request, leg, at, out)
                break  # the other leg went with it


def _begin_anew(books: Books, request: Request, leg: Leg, at: float, out: list[do.Command]) -> None:
    """The engine behind this leg has restarted; nobody else reports what became of the leg."""
    out.append(do.CancelLeg(request=request.id, attempt=request.attempt, leg=leg))
    failed = on.LegFailed(at=at, request=request.id, attempt=request.attempt, leg=leg, failure=Failure.RESTARTED)
    lose_leg(books, request, failed, out)


def worker_lost(books: Books, event: on.WorkerLost, out: list[do.Command]) -> None:
    """Nothing new goes there. What runs there is not touched: its own connections tell how it ends. But nobody tells of a
    prompt that it held for another: where its process has ended, that one is read again, before its reader gives up."""
    worker = books.cluster.get(event.worker)
    if worker is None:
        return
    worker.lose()
    if event.is_gone:
        for request in list(books.requests.values()):
            if request.story.state is RequestState.DECODING and request.prefill == worker.engine:
                _begin_anew(books, request, Leg.DECODE, event.at, out)
    send_canaries(books, event.at, out)
    dispatch(books, event.at, out)  # who waited for it may go another way


def worker_removed(books: Books, event: on.WorkerRemoved, out: list[do.Command]) -> None:
    worker = books.cluster.get(event.worker)
    if worker is not None:
        books.pairs.forget(worker)
        books.cluster.remove(event.worker)
        books.policies.learner.forget(event.worker)
        send_canaries(books, event.at, out)  # one of its own may have kept another worker
        dispatch(books, event.at, out)


def drain_asked(books: Books, event: on.DrainAsked, out: list[do.Command]) -> None:
    worker = books.cluster.get(event.worker)
    if worker is not None:
        worker.drain()
        send_canaries(books, event.at, out)
        dispatch(books, event.at, out)


def role_asked(books: Books, event: on.RoleAsked, out: list[do.Command]) -> None:
    worker = books.cluster.get(event.worker)
    if worker is None or event.role not in worker.facts.allowed_roles:
        return
    worker.is_held = True
    if worker.role is event.role:
        return
    change_role(books, event.worker, event.role, WhyBalance.MANUAL, event.at, out)
    send_canaries(books, event.at, out)
    dispatch(books, event.at, out)


def role_released(books: Books, event: on.RoleReleased, out: list[do.Command]) -> None:
    worker = books.cluster.get(event.worker)
    if worker is not None:
        worker.is_held = False


def load_reported(books: Books, event: on.LoadReported, out: list[do.Command]) -> None:
    worker = books.cluster.get(event.worker)
    if worker is not None and event.kv_used_ratio is not None:
        worker.kv_used_ratio = event.kv_used_ratio
        worker.kv_used_at = event.at - event.age_s


def handoff_proved(books: Books, event: on.HandoffProved, out: list[do.Command]) -> None:
    speed = event.moved_bytes / event.moved_s if event.moved_bytes and event.moved_s else None
    if books.pairs.proved(event.canary, event.at, event.took_s, speed):
        send_canaries(books, event.at, out)
        dispatch(books, event.at, out)


def handoff_not_proved(books: Books, event: on.HandoffNotProved, out: list[do.Command]) -> None:
    if books.pairs.not_proved(event.canary, event.at, event.took_s, event.why, was_tried=event.was_tried):
        send_canaries(books, event.at, out)
        dispatch(books, event.at, out)  # who waited for this pair may go another way


def _may_be_another(worker: Worker, facts: WorkerFacts) -> bool:
    """It was away, and nothing tells whether the same engine is back: that its pairs still stand must be shown anew."""
    return worker.story.state is WorkerState.LOST and not facts.incarnation and not facts.vouches
