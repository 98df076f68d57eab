"""How many workers each pool should have, looked at once a second.

Work is counted in workers: `prefill_work` of them would read what is asked for, `decode_work` would write it. The pressure on a pool is
its work over its workers, that of a split the higher of the two; the best split has the lowest. The present one is left when it is
worse by more than the hysteresis, by one worker at a time: the flip is soft, and what it brought about is looked at before the next.

What a decode pool writes is no measure of what it should: starved, it writes little. So its work is the most of what is offered,
what stands on it already, its KV, and the handoffs that come in.
"""

from collections.abc import Sequence
from typing import NamedTuple

from twinpool.core.cluster import WorkerView
from twinpool.core.decisions import Balanced, WhyBalance
from twinpool.core.law import Law
from twinpool.core.model import Role
from twinpool.core.policies import Balance, PoolView
from twinpool.policy.costs import KindCosts
from twinpool.policy.learning import Learning

_BACKLOG_S = 1.0  # in which what waits should be read
_SETTLE_S = 3.0  # another split must look better for so long: three looks in a row
_LINK_SHARE = 0.6  # of the handoff's bandwidth, beyond which handoffs wait for one another
_MIXED_SHARE = 0.45  # of the ITL objective, at most, that is kept free for prompts read beside
_MOST_BEYOND = 1.5  # of the largest batch seen: further no line is trusted


class Capacity(NamedTuple):
    """Of one worker. `batch`: sequences at once within the objective and its KV."""

    batch: float
    decode_tokens_s: float


def least_pressure(law: Law, learning: Learning) -> Balance:
    """The law's balance."""
    settings = law.balance
    itl_s = law.objectives.slo_itl_s

    def balance(view: PoolView, changed_at: float) -> Balanced:
        prefills = [worker for worker in view.workers if worker.role is Role.PREFILL]
        decodes = [worker for worker in view.workers if worker.role is Role.DECODE]
        found = Balanced(WhyBalance.GOOD, prefill=len(prefills), decode=len(decodes))
        if not prefills and not decodes:
            return _said(found, WhyBalance.FIXED)
        if len(prefills) + len(decodes) < 2:
            return _said(found, WhyBalance.ALONE)
        work = _work(view, prefills, decodes)
        if work is None:
            return _said(found, WhyBalance.NOT_KNOWN)
        return _decide(found, work, prefills, decodes, view, changed_at)

    def _work(
        view: PoolView, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView]
    ) -> tuple[float, float, bool] | None:
        """Workers' worth of prefill and of decode, and whether any split can keep the objective."""
        both = [*prefills, *decodes]
        kinds = [learning.costs.of(worker.kind) for worker in both]
        if any(kind is None for kind in kinds):
            return None
        kind = kinds[0]
        assert kind is not None
        at = view.at
        rate, tokens, squares, answers = learning.demand.offered(at)
        reading = kind.read_token_s * tokens + kind.read_pair_s * squares
        unread_s = sum(max(0.0, worker.read_until - at) for worker in both)
        backlog_s = unread_s + kind.read_token_s * view.waiting_tokens
        prefill_work = reading + min(backlog_s / _BACKLOG_S, 0.3 * reading + 0.25)
        if not rate:
            return prefill_work, _standing(both, 1e9), True
        answer = answers / rate
        context = tokens / rate + answer / 2
        capacity = capacity_of(kind, both[0], context, itl_s)
        if capacity is None:
            return prefill_work, _standing(both, 64.0), False
        decode_work = max(
            answers / capacity.decode_tokens_s,
            (_standing(both, 1.0) + view.waiting) / capacity.batch,
            kind.handoff_token_s * tokens / _LINK_SHARE,
        )
        return prefill_work, decode_work, True

    def _decide(
        found: Balanced,
        work: tuple[float, float, bool],
        prefills: Sequence[WorkerView],
        decodes: Sequence[WorkerView],
        view: PoolView,
        changed_at: float,
    ) -> Balanced:
        prefill_work, decode_work, _ = work
        size, now = len(prefills) + len(decodes), len(prefills)
        pressure = _pressure(prefill_work, decode_work, now, size)
        best = min(range(1, size), key=lambda n: (_pressure(prefill_work, decode_work, n, size), abs(n - now)))
        best_pressure = _pressure(prefill_work, decode_work, best, size)
        found = Balanced(
            WhyBalance.GOOD,
            prefill=now,
            decode=size - now,
            best_prefill=best,
            prefill_work=round(prefill_work, 3),
            decode_work=round(decode_work, 3),
            pressure=round(pressure, 3) if pressure < 1e6 else None,
            best_pressure=round(best_pressure, 3),
            is_one_pool=learning.is_one_pool,
        )
        if best == now or pressure <= settings.hysteresis * best_pressure:
            learning.pressed_since = None
            return found
        if pressure <= settings.fewest_pressed:
            learning.pressed_since = None
            return _said(found, WhyBalance.EASY)
        is_empty = not prefills or not decodes
        if learning.pressed_since is None:
            learning.pressed_since = view.at
        if not is_empty and view.at - learning.pressed_since < _SETTLE_S - settings.period_s:
            return _said(found, WhyBalance.SETTLING)
        if not is_empty and view.at - changed_at < settings.dwell_s:
            return _said(found, WhyBalance.RESTING)
        grows = Role.PREFILL if best > now else Role.DECODE
        worker = _donor(decodes if grows is Role.PREFILL else prefills, grows)
        if worker is None:
            return _said(found, WhyBalance.FIXED)
        step = now + (1 if grows is Role.PREFILL else -1)
        if not is_empty and _pressure(prefill_work, decode_work, step, size) >= pressure:
            return found  # what is left of the other pool would be worse off than this one is now
        why = (
            WhyBalance.POOL_EMPTY
            if is_empty
            else (WhyBalance.PREFILL_SHORT if grows is Role.PREFILL else WhyBalance.DECODE_SHORT)
        )
        return _said(found, why, worker.facts.worker, grows)

    return balance


def capacity_of(kind: KindCosts, worker: WorkerView, context: float, itl_s: float) -> Capacity | None:
    """What one worker can write; None where a step for one sequence is over the objective already."""
    budget = worker.facts.budget_tokens or 2048
    mixed_s = min(max(0.0, kind.mixed_s + kind.mixed_token_s * budget), _MIXED_SHARE * itl_s)
    a_sequence_s = kind.step_sequence_s + kind.step_kv_token_s * context
    left_s = itl_s - mixed_s - kind.step_s
    if left_s <= a_sequence_s:
        return None
    batch = left_s / a_sequence_s if a_sequence_s > 0 else 1e9
    room = worker.facts.kv_capacity_tokens
    if room is not None:
        batch = min(batch, 0.95 * room / context)
    batch = max(1.0, min(batch, worker.facts.slots or 256, _MOST_BEYOND * kind.most_batch))
    return Capacity(batch, batch / (kind.step_s + a_sequence_s * batch))


def _standing(workers: Sequence[WorkerView], batch: float) -> float:
    """Sequences that are written, or will be once they are read: those have their room already."""
    return sum(worker.sequences - worker.reading for worker in workers) / batch


def _pressure(prefill_work: float, decode_work: float, prefills: int, size: int) -> float:
    decodes = size - prefills
    if not prefills or not decodes:
        return 1e9
    return max(prefill_work / prefills, decode_work / decodes)


def _donor(pool: Sequence[WorkerView], role: Role) -> WorkerView | None:
    """The one whose change disturbs least: that writes least, or that has least to read."""
    able = [worker for worker in pool if role in worker.facts.allowed_roles and not worker.is_held and not worker.is_paused]
    if role is Role.PREFILL:
        return min(able, key=lambda worker: (worker.sequences - worker.reading, worker.facts.worker), default=None)
    return min(able, key=lambda worker: (worker.prefill_tokens, worker.facts.worker), default=None)


def _said(found: Balanced, why: WhyBalance, worker: str | None = None, role: Role | None = None) -> Balanced:
    return Balanced(
        why,
        found.prefill,
        found.decode,
        found.best_prefill,
        found.prefill_work,
        found.decode_work,
        found.pressure,
        found.best_pressure,
        found.is_one_pool,
        worker,
        role,
    )

