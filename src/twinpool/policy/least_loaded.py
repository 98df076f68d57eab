"""Which way a request goes: prefill on one worker and decode on another where a pair is up, else all on one worker.

Least loaded first. Prefill load is counted in prompt tokens and decode load in sequences and KV, because a count of requests
says nothing where lengths differ a hundredfold. A request that finds no room waits in the router's queue, where it can still
choose, and not in an engine's. Room on the decode worker is part of the choice: the controller reserves it before the prefill
starts, so that no KV is parked on a prefill worker.
"""

from collections.abc import Iterator, Sequence
from operator import attrgetter

from twinpool.config import Routing
from twinpool.core.cluster import WorkerView
from twinpool.core.decisions import Choice, Decision, Why
from twinpool.core.lifecycle import PairState
from twinpool.core.model import Role
from twinpool.core.policies import Pending, PickDecode, Route

_UNKNOWN_SLOTS = 256
"""Sequences at once where the engine does not tell: vLLM's default for `max_num_seqs`."""

# members under names of this module: through its class each takes 0.2 µs on Python 3.11, several dozen times a request
_PREFILL, _DECODE, _COLOCATED = Role
_WAIT = Choice.WAIT
_PROVED = PairState.PROVED

_WHOLE_ORDER = (_COLOCATED, _DECODE, _PREFILL)

_PREFILL_LOAD = attrgetter("prefill_tokens", "sequences")
_DECODE_LOAD = attrgetter("sequences", "kv_tokens")
"""Workers come in the order of their ids, and the first of equals is taken: so ties end with the id."""


def disaggregate_when_possible(rules: Routing) -> Route:
    """The simple law: a pair where there is one with room, one worker where there is no pair, else wait."""

    def route(pending: Pending, workers: Sequence[WorkerView]) -> Decision:
        workers = _able(pending, workers)
        if not workers:
            return Decision(_WAIT, Why.NO_WORKER)
        with_window = _with_window(workers, pending.prompt_tokens, rules.prefill_window_tokens)
        obstacle = pending.facts.obstacle or _no_use(pending)
        if obstacle is None:
            pair = _pair(with_window, workers, pending.avoid)
            if pair is not None:
                return pair
        prefills = [worker for worker in workers if worker.role is _PREFILL]
        decodes = [worker for worker in workers if worker.role is _DECODE]
        obstacle = pending.facts.obstacle or _no_pair(prefills, decodes) or obstacle
        if obstacle is not None:
            return _colocate(pending, workers, obstacle)
        return _overflow(pending, workers, Why.DECODE_BUSY if _has_pair(with_window, decodes) else Why.PREFILL_BUSY)

    return route


def least_loaded_decode(pending: Pending, prefill: WorkerView, workers: Sequence[WorkerView]) -> str | None:
    """A `PickDecode`: where the reserved decode worker is gone, the least loaded other that can read this one's KV."""
    chosen = _least_decode(prefill, _able(pending, workers), pending.avoid)
    return None if chosen is None else chosen.facts.worker


_: PickDecode = least_loaded_decode


def _able(pending: Pending, workers: Sequence[WorkerView]) -> Sequence[WorkerView]:
    """Those that can do what this request needs."""
    return [worker for worker in workers if worker.facts.continues] if pending.must_continue else workers


def _pair(prefills: Sequence[WorkerView], workers: Sequence[WorkerView], avoid: frozenset[str]) -> Decision | None:
    """The least loaded prefill worker that has a partner with room, and the least loaded of those."""
    for prefill in _by_turn(prefills, avoid):
        decode = _least_decode(prefill, workers, avoid)
        if decode is not None:
            worker, partner = prefill.facts.worker, decode.facts.worker
            return Decision(Choice.DISAGGREGATED, Why.PAIR_READY, prefill=worker, decode=partner)
    return None


def _no_use(pending: Pending) -> Why | None:
    """Two handoffs that failed are enough: what one worker does alone cannot fail by a handoff."""
    return Why.HANDOFF_FAILED if pending.failed_handoffs >= 2 else None


def _no_pair(prefills: Sequence[WorkerView], decodes: Sequence[WorkerView]) -> Why | None:
    if not prefills:
        return Why.NO_PREFILL_WORKER
    if not decodes:
        return Why.NO_DECODE_WORKER
    return None if _has_pair(prefills, decodes) else _why_no_partner(prefills, decodes)


def _has_pair(prefills: Sequence[WorkerView], decodes: Sequence[WorkerView]) -> bool:
    """Whether any of these may hand over to any of those."""
    for prefill in prefills:
        state_of = prefill.partners.get
        for decode in decodes if prefill.proved_partners else ():
            if state_of(decode.facts.worker) is _PROVED:
                return True
    return False


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
        return Decision(_WAIT, why)
    free = _with_slots(able, pending.facts.sequences)
    if not free:
        return Decision(_WAIT, Why.WORKERS_BUSY)
    preferred = _preferred(free, pending.avoid)
    first_in_order = next(pool for role in _WHOLE_ORDER if (pool := [worker for worker in preferred if worker.role is role]))
    chosen = min(first_in_order, key=_PREFILL_LOAD)
    return Decision(Choice.COLOCATED, why, decode=chosen.facts.worker)


def _overflow(pending: Pending, workers: Sequence[WorkerView], why: Why) -> Decision:
    """The pairs are full: a colocated worker of the same fleet may have room."""
    colocated = [worker for worker in workers if worker.role is _COLOCATED]
    if not colocated:
        return Decision(_WAIT, why)
    decision = _colocate(pending, colocated, why)
    return decision if decision.choice is Choice.COLOCATED else Decision(_WAIT, why)


def _least_decode(prefill: WorkerView, workers: Sequence[WorkerView], avoid: frozenset[str]) -> WorkerView | None:
    state_of = prefill.partners.get
    able = [
        worker
        for worker in workers
        if worker.role is _DECODE
        and not worker.is_paused
        and (worker.sequences == 0 or worker.sequences < (worker.facts.slots or _UNKNOWN_SLOTS))
        and state_of(worker.facts.worker) is _PROVED
    ]
    return min(_preferred(able, avoid), key=_DECODE_LOAD, default=None)


def _with_window(workers: Sequence[WorkerView], tokens: int, window: int) -> list[WorkerView]:
    """Those that prefill, and could read so many tokens soon. Short prompts share a window, a long one has the worker for
    itself: two at once would both end late."""
    left = window - tokens
    return [
        worker
        for worker in workers
        if worker.role is _PREFILL
        and (worker.prefill_tokens == 0 or worker.prefill_tokens <= left)
        and not worker.is_paused
        and (worker.sequences == 0 or worker.sequences < (worker.facts.slots or _UNKNOWN_SLOTS))
    ]


def _with_slots(workers: Sequence[WorkerView], sequences: int) -> list[WorkerView]:
    """Those that have room for all of them; more than a worker has slots may go there once it is idle, and queue there."""
    return [
        worker
        for worker in workers
        if not worker.is_paused
        and (worker.sequences == 0 or worker.sequences + sequences <= (worker.facts.slots or _UNKNOWN_SLOTS))
    ]


def _preferred(workers: Sequence[WorkerView], avoid: frozenset[str]) -> Sequence[WorkerView]:
    if not avoid:
        return workers
    return [worker for worker in workers if worker.facts.worker not in avoid] or workers


def _by_turn(workers: Sequence[WorkerView], avoid: frozenset[str]) -> Iterator[WorkerView]:
    """The least loaded first, which mostly is enough; those to avoid last, since the others may have no partner with room."""
    if not workers:
        return
    first = min(workers, key=_PREFILL_LOAD)
    if first.facts.worker not in avoid:
        yield first
    for worker in sorted(workers, key=lambda worker: (worker.facts.worker in avoid, *_PREFILL_LOAD(worker))):
        if worker is not first or first.facts.worker in avoid:
            yield worker
