"""The controller: every event goes in here, every command comes out, and nothing else decides.

Synchronous, one writer, no locks, no clock but `event.at`. The gateway's driver and the simulator feed the same object. The
promise is: same events, same commands. So it never iterates a set of ids, and ties end with the id.

    event ──► its handler (request_events, worker_events, or time, here) ──► books ──► dispatching, endings ──► commands
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from twinpool.config import BalanceMode, Routing
from twinpool.core import commands as do
from twinpool.core import events as on
from twinpool.core import request_events as requests
from twinpool.core import worker_events as workers
from twinpool.core.books import Books
from twinpool.core.cluster import Cluster
from twinpool.core.decisions import Balanced, Why
from twinpool.core.dispatching import dispatch, send_canaries
from twinpool.core.endings import cancel_legs, fail, refuse, release
from twinpool.core.law import CostPrior, Law
from twinpool.core.lifecycle import HandleState, RequestState
from twinpool.core.model import RequestFacts
from twinpool.core.pairs import Pair
from twinpool.core.policies import Policies
from twinpool.core.rebalancing import tick_if_due
from twinpool.core.snapshot import Snapshot
from twinpool.errors import Reason

_UNANSWERED = frozenset({RequestState.PREFILLING, RequestState.DECODING, RequestState.PAIRED, RequestState.SERVING})
"""Legs are out, and the client has nothing yet: its deadline still runs."""

_LOAD_ONLY = frozenset({on.RequestArrived, on.PrefillFinished, on.FirstTokenArrived, on.RequestFinished, on.ClientLeft})
"""Events that change no worker in anything but its load: most of them all."""


class Controller:
    """`handle` one event after the other; ask `next_wakeup` when to send the next `TimePassed`."""

    def __init__(self, policies: Policies, rules: Routing, snapshot: Snapshot | None = None, law: Law = Law()) -> None:  # noqa: B008  frozen
        """With a snapshot it goes on where another controller stood; the snapshot's records are its own from now on."""
        self._books = Books(policies, rules, law, snapshot)

    def handle(self, event: on.Event) -> list[do.Command]:
        """Take in one event and say what must be done now. Stale news (of an ended request, of an attempt that was given
        up, of a worker that is gone) changes nothing."""
        out: list[do.Command] = []
        cluster = self._books.cluster
        cluster.at = event.at
        if type(event) in _LOAD_ONLY:
            _HANDLERS[type(event)](self._books, event, out)
            return out
        cluster.has_changed()
        _HANDLERS[type(event)](self._books, event, out)
        cluster.has_changed()
        return out

    def next_wakeup(self) -> float | None:
        """The time of the next `TimePassed` this controller wants, on the clock of `event.at`."""
        return self._books.wakeup

    def remember(self) -> msgspec.Raw:
        """All it knows, as JSON: a controller built with this goes on exactly as this one will."""
        return self._books.remember()

    def validate(self) -> None:
        """Raise `AssertionError` where the books do not balance. Cheap enough for every step of a test."""
        self._books.validate()

    # What others may look at

    @property
    def cluster(self) -> Cluster:
        return self._books.cluster

    @property
    def rules(self) -> Routing:
        return self._books.rules

    @property
    def is_draining(self) -> bool:
        return self._books.is_draining

    @property
    def live_requests(self) -> int:
        return len(self._books.requests)

    def is_live(self, request: str) -> bool:
        return request in self._books.requests

    def waiting_requests(self) -> int:
        return len(self._books.waiting)

    def estimate_prompt_tokens(self, facts: RequestFacts) -> int:
        return self._books.policies.prompt_lengths.tokens(facts)

    def prompt_length_error(self) -> float:
        """The mean relative error of recent guesses of a prompt's tokens."""
        return self._books.policies.prompt_lengths.error_ratio

    def learnt(self) -> tuple[dict[str, CostPrior], dict[str, float]]:
        """Costs by kind of worker, and prompts' lengths, as a `Law` takes them."""
        return self._books.policies.learner.priors(), self._books.policies.prompt_lengths.remember()

    def cost_errors(self) -> dict[str, dict[str, float]]:
        """The mean relative error of recent predictions of costs, by kind of worker and by what was predicted."""
        return self._books.policies.learner.errors()

    def handles_by_state(self) -> dict[HandleState, int]:
        """Handles that have not ended, by state."""
        return self._books.handles.by_state()

    def holds_handles(self, worker: str) -> bool:
        """Whether it keeps KV for us."""
        return self._books.handles.any_on(worker)

    @property
    def balance_mode(self) -> BalanceMode:
        return self._books.law.balance.mode

    def balanced(self) -> Balanced | None:
        """What balance found when it last looked."""
        return self._books.balance.last

    def pairs(self) -> Iterable[Pair]:
        """Every two workers that could hand over, in that direction."""
        return self._books.pairs


def _gateway_drained(books: Books, event: on.GatewayDrained, out: list[do.Command]) -> None:
    books.is_draining = True


def _time_passed(books: Books, event: on.TimePassed, out: list[do.Command]) -> None:
    """Everything with a time of its own is looked at, and says when it wants to be looked at again."""
    books.wakeup = None
    next_read = books.cluster.end_unseen_reads()
    if next_read is not None:
        books.alarm(next_read)
    _end_waits(books, event.at, out)
    _end_attempts(books, event.at, out)
    next_expiry = books.handles.expire_orphans(event.at)
    if next_expiry is not None:
        books.alarm(next_expiry)
    for worker in books.cluster:
        if worker.paused_until > event.at:
            books.alarm(worker.paused_until)
    send_canaries(books, event.at, out)
    tick_if_due(books, event.at, out)
    dispatch(books, event.at, out)


def _end_waits(books: Books, at: float, out: list[do.Command]) -> None:
    for request in books.waiting:
        if request.deadline > at:
            books.alarm(request.deadline)
        elif request.expires <= at:
            fail(books, request, 504, Reason.DEADLINE_EXCEEDED, out)
        else:
            has_worker = books.cluster.has_ready(request.facts.model)
            books.waiting.remove(request)
            refuse(books, request, Why.QUEUE_TIMEOUT if has_worker else Why.NO_WORKER, out)


def _end_attempts(books: Books, at: float, out: list[do.Command]) -> None:
    for request in list(books.requests.values()):
        if request.story.state not in _UNANSWERED:
            continue
        if request.expires > at:
            books.alarm(request.expires)
        else:
            cancel_legs(request, out)
            release(books, request, out)
            fail(books, request, 504, Reason.DEADLINE_EXCEEDED, out)


_HANDLERS: Mapping[type, Callable[[Books, Any, list[do.Command]], None]] = {
    on.RequestArrived: requests.request_arrived,
    on.PrefillFinished: requests.prefill_finished,
    on.FirstTokenArrived: requests.first_token_arrived,
    on.RequestFinished: requests.request_finished,
    on.LegFailed: requests.leg_failed,
    on.ClientLeft: requests.client_left,
    on.HandleReleased: requests.handle_released,
    on.HandoffProved: workers.handoff_proved,
    on.HandoffNotProved: workers.handoff_not_proved,
    on.WorkerJoined: workers.worker_joined,
    on.WorkerLost: workers.worker_lost,
    on.WorkerRemoved: workers.worker_removed,
    on.DrainAsked: workers.drain_asked,
    on.RoleAsked: workers.role_asked,
    on.RoleReleased: workers.role_released,
    on.LoadReported: workers.load_reported,
    on.GatewayDrained: _gateway_drained,
    on.TimePassed: _time_passed,
}
