"""How many workers each pool should have, looked at once a second.

The pressure of a split is the share that the present traffic is of what it would carry (`capacity`); the best split has the
lowest. The present one is left when its pressure is higher by more than the hysteresis, for three looks in a row, by one worker
at a time: the flip is soft, and what it brought about is looked at before the next.

What a decode pool writes is no measure of what it should: starved, it writes little, and would shrink further. So the tokens to
write are what is asked for or, where that is more (answers got longer, and none has ended yet), what those that run would
write."""

from collections import Counter
from collections.abc import Sequence
from math import fsum

import msgspec

from twinpool.config import BalanceMode
from twinpool.core.cluster import WorkerView
from twinpool.core.decisions import Balanced, WhyBalance
from twinpool.core.law import Law
from twinpool.core.model import Role
from twinpool.core.policies import Balance, PoolView
from twinpool.policy.capacity import Asked, Kind, carried, carried_by_one_pool
from twinpool.policy.costs import ITL_SHARE
from twinpool.policy.learning import Learning

_BACKLOG_S = 1.0  # in which what waits should be served
_MOST_BACKLOG = 0.3  # of what is asked for, that what waits counts as: one long queue must not turn a whole fleet
_FEWEST_ANSWERS = 20  # that have ended, before anything is said of what answers take
_PATIENCE_S = 20.0  # for those
_LOOKS = 3  # for which another split must look better
_ONE_POOL_BETTER = 1.03  # by so much one pool must carry more than the present split, and so much less than the best to end it
_ONE_POOL_SHARE = 0.95  # of the ITL objective, that its steps may take by the estimate
_LINK_SHARE = 0.6  # of a handoff's bandwidth, beyond which handoffs wait for one another


class _Split:
    """Both pools by kinds, and what they would carry with others in them."""

    def __init__(
        self,
        asked: Asked,
        kinds: dict[str, Kind],
        prefills: Counter[str],
        decodes: Counter[str],
        arriving: float,
    ) -> None:
        self.asked = asked
        self.kinds = kinds
        self.prefills = prefills
        self.decodes = decodes
        self.arriving = arriving

    def pressure(self, moved: str | None = None, role: Role | None = None, count: int = 1) -> float:
        """With `count` workers of the kind `moved` in the pool `role` instead of the other."""
        prefills, decodes = self.prefills, self.decodes
        if moved is not None:
            change = Counter({moved: count if role is Role.PREFILL else -count})
            prefills, decodes = prefills.copy(), decodes.copy()
            prefills.update(change)
            decodes.subtract(change)
        times = carried(self.asked, self.kinds, prefills, decodes)
        ingress = self._ingress(decodes)
        return max(1.0 / times if times > 0 else 1e9, ingress)

    def one_pool_pressure(self, *, is_one_pool: bool) -> float:
        """No step is longer than the budget makes it, so half the reserve is enough to begin with; while it lasts, none."""
        leeway = (1.0 if is_one_pool else _ONE_POOL_SHARE) / ITL_SHARE
        times = carried_by_one_pool(self.asked, self.kinds, self.prefills + self.decodes, leeway=leeway)
        return 1.0 / times if times > 0 else 1e9

    def _ingress(self, decodes: Counter[str]) -> float:
        """Of the links into the decode pool."""
        able = fsum(
            count / kind.costs.handoff_token_s
            for name, count in decodes.items()
            if (kind := self.kinds[name]).costs.handoff_token_s
        )
        return self.arriving / (_LINK_SHARE * able) if able else 0.0


def least_pressure(law: Law, learning: Learning, *, can_be_one_pool: bool = True) -> Balance:
    """The law's balance. `can_be_one_pool`: routing obeys when everybody should do everything. It is told so only where balance
    does more than advise."""
    settings = law.balance
    is_advice = settings.mode is BalanceMode.ADVISE

    def balance(view: PoolView, changed_at: float) -> Balanced:
        prefills = [worker for worker in view.workers if worker.role is Role.PREFILL]
        decodes = [worker for worker in view.workers if worker.role is Role.DECODE]
        found = Balanced(WhyBalance.GOOD, prefill=len(prefills), decode=len(decodes))
        both = [*prefills, *decodes]
        if len(both) < 2:
            return _with(found, WhyBalance.ALONE if len(view.workers) == 1 else WhyBalance.FIXED)
        split, is_hopeless = _split(view, prefills, decodes)
        if split is None:
            return _with(found, WhyBalance.NOT_KNOWN)
        if not prefills or not decodes:
            return _fill(found, both, Role.DECODE if prefills else Role.PREFILL)
        if learning.demand.answers < _FEWEST_ANSWERS and learning.demand.seen_s(view.at) < _PATIENCE_S:
            return _with(found, WhyBalance.NOT_KNOWN)
        if not split.asked.reads:
            return _settled(found, WhyBalance.IDLE)
        return _weigh(found, split, prefills, decodes, view, changed_at, is_hopeless=is_hopeless)

    def _split(view: PoolView, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView]) -> tuple[_Split | None, bool]:
        kinds: dict[str, Kind] = {}
        for worker in (*prefills, *decodes):
            if worker.kind not in kinds:
                costs = learning.costs.of(worker.kind)
                if costs is None:
                    return None, False
                facts = worker.facts
                kinds[worker.kind] = Kind(costs, facts.kv_capacity_tokens, facts.slots or 256, facts.budget_tokens or 2048)
        is_hopeless = all(kind.costs.is_hopeless for kind in kinds.values())
        asked = learning.demand.asked(view.at)
        writing = 0.0
        for worker in (*prefills, *decodes):
            read_s = learning.reading_of(worker.facts.worker, view.at, worker.meter.read_tokens)
            writing += _writes_s(worker, kinds[worker.kind], asked.context, read_s)
        arriving = asked.reads  # by handoffs, at most
        waiting = min(view.waiting_tokens / _BACKLOG_S, _MOST_BACKLOG * asked.reads)  # who waits must be read, and written too
        answer = asked.writes / asked.requests if asked.requests else 0.0
        asked = asked._replace(
            reads=asked.reads + waiting,
            writes=max(asked.writes + min(view.waiting * answer / _BACKLOG_S, _MOST_BACKLOG * asked.writes), writing),
        )
        of = Counter(worker.kind for worker in prefills), Counter(worker.kind for worker in decodes)
        return _Split(asked, kinds, *of, arriving), is_hopeless

    def _weigh(
        found: Balanced,
        split: _Split,
        prefills: Sequence[WorkerView],
        decodes: Sequence[WorkerView],
        view: PoolView,
        changed_at: float,
        *,
        is_hopeless: bool,
    ) -> Balanced:
        pressure = split.pressure()
        best_pressure, best = pressure, len(prefills)
        moves: tuple[str, Role] | None = None
        for role, pool in ((Role.PREFILL, decodes), (Role.DECODE, prefills)):
            for kind in sorted({worker.kind for worker in pool}):
                most = min(sum(worker.kind == kind for worker in pool), len(pool) - 1)
                for count in range(1, most + 1):
                    other = split.pressure(kind, role, count)
                    if other < best_pressure:
                        best_pressure, moves = other, (kind, role)
                        best = len(prefills) + (count if role is Role.PREFILL else -count)
        one_pool = split.one_pool_pressure(is_one_pool=learning.is_one_pool)
        found = Balanced(
            WhyBalance.HOPELESS if is_hopeless else WhyBalance.GOOD,
            prefill=len(prefills),
            decode=len(decodes),
            best_prefill=best,
            pressure=round(pressure, 3) if pressure < 1e6 else None,
            best_pressure=round(best_pressure, 3) if best_pressure < 1e6 else None,
            one_pool_pressure=round(one_pool, 3) if one_pool < 1e6 else None,
            is_one_pool=(can_be_one_pool or is_advice) and _is_one_pool(one_pool, pressure, best_pressure),
        )
        learning.is_one_pool = found.is_one_pool and not is_advice
        if found.is_one_pool:
            return _settled(found, WhyBalance.ONE_POOL)
        if moves is None or pressure <= settings.hysteresis * best_pressure:
            return _settled(found, found.why)
        kind, role = moves
        if pressure <= settings.fewest_pressed:
            return _settled(found, WhyBalance.EASY)
        learning.looks += 1
        if learning.looks < _LOOKS:
            return _with(found, WhyBalance.SETTLING)
        if view.at - changed_at < settings.dwell_s:
            return _with(found, WhyBalance.RESTING)
        donor = _donor([worker for worker in (decodes if role is Role.PREFILL else prefills) if worker.kind == kind], role)
        if donor is None:
            return _with(found, WhyBalance.FIXED)
        if split.pressure(kind, role) >= pressure:
            return found  # what is left of the other pool would be worse off than this one is now
        why = WhyBalance.PREFILL_SHORT if role is Role.PREFILL else WhyBalance.DECODE_SHORT
        return _with(found, why, donor.facts.worker, role)

    def _is_one_pool(one_pool: float, present: float, best: float) -> bool:
        """It costs no change of anybody's role, so it need not beat by much what would take several."""
        if learning.is_one_pool:
            return one_pool <= best * _ONE_POOL_BETTER
        return one_pool <= best and one_pool * _ONE_POOL_BETTER < present

    def _settled(found: Balanced, why: WhyBalance) -> Balanced:
        learning.looks = 0
        return _with(found, why)

    return balance


def _fill(found: Balanced, pool: Sequence[WorkerView], role: Role) -> Balanced:
    """Somebody for a pool that has nobody, at once: a worker was lost, or all were given the same role."""
    donor = _donor(pool, role)
    if donor is None:
        return _with(found, WhyBalance.FIXED)
    return _with(found, WhyBalance.POOL_EMPTY, donor.facts.worker, role)


def _writes_s(worker: WorkerView, kind: Kind, context: float, reads_s: float) -> float:
    """Tokens a second that it writes by now with what it has, in the time that `reads_s` prompt tokens a second leave it."""
    batch = worker.sequences - worker.reading
    if not batch:
        return 0.0
    left = max(0.1, 1.0 - reads_s * kind.costs.mixed_token_s)
    return batch * left / kind.costs.step(batch, batch * context)


def _donor(pool: Sequence[WorkerView], role: Role) -> WorkerView | None:
    """The one whose change disturbs least: that writes least, or that has least to read."""
    able = [worker for worker in pool if role in worker.facts.allowed_roles and not worker.is_held and not worker.is_paused]
    if role is Role.PREFILL:
        return min(able, key=lambda worker: (worker.sequences - worker.reading, worker.facts.worker), default=None)
    return min(able, key=lambda worker: (worker.prefill_tokens, worker.facts.worker), default=None)


def _with(found: Balanced, why: WhyBalance, worker: str | None = None, role: Role | None = None) -> Balanced:
    return msgspec.structs.replace(found, why=why, worker=worker, role=role)
