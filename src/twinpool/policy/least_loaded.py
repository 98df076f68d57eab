"""Which way a request goes: prefill on one worker and decode on another where a pair is up, else all on one worker.

Least loaded first. Prefill load is counted in prompt tokens and decode load in sequences and KV, because a count of requests
says nothing where lengths differ a hundredfold. A request that finds no room waits in the router's queue, where it can still
choose, and not in an engine's. Room on the decode worker is part of the choice: the controller reserves it before the prefill
starts, so that no KV is parked on a prefill worker.
"""

from collections.abc import Iterator, Sequence

from twinpool.config import Routing
from twinpool.core.cluster import WorkerView
from twinpool.core.decisions import Choice, Decision, Why
from twinpool.core.lifecycle import PairState
from twinpool.core.model import Role
from twinpool.core.policies import Pending, PickDecode, Route

_UNKNOWN_SLOTS = 256
"""Sequences at once where the engine does not tell: vLLM's default for `max_num_seqs`."""


def disaggregate_when_possible(rules: Routing) -> Route:
    """The simple law: a pair where there is one with room, one worker where there is no pair, else wait."""

    def route(pending: Pending, workers: Sequence[WorkerView]) -> Decision:
        workers = _able(pending, workers)
        if not workers:
            return Decision(Choice.WAIT, Why.NO_WORKER)
        prefills = [worker for worker in workers if worker.role is Role.PREFILL]
        decodes = [worker for worker in workers if worker.role is Role.DECODE]
        obstacle = pending.facts.obstacle or _no_pair(prefills, decodes) or _no_use(pending)
        if obstacle is not None:
            return _colocate(pending, workers, obstacle)
        tokens, window = pending.prompt_tokens, rules.prefill_window_tokens
        with_window = [p for p in prefills if _has_window(p, tokens, window)]
        for prefill in _by_turn(with_window, pending.avoid):
            decode = _least_decode(prefill, decodes, pending.avoid)
            if decode is not None:
                worker, partner = prefill.facts.worker, decode.facts.worker
                return Decision(Choice.DISAGGREGATED, Why.PAIR_READY, prefill=worker, decode=partner)
        has_window = any(_is_partnered(prefill, decodes) for prefill in with_window)
        return _overflow(pending, workers, Why.DECODE_BUSY if has_window else Why.PREFILL_BUSY)

    return route


def least_loaded_decode(pending: Pending, prefill: WorkerView, workers: Sequence[WorkerView]) -> str | None:
    """A `PickDecode`: where the reserved decode worker is gone, the least loaded other that can read this one's KV."""
    decodes = [worker for worker in _able(pending, workers) if worker.role is Role.DECODE]
    chosen = _least_decode(prefill, decodes, pending.avoid)
    return None if chosen is None else chosen.facts.worker


_: PickDecode = least_loaded_decode


def _able(pending: Pending, workers: Sequence[WorkerView]) -> Sequence[WorkerView]:
    """Those that can do what this request needs."""
    return [worker for worker in workers if worker.facts.continues] if pending.must_continue else workers


def _no_use(pending: Pending) -> Why | None:
    """Two handoffs that failed are enough: what one worker does alone cannot fail by a handoff."""
    return Why.HANDOFF_FAILED if pending.failed_handoffs >= 2 else None


def _no_pair(prefills: Sequence[WorkerView], decodes: Sequence[WorkerView]) -> Why | None:
    if not prefills:
        return Why.NO_PREFILL_WORKER
    if not decodes:
        return Why.NO_DECODE_WORKER
    if not any(_is_partnered(prefill, decodes) for prefill in prefills):
        return _why_no_partner(prefills, decodes)
    return None


def _is_partnered(prefill: WorkerView, decodes: Sequence[WorkerView]) -> bool:
    return prefill.proved_partners > 0 and any(_can_hand_over(prefill, decode) for decode in decodes)


def _why_no_partner(prefills: Sequence[WorkerView], decodes: Sequence[WorkerView]) -> Why:
    """What stands in the way of the pair that is nearest to being one."""
    is_aside = False
    for prefill in prefills:
        for decode in decodes:
            state = prefill.partners.get(decode.facts.worker)
            if state is PairState.UNPROVED:
                return Why.PAIR_UNPROVED
            is_aside |= state is PairState.ASIDE
    return Why.PAIR_ASIDE if is_aside else Why.NO_PAIR


def _colocate(pending: Pending, workers: Sequence[WorkerView], why: Why) -> Decision:
    """All on one worker: colocated ones first, then those that decode, then those that prefill."""
    able = [worker for worker in workers if worker.facts.serves_whole]
    if not able:
        return Decision(Choice.WAIT, why)
    free = [worker for worker in able if _has_slots(worker, pending.facts.sequences)]
    if not free:
        return Decision(Choice.WAIT, Why.WORKERS_BUSY)
    chosen = min(_preferred(free, pending.avoid), key=_by_whole_load)
    return Decision(Choice.COLOCATED, why, decode=chosen.facts.worker)


def _overflow(pending: Pending, workers: Sequence[WorkerView], why: Why) -> Decision:
    """The pairs are full: a colocated worker of the same fleet may have room."""
    colocated = [worker for worker in workers if worker.role is Role.COLOCATED]
    if not colocated:
        return Decision(Choice.WAIT, why)
    decision = _colocate(pending, colocated, why)
    return decision if decision.choice is Choice.COLOCATED else Decision(Choice.WAIT, why)


def _least_decode(prefill: WorkerView, decodes: Sequence[WorkerView], avoid: frozenset[str]) -> WorkerView | None:
    partners = prefill.partners
    able = [d for d in decodes if partners.get(d.facts.worker) is PairState.PROVED and _has_slots(d, 1)]
    return min(_preferred(able, avoid), key=_by_decode_load, default=None)


def _can_hand_over(prefill: WorkerView, decode: WorkerView) -> bool:
    return prefill.partners.get(decode.facts.worker) is PairState.PROVED


def _has_slots(worker: WorkerView, sequences: int) -> bool:
    """Room for all of them; more than the worker has slots may go there once it is idle, and queue there."""
    if worker.is_paused:
        return False
    return worker.sequences == 0 or worker.sequences + sequences <= (worker.facts.slots or _UNKNOWN_SLOTS)


def _has_window(worker: WorkerView, tokens: int, window: int) -> bool:
    """Short prompts share a window, a long one has the worker for itself: two at once would both end late."""
    return _has_slots(worker, 1) and (worker.prefill_tokens == 0 or worker.prefill_tokens + tokens <= window)


def _preferred(workers: Sequence[WorkerView], avoid: frozenset[str]) -> Sequence[WorkerView]:
    if not avoid:
        return workers
    return [worker for worker in workers if worker.facts.worker not in avoid] or workers


def _by_turn(workers: Sequence[WorkerView], avoid: frozenset[str]) -> Iterator[WorkerView]:
    """The least loaded first, which mostly is enough; those to avoid last, since the others may have no partner with room."""
    if not workers:
        return
    first = min(workers, key=_by_prefill_load)
    if first.facts.worker not in avoid:
        yield first
    for worker in sorted(workers, key=lambda worker: (worker.facts.worker in avoid, *_by_prefill_load(worker))):
        if worker is not first or first.facts.worker in avoid:
            yield worker


def _by_prefill_load(worker: WorkerView) -> tuple[int, int, str]:
    return worker.prefill_tokens, worker.sequences, worker.facts.worker


def _by_decode_load(worker: WorkerView) -> tuple[int, int, str]:
    return worker.sequences, worker.kv_tokens, worker.facts.worker


_WHOLE_ORDER = {Role.COLOCATED: 0, Role.DECODE: 1, Role.PREFILL: 2}


def _by_whole_load(worker: WorkerView) -> tuple[int, int, int, str]:
    return _WHOLE_ORDER[worker.role], worker.prefill_tokens, worker.sequences, worker.facts.worker
