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

from collections.abc import Collection, Iterator

import msgspec

from twinpool.config import Routing
from twinpool.core.cluster import Cluster, Worker
from twinpool.core.compatibility import why_not_compatible
from twinpool.core.lifecycle import PairMove, PairState, PairStory, WorkerState
from twinpool.core.model import Role, WorkerFacts

_ENOUGH_PARTNERS = 2
"""Proved at once, whatever it costs: with two, a worker is not alone when one goes."""

_SOON_S = 1.0  # after what proves nothing: a busy engine, the first retry of a pair
_LATER_S = (
    10.0  # what no request would use now: the workers that it would use may still be joining, and first handshakes are slow
)
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
    struck_by: tuple[str, ...] = ()  # requests in a row whose handoff went wrong, each once: one may break every engine
    is_condemned: bool = False  # no canary can clear it, not even the one under way
    setbacks: int = 0  # times in a row that it was set aside or stayed so
    trouble: str = ""  # why it is set aside, for people
    proved_at: float = 0.0
    is_used: bool = False  # since its last canary
    bytes_per_s: float | None = None  # as its last canary moved, where the engine tells
    is_slow: bool = False  # slower than the floor

    @property
    def state(self) -> PairState:
        return self.story.state

    @property
    def strikes(self) -> int:
        return len(self.struck_by)


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
        self._news: list[Pair] = []  # within one event

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
        self.take_roles(worker, at)

    def take_roles(self, worker: Worker, at: float) -> None:
        """Its role may be another now: what requests would use need not wait any longer for its first canary."""
        name = worker.facts.worker
        for key, pair in self._pairs.items():
            if name in key and pair.due is not None and pair.state is PairState.UNPROVED and self._has_roles(pair):
                pair.due = min(pair.due, at)

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
        pair = self._pairs[key] = Pair(*key, story, is_vouched, due=None)
        if not is_vouched:
            pair.due = at if self._has_roles(pair) else at + _LATER_S
        prefill.partners = dict(sorted({**prefill.partners, pair.decode: state}.items()))
        self._count(pair, +1)

    def _drop(self, key: tuple[str, str]) -> None:
        pair = self._pairs.pop(key)
        self._running.pop(pair.canary, None)
        self._count(pair, -1)
        self._cluster[pair.prefill].partners.pop(pair.decode)

    # What became of handoffs

    def arrived(self, prefill: str, decode: str) -> float | None:
        """A request's handoff went well. When the next canary is due, where this use of the pair has brought it forward."""
        pair = self._pairs.get((prefill, decode))
        if pair is None:
            return None
        pair.struck_by = ()
        if pair.is_used or pair.story.state is not PairState.PROVED:
            return None
        pair.is_used = True
        if pair.due is not None:
            pair.due = min(pair.due, pair.proved_at + self._rules.canary_interval_s)
        return self._earliest(pair)

    def strike(self, prefill: str, decode: str, request: str, at: float, why: str) -> None:
        """A request's handoff went wrong in a way that either end, or what lies between, may be the cause of."""
        pair = self._pairs.get((prefill, decode))
        if pair is None or pair.state is not PairState.PROVED or request in pair.struck_by:
            return
        pair.struck_by += (request,)
        if pair.strikes >= self._rules.pair_strikes:
            self._doubt(pair, at, f"{pair.strikes} requests in a row failed: {why}")

    def condemn(self, prefill: str, decode: str, why: str) -> None:
        """No canary can clear this: the pair is set aside until one of its engines restarts."""
        pair = self._pairs.get((prefill, decode))
        if pair is not None:
            self._doubt(pair, 0.0, why)
            pair.due = None
            pair.is_condemned = True

    def proved(self, canary: int, at: float, took_s: float, bytes_per_s: float | None) -> bool:
        """A canary arrived; whether that one was still waited for."""
        pair = self._canary_ended(canary, at, took_s)
        if pair is None:
            return False
        if pair.is_condemned:
            return True
        pair.trouble = ""
        pair.struck_by = ()
        pair.proved_at = at
        pair.due = None if pair.is_vouched else at + self._rules.canary_idle_s
        self._measured(pair, bytes_per_s)
        self._move(pair, PairMove.PROVE)
        return True

    def not_proved(self, canary: int, at: float, took_s: float, why: str, *, was_tried: bool) -> bool:
        """A canary did not arrive, or (not `was_tried`) never set out: that one says nothing of the pair."""
        pair = self._canary_ended(canary, at, took_s)
        if pair is None:
            return False
        if pair.is_condemned:
            return True
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
        pair.struck_by = ()
        pair.trouble = why
        self._move(pair, PairMove.DOUBT)

    def _measured(self, pair: Pair, bytes_per_s: float | None) -> None:
        if bytes_per_s is None:
            return  # it moved among others, or its engine does not tell
        floor = self._rules.handoff_floor_gb_s
        is_slow = floor is not None and bytes_per_s < floor * 1e9
        if is_slow is not pair.is_slow:
            self._tell(pair)
        pair.bytes_per_s = bytes_per_s
        pair.is_slow = is_slow

    def take_news(self) -> list[Pair]:
        """The pairs that stand otherwise than when this was last asked."""
        news, self._news = self._news, []
        return news

    def _tell(self, pair: Pair) -> None:
        if pair not in self._news:
            self._news.append(pair)

    def _move(self, pair: Pair, move: PairMove) -> None:
        before = pair.state
        self._count(pair, -1)
        pair.story.move(move)
        self._count(pair, +1)
        self._cluster[pair.prefill].partners[pair.decode] = pair.state
        if pair.state is not before:
            self._tell(pair)

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
        kept: set[str] = set()  # for a pair that is wanted, and whose other worker is taken
        sent = []
        for pair in sorted(self._ready(at, taken), key=self._urgency):
            both = {pair.prefill, pair.decode}
            is_wanted = self._is_wanted(pair)
            if both & taken or (both & kept and not is_wanted):
                if is_wanted:
                    kept |= both
                continue
            taken |= both
            self._canaries += 1
            pair.canary = self._canaries
            self._running[pair.canary] = pair
            sent.append(pair)
        return sent

    def next_due(self, at: float) -> float | None:
        """When to ask again, at the latest; a canary that ends is a reason of its own."""
        coming = [due for pair in self._pairs.values() if (due := pair.due) is not None and due > at]
        coming += [worker.canary_rest_until for worker in self._cluster if worker.canary_rest_until > at]
        return min(coming, default=None)

    def _ready(self, at: float, taken: Collection[str]) -> Iterator[Pair]:
        """Those that may go now, and those that are wanted and wait for a worker that is taken.

        64 workers make 4,032 pairs, and most of the workers rest or are taken at any moment: so the pairs are not gone through
        but for the few that need not wait for a rest.
        """
        up = [worker for worker in self._cluster if worker.story.state is WorkerState.READY]
        rested = [w.facts.worker for w in up if w.canary_rest_until <= at and w.facts.worker not in taken]
        found = dict.fromkeys((prefill, decode) for prefill in rested for decode in rested)
        found |= dict.fromkeys(key for key, pair in self._pairs.items() if pair.story.state is PairState.ASIDE)
        prefills = [worker for worker in up if worker.role is Role.PREFILL]
        decodes = [worker for worker in up if worker.role is Role.DECODE]
        hungry = {w.facts.worker for w in prefills if w.proved_partners < _ENOUGH_PARTNERS}
        hungry |= {w.facts.worker for w in decodes if w.proved_sources < _ENOUGH_PARTNERS}
        if hungry:
            wanted = ((p.facts.worker, d.facts.worker) for p in prefills for d in decodes)
            found |= dict.fromkeys(key for key in wanted if key[0] in hungry or key[1] in hungry)
        for key in found:
            pair = self._pairs.get(key)
            if pair is not None and pair.due is not None and self._is_due(pair, at):
                yield pair

    def _is_due(self, pair: Pair, at: float) -> bool:
        earliest = self._earliest(pair)
        return earliest is not None and earliest <= at and self._is_up(pair)

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

    def _urgency(self, pair: Pair) -> tuple[int, float, float, str, str]:
        """What is wanted first; then, by how long it is due, what requests use or would; what only a change of roles would use;
        and another look at what rests. So looks at some never keep others from being proved at all."""
        due, fewest = pair.due or 0.0, self._fewest_partners(pair)
        if self._is_wanted(pair):
            return 0, fewest, due, pair.prefill, pair.decode
        is_resting = pair.state is PairState.PROVED and not pair.is_used
        rank = 3 if is_resting else 1 if self._has_roles(pair) else 2
        return rank, due, fewest, pair.prefill, pair.decode

    def validate(self) -> None:
        """Raise `AssertionError` where a worker's partners are not what its pairs say."""
        states: dict[str, dict[str, PairState]] = {worker.facts.worker: {} for worker in self._cluster}
        for (prefill, decode), pair in self._pairs.items():
            states[prefill][decode] = pair.state
        for worker in self._cluster:
            name = worker.facts.worker
            if states[name] != worker.partners:
                raise AssertionError(f"{name}: partners {worker.partners}, pairs {states[name]}")
        for pair in self._pairs.values():
            if pair.canary and self._running.get(pair.canary) is not pair:
                raise AssertionError(f"{pair.story.what}: canary {pair.canary} is not under way")


def _could_hand_over(prefill: WorkerFacts, decode: WorkerFacts) -> bool:
    may_by_role = Role.PREFILL in prefill.allowed_roles and Role.DECODE in decode.allowed_roles
    return may_by_role and why_not_compatible(prefill, decode) is None
