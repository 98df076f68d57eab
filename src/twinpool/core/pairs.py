"""Which prefill worker may hand over to which decode worker.

Two engines that are well each by itself can still fail as a pair: another version, a fabric between them that broke, a peer
that restarted and is remembered as it was. So health is kept by pair. A pair is proved when a canary, a small handoff of our
own, arrives: D writes what P's KV says, and the KV was seen to move. Until then, and whenever it is set aside, nothing of a
client goes that way.

    joined ──► unproved ──canary arrives──► proved ──3 requests in a row fail, or a canary──► aside ──canary arrives──► proved

Engines that verify each handle themselves (`WorkerFacts.vouches`) are a proved pair from the start, and need a canary only to
come back from being set aside. The others are looked at again: often while requests go that way, seldom while none does.
One canary at a time a worker; but for the first partners of a worker, canaries take `canary_share` of its time.
"""

from collections.abc import Iterable, Iterator

import msgspec

from twinpool.config import Routing
from twinpool.core.cluster import Cluster, Worker
from twinpool.core.compatibility import why_not_compatible
from twinpool.core.lifecycle import PairMove, PairState, PairStory, WorkerState
from twinpool.core.model import Role, WorkerFacts

_ENOUGH_PARTNERS = 2
"""Proved at once, whatever it costs: with two, a worker is not alone when one goes."""

_SOON_S = 1.0  # after what proves nothing: a busy engine, the first retry of a pair
_STEADY_S = 60.0  # a pair that was proved this long has made up for its setbacks
_MAX_SETBACKS = 7  # the wait doubles with each: 64 s at most


class Pair(msgspec.Struct, eq=False, omit_defaults=True):
    """Two workers that could hand over, in this direction. `due` is when its next canary may go, None when it needs none."""

    prefill: str
    decode: str
    story: PairStory
    is_vouched: bool
    due: float | None
    canary: int = 0  # the one under way, 0 where none is
    strikes: int = 0  # requests in a row whose handoff went wrong
    struck_by: str = ""  # the last of them: a request that breaks every engine strikes once
    setbacks: int = 0  # times in a row that it was set aside or stayed so
    trouble: str = ""  # why it is set aside, for people
    proved_at: float = 0.0
    is_used: bool = False  # since its last canary
    bytes_per_s: float | None = None  # as its last canary moved, where the engine tells

    @property
    def state(self) -> PairState:
        return self.story.state


class PairsRecord(msgspec.Struct, frozen=True):
    """Their part of a snapshot."""

    pairs: list[Pair] = []
    canaries: int = 0


class Pairs:
    """Every pair of workers of the cluster that could hand over. Keeps what their workers know of it up to date."""

    def __init__(self, cluster: Cluster, rules: Routing, record: PairsRecord = PairsRecord()) -> None:  # noqa: B008  frozen
        self._cluster = cluster
        self._rules = rules
        self._pairs = {(pair.prefill, pair.decode): pair for pair in record.pairs}
        self._canaries = record.canaries  # so far; numbers the next
        under_way = sorted((pair.canary, pair) for pair in record.pairs if pair.canary)
        self._running = dict(under_way)

    def remember(self) -> PairsRecord:
        return PairsRecord(list(self._pairs.values()), self._canaries)

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._pairs.values())

    def get(self, prefill: str, decode: str) -> Pair | None:
        return self._pairs.get((prefill, decode))

    # Who is there

    def meet(self, worker: Worker, at: float, *, is_new_engine: bool) -> None:
        """The worker joined, or is known better now: with whom could it hand over? What was known of an older engine at its
        address is forgotten."""
        if is_new_engine:
            self.forget(worker)
        for other in self._cluster:
            if other is not worker:
                self._match(worker, other, at)
                self._match(other, worker, at)

    def forget(self, worker: Worker) -> None:
        """Its engine is gone: so are its pairs."""
        name = worker.facts.worker
        for key in [key for key in self._pairs if name in key]:
            self._drop(key)
        worker.canary_rest_until = 0.0

    def _match(self, prefill: Worker, decode: Worker, at: float) -> None:
        key = (prefill.facts.worker, decode.facts.worker)
        if not _could_hand_over(prefill.facts, decode.facts):
            if key in self._pairs:
                self._drop(key)
            return
        if key in self._pairs:
            return
        is_vouched = prefill.facts.vouches and decode.facts.vouches
        state = PairState.PROVED if is_vouched else PairState.UNPROVED
        story = PairStory(f"pair {key[0]} to {key[1]}", state)
        pair = self._pairs[key] = Pair(*key, story, is_vouched, due=None if is_vouched else at)
        prefill.partners = dict(sorted({**prefill.partners, pair.decode: state}.items()))
        self._count(pair, +1)

    def _drop(self, key: tuple[str, str]) -> None:
        pair = self._pairs.pop(key)
        self._running.pop(pair.canary, None)
        self._count(pair, -1)
        self._cluster[pair.prefill].partners.pop(pair.decode)

    # What became of handoffs

    def arrived(self, prefill: str, decode: str) -> None:
        """A request's handoff went well."""
        pair = self._pairs.get((prefill, decode))
        if pair is None:
            return
        pair.strikes = 0
        if not pair.is_used:
            pair.is_used = True
            if pair.due is not None:
                pair.due = min(pair.due, pair.proved_at + self._rules.canary_interval_s)

    def strike(self, prefill: str, decode: str, request: str, at: float, why: str) -> None:
        """A request's handoff went wrong in a way that either end, or what lies between, may be the cause of."""
        pair = self._pairs.get((prefill, decode))
        if pair is None or pair.state is not PairState.PROVED or pair.struck_by == request:
            return
        pair.struck_by = request
        pair.strikes += 1
        if pair.strikes >= self._rules.pair_strikes:
            self._doubt(pair, at, f"{pair.strikes} requests in a row failed: {why}")

    def condemn(self, prefill: str, decode: str, why: str) -> None:
        """No canary can clear this: the pair is set aside until one of its engines restarts."""
        pair = self._pairs.get((prefill, decode))
        if pair is not None:
            self._doubt(pair, 0.0, why)
            pair.due = None

    def proved(self, canary: int, at: float, took_s: float, bytes_per_s: float | None) -> bool:
        """A canary arrived; whether that one was still waited for."""
        pair = self._canary_ended(canary, at, took_s)
        if pair is None:
            return False
        pair.trouble = ""
        pair.strikes = 0
        pair.proved_at = at
        pair.bytes_per_s = bytes_per_s
        pair.due = None if pair.is_vouched else at + self._rules.canary_idle_s
        self._move(pair, PairMove.PROVE)
        return True

    def not_proved(self, canary: int, at: float, took_s: float, why: str, *, was_tried: bool) -> bool:
        """A canary did not arrive, or (not `was_tried`) never set out: that one says nothing of the pair."""
        pair = self._canary_ended(canary, at, took_s)
        if pair is None:
            return False
        if was_tried:
            self._doubt(pair, at, why)
        else:
            pair.trouble = pair.trouble or why
            pair.due = at + _SOON_S
        return True

    def _canary_ended(self, canary: int, at: float, took_s: float) -> Pair | None:
        pair = self._running.pop(canary, None)
        if pair is not None:
            pair.canary = 0
            pair.is_used = False
            rest_until = at + took_s * (1 / self._rules.canary_share - 1)
            for worker in self._both(pair):
                worker.canary_rest_until = max(worker.canary_rest_until, rest_until)
        return pair

    def _doubt(self, pair: Pair, at: float, why: str) -> None:
        if pair.state is PairState.PROVED and at - pair.proved_at > _STEADY_S:
            pair.setbacks = 0
        pair.setbacks = min(pair.setbacks + 1, _MAX_SETBACKS)
        pair.due = at + _SOON_S * 2 ** (pair.setbacks - 1)
        pair.strikes = 0
        pair.trouble = why
        self._move(pair, PairMove.DOUBT)

    def _move(self, pair: Pair, move: PairMove) -> None:
        self._count(pair, -1)
        pair.story.move(move)
        self._count(pair, +1)
        self._cluster[pair.prefill].partners[pair.decode] = pair.state

    def _count(self, pair: Pair, change: int) -> None:
        if pair.state is PairState.PROVED:
            prefill, decode = self._both(pair)
            prefill.proved_partners += change
            decode.proved_sources += change

    def _fewest_partners(self, pair: Pair) -> int:
        prefill, decode = self._both(pair)
        return min(prefill.proved_partners, decode.proved_sources)

    def _both(self, pair: Pair) -> tuple[Worker, Worker]:
        return self._cluster[pair.prefill], self._cluster[pair.decode]

    # Canaries

    def send_due(self, at: float) -> list[Pair]:
        """The pairs whose canary sets out now, each with its number in `canary`."""
        taken = {worker for pair in self._running.values() for worker in (pair.prefill, pair.decode)}
        sent = []
        for pair in sorted(self._ready(at), key=self._urgency):
            if pair.prefill in taken or pair.decode in taken:
                continue
            taken |= {pair.prefill, pair.decode}
            self._canaries += 1
            pair.canary = self._canaries
            self._running[pair.canary] = pair
            sent.append(pair)
        return sent

    def next_due(self, at: float) -> float | None:
        """When to ask again; a canary that ends is a reason of its own."""
        coming = (self._earliest(pair) for pair in self._pairs.values() if self._is_up(pair))
        return min((due for due in coming if due is not None and due > at), default=None)

    def _ready(self, at: float) -> Iterable[Pair]:
        for pair in self._pairs.values():
            earliest = self._earliest(pair)
            if earliest is not None and earliest <= at and self._is_up(pair):
                yield pair

    def _earliest(self, pair: Pair) -> float | None:
        if pair.due is None or pair.canary:
            return None
        if pair.state is PairState.ASIDE or self._is_wanted(pair):
            return pair.due
        return max(pair.due, *(worker.canary_rest_until for worker in self._both(pair)))

    def _is_up(self, pair: Pair) -> bool:
        return all(worker.story.state is WorkerState.READY for worker in self._both(pair))

    def _is_wanted(self, pair: Pair) -> bool:
        """Requests could go this way now, and one of the two has too few partners."""
        if pair.state is not PairState.UNPROVED or not self._has_roles(pair):
            return False
        return self._fewest_partners(pair) < _ENOUGH_PARTNERS

    def _has_roles(self, pair: Pair) -> bool:
        prefill, decode = self._both(pair)
        return prefill.role is Role.PREFILL and decode.role is Role.DECODE

    def _urgency(self, pair: Pair) -> tuple[bool, int, str, str]:
        return not self._has_roles(pair), self._fewest_partners(pair), pair.prefill, pair.decode

    def validate(self) -> None:
        """Raise `AssertionError` where a worker's partners are not what its pairs say."""
        for worker in self._cluster:
            name = worker.facts.worker
            states = {decode: pair.state for (prefill, decode), pair in self._pairs.items() if prefill == name}
            if states != worker.partners:
                raise AssertionError(f"{name}: partners {worker.partners}, pairs {states}")
        for pair in self._pairs.values():
            if pair.canary and self._running.get(pair.canary) is not pair:
                raise AssertionError(f"{pair.story.what}: canary {pair.canary} is not under way")


def _could_hand_over(prefill: WorkerFacts, decode: WorkerFacts) -> bool:
    may_by_role = Role.PREFILL in prefill.allowed_roles and Role.DECODE in decode.allowed_roles
    return may_by_role and why_not_compatible(prefill, decode) is None
