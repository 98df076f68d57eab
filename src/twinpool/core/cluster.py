"""What the controller knows of its workers, and what it has given each of them to do.

Load is counted at selection and given back at the end of the leg, by one entry a leg: nothing else changes it, no health
check, no loss and return of the worker. So a worker that was just chosen never looks idle to the next request.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import inf
from typing import Protocol

import msgspec

from twinpool.core.lifecycle import PairState, WorkerMove, WorkerState, WorkerStory
from twinpool.core.meters import NEWBORN_LEGS, Mark, Meter, ReadingSeen, WritingSeen
from twinpool.core.model import Incarnation, Leg, Role, WorkerFacts, kind_of

# members under names of this module: through its class each takes 0.2 µs on Python 3.11, several dozen times a request
_LEGS = tuple(Leg)
_PREFILL = Leg.PREFILL
_READY = WorkerState.READY


class LegKey(msgspec.Struct, frozen=True, gc=False, array_like=True):
    request: str
    attempt: int
    leg: Leg


class WorkerView(Protocol):
    """What a policy may see of a worker. Tokens are prompt tokens, estimated until the engine has counted them."""

    @property
    def facts(self) -> WorkerFacts: ...
    @property
    def role(self) -> Role: ...
    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens given to it and not known to be read yet."""

    @property
    def is_held(self) -> bool:
        """A person chose its role, and has not let it go."""

    @property
    def reading(self) -> int:
        """Prefill legs it has."""

    @property
    def read_work_s(self) -> float:
        """What its unread prompts were thought to take when they were given to it."""

    @property
    def read_until(self) -> float:
        """When they will be read, if that was right."""

    @property
    def kind(self) -> str: ...
    @property
    def meter(self) -> Meter: ...
    @property
    def kv_tokens(self) -> int:
        """Prompt tokens whose KV its running sequences hold or will hold."""

    @property
    def sequences(self) -> int:
        """Sequences running or reserved."""

    @property
    def is_paused(self) -> bool:
        """It asked to be left alone for a while: it has no room now, but it is there."""

    @property
    def kv_used_ratio(self) -> float:
        """As the engine itself said at `kv_used_at`; 0 where it has not."""

    @property
    def kv_used_at(self) -> float: ...
    @property
    def proved_partners(self) -> int: ...
    @property
    def partners(self) -> Mapping[str, PairState]:
        """Workers that it could hand a prompt's KV to, and whether it may."""


class Worker(msgspec.Struct, eq=False, omit_defaults=True):
    """One worker: facts, role, state, and the sum of its legs."""

    facts: WorkerFacts
    engine: Incarnation  # what the facts say of it, built once for all its legs
    role: Role
    story: WorkerStory
    is_told_to_drain: bool = False  # outlasts a loss of the worker, not a restart
    paused_until: float = 0.0
    is_paused: bool = False  # as of the last look at the cluster
    prefill_tokens: int = 0
    kv_tokens: int = 0
    sequences: int = 0
    kind: str = ""
    is_held: bool = False  # a person chose its role, and has not let it go
    kv_used_ratio: float = 0.0  # as the engine said at `kv_used_at`
    kv_used_at: float = 0.0
    reading: int = 0
    read_work_s: float = 0.0
    read_until: float = 0.0
    meter: Meter = msgspec.field(default_factory=Meter)
    # kept by `pairs`
    partners: dict[str, PairState] = {}  # as one that prefills, in the order of their ids
    proved_partners: int = 0
    proved_sources: int = 0  # as one that decodes: from how many it may read
    canary_rest_until: float = 0.0  # it has had its share of canaries

    def is_open(self, at: float) -> bool:
        """Whether it may be given something new now."""
        return self.story.state is _READY and self.paused_until <= at

    def learn(self, facts: WorkerFacts) -> None:
        """A probe found it well, and says this of it. A new incarnation owes nothing to the pause or the drain of the old."""
        if facts.incarnation != self.facts.incarnation:
            self.lose()
            self.paused_until = 0.0
            self.is_told_to_drain = False
            self.meter.newborn = NEWBORN_LEGS
        if facts.role is not self.facts.role:  # as declared anew: that is later than what was asked for
            self.role = facts.role
            self.is_held = False
        self.facts = facts
        self.kind = kind_of(facts)
        self.engine = _engine(facts)
        if self.story.state is WorkerState.LOST:
            self.story.move(WorkerMove.RETURN)
            if self.is_told_to_drain:
                self.story.move(WorkerMove.DRAIN)

    def lose(self) -> None:
        if self.story.can(WorkerMove.LOSE):
            self.story.move(WorkerMove.LOSE)

    def drain(self) -> None:
        self.is_told_to_drain = True
        if self.story.can(WorkerMove.DRAIN):
            self.story.move(WorkerMove.DRAIN)


class Load(msgspec.Struct, eq=False):
    """What one leg weighs on the worker it was given to, which may have been removed since."""

    leg: LegKey
    worker: str
    prefill_tokens: int
    kv_tokens: int
    sequences: int
    work_s: float = 0.0
    is_begun: bool = False  # its first token came
    read_by: float | None = None  # nobody will tell when its prompt is read: this was the guess


class ClusterRecord(msgspec.Struct, frozen=True):
    """A cluster's part of a snapshot: workers in the order of their ids, loads in the order they were taken."""

    workers: list[Worker] = []
    loads: list[Load] = []
    at: float = 0.0


class Cluster:
    """All workers by id, and the load of every leg."""

    def __init__(self, record: ClusterRecord = ClusterRecord()) -> None:  # noqa: B008  frozen
        self._workers = {worker.facts.worker: worker for worker in record.workers}
        self._loads = {load.leg: load for load in record.loads}
        self._routable: dict[str, list[Worker]] = {}  # as of the last change of anything but load
        self._pauses_end = inf
        self._flexible: list[str] | None = None
        self.at = record.at  # of the event that is being handled

    def remember(self) -> ClusterRecord:
        self.has_changed()  # what is only looked up is no part of it
        return ClusterRecord(list(self._workers.values()), list(self._loads.values()), self.at)

    def __getitem__(self, worker: str) -> Worker:
        return self._workers[worker]

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def get(self, worker: str) -> Worker | None:
        return self._workers.get(worker)

    def join(self, facts: WorkerFacts) -> Worker:
        """Add a worker. Workers are kept in the order of their ids, so that ties end the same way however they joined. One that
        was removed and is back has its legs that go on."""
        worker = Worker(facts, _engine(facts), facts.role, WorkerStory(f"worker {facts.worker}", _READY), kind=kind_of(facts))
        for load in self._loads.values():
            if load.worker == facts.worker:
                _weigh(worker, load)
                if load.is_begun:
                    worker.meter.begin(self.at, load.sequences, load.kv_tokens)
        self._workers[facts.worker] = worker
        self._workers = dict(sorted(self._workers.items()))
        return worker

    def remove(self, worker: str) -> None:
        """Forget the worker; the legs it still has keep their load until they end."""
        del self._workers[worker]

    def routable(self, model: str, at: float) -> Sequence[Worker]:
        """The workers that are there for a new request for `model`, in the order of their ids; some may be paused."""
        found = self._routable.get(model)
        if found is None or at >= self._pauses_end:
            self._pauses_end = inf
            found = self._routable[model] = []
            for worker in self._workers.values():
                worker.is_paused = worker.paused_until > at
                if worker.is_paused:
                    self._pauses_end = min(self._pauses_end, worker.paused_until)
                if worker.story.state is _READY and model in worker.facts.models:
                    found.append(worker)
        return found

    def has_changed(self) -> None:
        """Something other than load did: who is there must be looked up again."""
        self._routable.clear()
        self._pauses_end = inf
        self._flexible = None

    def flexible_kinds(self) -> Sequence[str]:
        """Of the workers that may stand in either pool."""
        if self._flexible is None:
            both = (Role.PREFILL, Role.DECODE)
            able = [worker for worker in self._workers.values() if all(role in worker.facts.allowed_roles for role in both)]
            self._flexible = sorted({worker.kind for worker in able})
        return self._flexible

    def has_ready(self, model: str) -> bool:
        """Whether any worker is up for the model, busy or not."""
        if self._routable.get(model):
            return True
        return any(w.story.state is _READY and model in w.facts.models for w in self._workers.values())

    def take(
        self,
        key: LegKey,
        worker: Worker,
        *,
        prefill_tokens: int = 0,
        kv_tokens: int = 0,
        sequences: int = 1,
        work_s: float = 0.0,
    ) -> None:
        """Count the leg's load on the worker, from its selection on; `work_s` is what its prompt should take to be read. A leg
        is counted once."""
        if key in self._loads:
            raise KeyError(f"{key} has its load already")
        if prefill_tokens:
            if not worker.prefill_tokens:
                worker.meter.has_to_read(self.at)
            worker.read_until = max(worker.read_until, self.at) + work_s
        load = self._loads[key] = Load(key, worker.facts.worker, prefill_tokens, kv_tokens, sequences, work_s)
        _weigh(worker, load)

    def prompt_read(self, key: LegKey, tokens: int, cached: int) -> ReadingSeen | None:
        """The leg's prompt is read, `tokens` of it anew; what this showed of the worker's speed, if anything. Of its load, only
        its sequences and its KV weigh on."""
        load = self._loads[key]
        worker = self._workers.get(load.worker)
        seen = None
        if worker is not None:
            if load.prefill_tokens:
                self._unread(worker, load)
            seen = worker.meter.read(self.at, tokens, cached, is_last=not worker.prefill_tokens)
        load.prefill_tokens = 0
        load.work_s = 0.0
        return seen

    def begun(self, key: LegKey) -> Mark | None:
        """The leg's first token came: from here on it is written."""
        load = self._loads[key]
        worker = self._workers.get(load.worker)
        if worker is None or load.is_begun:
            return None
        load.is_begun = True
        worker.meter.begin(self.at, load.sequences, load.kv_tokens)
        return worker.meter.mark()

    def reads_unseen(self, key: LegKey, read_s: float) -> float:
        """Nobody will tell when the leg's prompt is read: it is taken to take so long. When that will be."""
        load = self._loads[key]
        load.read_by = self.at + read_s
        return load.read_by

    def end_unseen_reads(self) -> float | None:
        """Prompts that should be read by now wait no more; when the next one should be."""
        due = [load for load in self._loads.values() if load.read_by is not None]
        for load in due:
            if load.read_by is not None and load.read_by <= self.at:
                worker = self._workers.get(load.worker)
                if worker is not None:
                    self._unread(worker, load)
                load.prefill_tokens, load.work_s, load.read_by = 0, 0.0, None
        return min((load.read_by for load in due if load.read_by is not None), default=None)

    def written(self, key: LegKey, mark: Mark) -> WritingSeen | None:
        """The leg's last token came: what this showed of its worker's speed, if anything."""
        load = self._loads[key]
        worker = self._workers.get(load.worker)
        return worker.meter.since_mark(mark, self.at) if worker is not None and load.is_begun else None

    def give_back(self, key: LegKey) -> None:
        """The leg has ended. Exactly once: a second time raises `KeyError`."""
        self._take_off(self._loads.pop(key))

    def give_back_all(self, request: str, attempt: int) -> None:
        """Whatever legs of this attempt still weigh on any worker."""
        for leg in _LEGS:
            load = self._loads.pop(LegKey(request, attempt, leg), None)
            if load is not None:
                self._take_off(load)

    def _take_off(self, load: Load) -> None:
        worker = self._workers.get(load.worker)
        if worker is None:
            return
        if load.prefill_tokens:
            self._unread(worker, load)
        worker.kv_tokens -= load.kv_tokens
        worker.sequences -= load.sequences
        worker.reading -= load.leg.leg is _PREFILL
        if load.is_begun:
            worker.meter.end(self.at, load.sequences, load.kv_tokens)

    def _unread(self, worker: Worker, load: Load) -> None:
        """Its prompt does not wait any more, and the clock of what does is set anew."""
        worker.prefill_tokens -= load.prefill_tokens
        worker.read_work_s = worker.read_work_s - load.work_s if worker.prefill_tokens else 0.0
        worker.read_until = self.at + worker.read_work_s

    def holds(self, key: LegKey) -> bool:
        return key in self._loads

    def legs_on(self, worker: str) -> list[LegKey]:
        """The legs that weigh on it, in the order they were given."""
        return [key for key, load in self._loads.items() if load.worker == worker]

    def validate(self, live: Collection[str]) -> None:
        """Raise `AssertionError` where a leg's request is not live, or the sums are not the sums of the legs."""
        for key in self._loads:
            if key.request not in live:
                raise AssertionError(f"{key} weighs on, and its request has ended")
        for worker in self._workers.values():
            loads = [self._loads[key] for key in self.legs_on(worker.facts.worker)]
            for name in ("prefill_tokens", "kv_tokens", "sequences"):
                total = sum(getattr(load, name) for load in loads)
                if total != getattr(worker, name):
                    raise AssertionError(f"{worker.facts.worker}: {name} {getattr(worker, name)} but legs sum to {total}")


def _engine(facts: WorkerFacts) -> Incarnation:
    return Incarnation(facts.worker, facts.incarnation, facts.lease_s, facts.vouches)


def _weigh(worker: Worker, load: Load) -> None:
    worker.prefill_tokens += load.prefill_tokens
    worker.read_work_s += load.work_s
    worker.reading += load.leg.leg is _PREFILL
    worker.kv_tokens += load.kv_tokens
    worker.sequences += load.sequences
