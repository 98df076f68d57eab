"""How an attempt or a request ends, and what that gives back: its legs, its load, its handle.

Every way out of a request passes through here, so that none of them can forget one of the three.
"""

from math import ceil

from twinpool.core import commands as do
from twinpool.core.books import Books
from twinpool.core.decisions import Choice, Decision, Why
from twinpool.core.lifecycle import PairState, RequestMove, RequestState, WorkerState
from twinpool.core.requests import Request
from twinpool.errors import Reason

_REFUSALS: dict[Why, tuple[int, Reason, int | None]] = {
    Why.QUEUE_FULL: (429, Reason.QUEUE_FULL, 1),
    Why.LATE: (429, Reason.WOULD_BE_LATE, 1),
    Why.DRAINING: (503, Reason.DRAINING, 5),
    Why.QUEUE_TIMEOUT: (503, Reason.QUEUE_TIMEOUT, 5),
    Why.NO_WORKER: (503, Reason.NO_WORKER, 5),
}
"""What the client gets for each refusal: status, reason, Retry-After in seconds."""

_WAITING = RequestState.WAITING


def retry(books: Books, request: Request, at: float, out: list[do.Command], *, waits_anew: bool = True) -> None:
    """Back to the head of the queue, if the request has time left. A worker that was busy or away cost no time worth a
    new wait."""
    if at >= request.expires:
        fail(books, request, 504, Reason.DEADLINE_EXCEEDED, out)
        return
    books.cluster.give_back_all(request.id, request.attempt)
    request.story.move(RequestMove.RETRY)
    if waits_anew:
        books.begin_wait(request, at)
    books.alarm(request.deadline)
    books.waiting.put_first(request)


def resume(books: Books, request: Request, at: float, out: list[do.Command]) -> None:
    """Half an answer is out, and another engine can go on with it: to the head of the queue, with time anew."""
    cancel_legs(request, out)
    books.cluster.give_back_all(request.id, request.attempt)
    request.story.move(RequestMove.RESUME)
    request.strikes += 1
    request.is_begun = True
    request.expires = at + books.rules.request_timeout_s
    books.begin_wait(request, at)
    books.waiting.put_first(request)


def end(books: Books, request: Request, move: RequestMove, out: list[do.Command]) -> None:
    if request.story.state is _WAITING:
        books.waiting.remove(request)
    cancel_legs(request, out)
    books.cluster.give_back_all(request.id, request.attempt)
    request.story.move(move)
    del books.requests[request.id]


def refuse(books: Books, request: Request, why: Why, out: list[do.Command], *, late_s: float | None = None) -> None:
    """Admission's no, or the end of a wait; the caller has taken the request out of its queue. One that would be `late_s` too
    late may come again when what stands before it is done."""
    request.story.move(RequestMove.REFUSE)
    del books.requests[request.id]
    status, reason, retry_after_s = _REFUSALS[why]
    if late_s is not None:
        retry_after_s = ceil(min(late_s, books.rules.queue_timeout_s))  # by then nobody is left who stands before it now
    decision = Decision(Choice.REFUSE, why)
    out.append(do.RecordDecision(request=request.id, attempt=request.attempt, decision=decision))
    out.append(do.FailRequest(request=request.id, status=status, reason=reason, retry_after_s=retry_after_s))


def fail(
    books: Books, request: Request, status: int, reason: Reason, out: list[do.Command], *, retry_after_s: int | None = None
) -> None:
    end(books, request, RequestMove.FAIL, out)
    out.append(do.FailRequest(request=request.id, status=status, reason=reason, retry_after_s=retry_after_s))


def cancel_legs(request: Request, out: list[do.Command]) -> None:
    if request.out:
        out.extend(do.CancelLeg(request=request.id, attempt=request.attempt, leg=leg) for leg in request.out)
        request.out.clear()


def release(books: Books, request: Request, out: list[do.Command]) -> None:
    released = books.handles.release((request.id, request.attempt))
    if released is None:
        return
    worker, was_sent = released
    # a handle is presented once: what a D was told of, only its engine or its lease can end
    reader = None if was_sent else _reader(books, worker)
    out.append(do.ReleaseHandle(request=request.id, attempt=request.attempt, worker=worker, reader=reader))


def _reader(books: Books, prefill: str) -> str | None:
    """Somebody who could read what this worker holds."""
    holder = books.cluster.get(prefill)
    if holder is None:
        return None
    able = (name for name, state in sorted(holder.partners.items()) if state is PairState.PROVED)
    return next((name for name in able if books.cluster[name].story.state is not WorkerState.LOST), None)
