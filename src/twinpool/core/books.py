"""What the controller knows: one record that every step reads and writes, and nothing else does.

The steps are plain functions over it, filed by what they are about: `request_events` and `worker_events` say what follows from
what happened, `dispatching` sends on its way what can go, `endings` gives back what an attempt held.
"""

from collections.abc import Iterable

import msgspec

from twinpool.config import Routing
from twinpool.core.cluster import Cluster
from twinpool.core.handles import Handles
from twinpool.core.law import Law
from twinpool.core.lifecycle import ENDS, RequestState
from twinpool.core.model import Leg
from twinpool.core.pairs import Pairs
from twinpool.core.policies import Policies
from twinpool.core.requests import Request
from twinpool.core.snapshot import BalanceRecord, Snapshot, encode_snapshot
from twinpool.core.waiting import Waiting


class Books:
    """`wakeup` is the earliest time at which something may be due."""

    def __init__(self, policies: Policies, rules: Routing, law: Law, snapshot: Snapshot | None = None) -> None:
        self.policies = policies
        self.rules = rules
        self.law = law
        self.is_draining = False
        self.wakeup: float | None = None
        self.cluster = Cluster()
        self.requests: dict[str, Request] = {}
        self.waiting = Waiting()
        self.handles = Handles()
        self.pairs = Pairs(self.cluster, rules)
        self.balance = BalanceRecord()
        if snapshot is not None:
            self._recall(snapshot)

    def remember(self) -> msgspec.Raw:
        return encode_snapshot(
            Snapshot(
                is_draining=self.is_draining,
                wakeup=self.wakeup,
                cluster=self.cluster.remember(),
                requests=list(self.requests.values()),
                waiting=self.waiting.remember(),
                handles=self.handles.remember(),
                pairs=self.pairs.remember(),
                balance=self.balance,
                learnt=self.policies.learner.remember(),
                prompt_lengths=self.policies.prompt_lengths.remember(),
            )
        )

    def _recall(self, snapshot: Snapshot) -> None:
        self.is_draining = snapshot.is_draining
        self.wakeup = snapshot.wakeup
        self.cluster = Cluster(snapshot.cluster)
        self.requests = {request.id: request for request in snapshot.requests}
        self.waiting = Waiting(snapshot.waiting, self.requests)
        self.handles = Handles(snapshot.handles)
        self.pairs = Pairs(self.cluster, self.rules, snapshot.pairs)
        self.balance = snapshot.balance
        self.policies.learner.recall(snapshot.learnt)
        self.policies.prompt_lengths.recall(snapshot.prompt_lengths)

    def current(self, request: str, attempt: int) -> Request | None:
        """The live request, if the attempt is still its own."""
        found = self.requests.get(request)
        return found if found is not None and found.attempt == attempt else None

    def alarm(self, at: float) -> None:
        """Something may be due then."""
        if self.wakeup is None or at < self.wakeup:
            self.wakeup = at

    def begin_wait(self, request: Request, at: float) -> None:
        """How long it may wait, from now: for its turn, or where there is no worker at all, for one to come."""
        patience_s = self.rules.queue_timeout_s if self.cluster.has_ready(request.facts.model) else self.rules.worker_wait_s
        request.waits_since = at
        request.deadline = min(at + patience_s, request.expires)
        self.alarm(request.deadline)

    def validate(self) -> None:
        """Raise `AssertionError` where the books do not balance. Cheap enough for every step of a test."""
        self.cluster.validate(live=self.requests.keys())
        queued = sorted(request.id for request in self.waiting)
        waiting = sorted(r.id for r in self.requests.values() if r.story.state is RequestState.WAITING)
        _check(queued == waiting, f"queued {queued}, waiting {waiting}")
        self.pairs.validate()
        self.handles.validate(current={(request.id, request.attempt) for request in self.requests.values()})
        for request in self.requests.values():
            _check(request.story.state not in ENDS, f"{request.id} has ended and is still here")
            held = [leg for leg in Leg if self.cluster.holds(request.key(leg))]
            reserved = [Leg.DECODE] if request.story.state is RequestState.PREFILLING else []
            _check(held == _in_order([*request.out, *reserved]), f"{request.id}: {held}, {request.out}")


def _in_order(legs: Iterable[Leg]) -> list[Leg]:
    return sorted(legs, key=list(Leg).index)


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
