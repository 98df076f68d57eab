"""Which way a request goes, by what each way should cost it: the law of `docs/decisions.md`.

    pair     prefill on one worker, decode on another: the read, the handoff, one step there
    decode   all of it on one that decodes, read in chunks beside what it writes, as long as its steps keep the ITL objective
    prefill  all of it on the one that reads it, where no decode worker can take one more
    wait     in the router's queue, where it can still choose when a worker frees

A worker's role is where it should stand, not what it can do: one that has changed its role still writes what it had, and is
asked the same question before it reads beside. Where nothing is known of the costs of a kind, the least loaded worker is
chosen."""

from collections.abc import Sequence
from math import ceil, inf
from operator import itemgetter

from twinpool.config import Routing
from twinpool.core.cluster import WorkerView
from twinpool.core.decisions import Choice, Decision, Forecast, Why
from twinpool.core.lifecycle import PairState
from twinpool.core.model import Role
from twinpool.core.policies import Pending, Route
from twinpool.policy.costs import KindCosts
from twinpool.policy.learning import Learning

_KV_SHARE = 0.95  # of an engine's room for KV, that may be promised
_FULL_RATIO = 0.97  # of its KV, as the engine says
_FRESH_S = 5.0  # for so long a report of an engine's load counts
_SLOTS = 256  # where the engine does not tell
_BUDGET = 2048  # tokens a step, where it does not tell: vLLM's old default, and less than its new one


# members under names of this module: through its class each takes 0.2 µs on Python 3.11, several dozen times a request
_PREFILL, _DECODE, _ = Role
_PROVED = PairState.PROVED


_BY_STEP = itemgetter(0)  # of equals the first by id stays first


class Whole:
    """One worker that could do all of it."""

    __slots__ = ("cached_tokens", "keeps_itl", "read_s", "ttft_s", "worker")

    def __init__(self, worker: WorkerView, ttft_s: float, read_s: float, cached_tokens: int, *, keeps_itl: bool) -> None:
        self.worker = worker
        self.cached_tokens = cached_tokens
        self.ttft_s = ttft_s
        self.read_s = read_s
        self.keeps_itl = keeps_itl


def least_cost(rules: Routing, learning: Learning, simple: Route) -> Route:
    """The law; `simple` decides where nothing is known of costs, and what is special about a request leaves no choice."""
    window = rules.prefill_window_tokens
    costs, demand, prefixes = learning.costs, learning.demand, learning.prefixes

    def route(pending: Pending, workers: Sequence[WorkerView]) -> Decision:
        facts = pending.facts
        if facts.obstacle is not None or pending.must_continue or pending.failed_handoffs >= 2 or pending.avoid:
            return simple(pending, workers)
        at, tokens = pending.at, pending.prompt_tokens
        answer = demand.output_tokens(tokens, facts)
        is_one_pool = learning.is_one_pool
        prefill: WorkerView | None = None  # the one that would read it first
        prefill_kind: KindCosts | None = None
        prefill_s = inf
        prefill_read_s = backlog_s = 0.0
        readers = 0
        decodes: list[tuple[float, WorkerView, KindCosts]] = []
        whole: Whole | None = None
        on_prefill: Whole | None = None
        has_prefill = has_decode = False
        is_better = _is_sooner if is_one_pool else _keeps_more
        name: str | None = None
        for worker in workers:
            if worker.kind != name:  # those of one kind mostly come one after the other
                known = costs.of(worker.kind)
                if known is None:
                    return simple(pending, workers)
                name, kind, alone_s = worker.kind, known, known.read(tokens, 0)
            role = worker.role
            if role is _PREFILL and not is_one_pool:
                has_prefill = True
                if worker.is_paused:
                    continue
                readers += 1
                wait_s = worker.read_until - at
                if wait_s < 0.0:
                    wait_s = 0.0
                backlog_s += wait_s
                if worker.prefill_tokens and worker.prefill_tokens >= window:
                    continue
                cached = prefixes.cached_tokens(worker.facts.worker, facts.prefix, tokens) if facts.prefix else 0
                unread = tokens - cached
                read_s = kind.read(unread, cached) if cached else alone_s
                writing = worker.sequences - worker.reading
                if writing:
                    on_it = _whole(worker, kind, at, unread, cached, tokens, answer)
                    if on_it is None or not on_it.keeps_itl:
                        continue
                    read_s = on_it.read_s
                if wait_s + read_s < prefill_s:
                    prefill, prefill_kind, prefill_s, prefill_read_s = worker, kind, wait_s + read_s, read_s
                continue
            if role is _DECODE:
                has_decode = True
            if worker.is_paused or worker.sequences >= (worker.facts.slots or _SLOTS):
                continue
            if worker.kv_used_ratio > _FULL_RATIO and at - worker.kv_used_at < _FRESH_S:  # by its own word: others may use it
                continue
            if role is _DECODE and not is_one_pool:
                batch = worker.sequences - worker.reading
                kv = worker.kv_tokens + 0.5 * answer * batch
                if _has_kv(worker, kv + tokens + answer):
                    step_s = kind.step_s + kind.step_sequence_s * (batch + 1) + kind.step_kv_token_s * (kv + tokens)
                    decodes.append((step_s, worker, kind))
            if not worker.facts.serves_whole:
                continue
            cached = prefixes.cached_tokens(worker.facts.worker, facts.prefix, tokens) if facts.prefix else 0
            candidate = _whole(worker, kind, at, tokens - cached, cached, tokens, answer)
            if candidate is not None and (whole is None or is_better(candidate, whole)):
                whole = candidate
        if is_one_pool or not (has_prefill and has_decode):
            if has_prefill and not is_one_pool and whole is None:
                return simple(pending, workers)
            if whole is None:
                return simple(pending, workers)
            why = Why.ONE_POOL_BETTER if is_one_pool else (Why.NO_DECODE_WORKER if has_prefill else Why.NO_PREFILL_WORKER)
            return _on(whole, why, tokens)
        decodes.sort(key=_BY_STEP)
        chosen = _partner(prefill, decodes) if prefill is not None else None
        roomy = chosen is not None and chosen[0] <= chosen[2].limit_s
        step_s = decodes[0][0] if decodes else 0.0
        if chosen is not None:
            handoff_s = chosen[2].handoff(tokens)
        elif decodes:
            handoff_s = decodes[0][2].handoff(tokens)
        else:
            handoff_s = 0.0
        if prefill is not None and not pending.ahead_tokens:
            pair_s = prefill_s + handoff_s + 1.5 * step_s
        elif readers:
            known = decodes[0][2] if decodes else costs.of(workers[0].kind)
            of_kind = known.read(tokens, 0) + known.read_token_s * pending.ahead_tokens / readers if known else 0.0
            pair_s = backlog_s / readers + of_kind + handoff_s + 1.5 * step_s
        else:
            pair_s = inf
        is_whole_open = whole is not None and whole.keeps_itl
        forecast = Forecast(
            pair_s=_rounded(pair_s),
            decode_s=_rounded(whole.ttft_s) if whole is not None else None,
            prefill_s=_rounded(prefill_s) if prefill is not None else None,
        )
        if whole is not None and is_whole_open and whole.ttft_s <= pair_s:
            return _on(whole, Why.DECODE_SOONER, tokens, forecast)
        if prefill is None:
            return Decision(Choice.WAIT, Why.PREFILL_BUSY, forecast=forecast)
        if not roomy and prefill_kind is not None and prefill.facts.serves_whole and _has_slot(prefill):
            cached = prefixes.cached_tokens(prefill.facts.worker, facts.prefix, tokens) if facts.prefix else 0
            on_prefill = _whole(prefill, prefill_kind, at, tokens - cached, cached, tokens, answer)
            if on_prefill is not None and on_prefill.keeps_itl and _reads_on(prefill, prefill_kind):
                return _on(on_prefill, Why.DECODE_FULL, tokens, forecast)
        if chosen is None:
            if not decodes:
                return Decision(Choice.WAIT, Why.DECODE_BUSY, forecast=forecast)
            return simple(pending, workers)
        cached = prefixes.cached_tokens(prefill.facts.worker, facts.prefix, tokens) if facts.prefix else 0
        return Decision(
            Choice.DISAGGREGATED,
            Why.PAIR_READY,
            prefill=prefill.facts.worker,
            decode=chosen[1].facts.worker,
            cached_tokens=cached,
            read_s=prefill_read_s,
            forecast=forecast,
        )

    return route


def _whole(
    worker: WorkerView, kind: KindCosts, at: float, unread: int, cached: int, tokens: int, answer: float
) -> Whole | None:
    """What all of it on this worker would be like; None where its KV has no room for it. (A step under way counts with all that
    it reads until it ends: its gap is still to come.)"""
    facts, waiting = worker.facts, worker.prefill_tokens
    batch = worker.sequences - worker.reading
    kv = worker.kv_tokens + 0.5 * answer * batch
    if not _has_kv(worker, kv + (waiting if worker.reading else 0) + tokens + answer):
        return None
    free = (facts.budget_tokens or _BUDGET) - batch
    if free <= 0:
        return None
    if not batch:
        queued_s = worker.read_until - at if waiting and worker.read_until > at else 0.0
        read_s = kind.read_s + kind.read(unread, cached)
        return Whole(worker, queued_s + read_s, read_s, cached, keeps_itl=True)
    total = waiting + unread
    step_s = kind.step_s + kind.step_sequence_s * batch + kind.step_kv_token_s * kv
    chunk = min(free, total)
    mixed_s = step_s + kind.added(batch, chunk)
    steps = ceil(total / chunk)
    pairs_s = kind.read_pair_s * unread * (unread + 2.0 * cached)
    ttft_s = steps * mixed_s + pairs_s + 0.5 * step_s
    read_s = unread / chunk * mixed_s + pairs_s
    return Whole(worker, ttft_s, read_s, cached, keeps_itl=mixed_s + pairs_s / steps <= kind.limit_s)


def _reads_on(worker: WorkerView, kind: KindCosts) -> bool:
    """Whether it can go on reading at full speed while it writes: else a single answer would hold up all prompts."""
    return kind.step(1, 0, worker.facts.budget_tokens or _BUDGET) <= kind.limit_s


def _keeps_more(one: Whole, other: Whole) -> bool:
    """Who keeps the objective comes first; among equals the first by id stays."""
    if one.keeps_itl is not other.keeps_itl:
        return one.keeps_itl
    return one.ttft_s < other.ttft_s


def _is_sooner(one: Whole, other: Whole) -> bool:
    """In one pool the budget sees to the objective, whoever takes the prompt."""
    return one.ttft_s < other.ttft_s


def _on(whole: Whole, why: Why, tokens: int, forecast: Forecast | None = None) -> Decision:
    return Decision(
        Choice.COLOCATED,
        why,
        decode=whole.worker.facts.worker,
        cached_tokens=whole.cached_tokens,
        read_s=whole.read_s,
        forecast=forecast or Forecast(decode_s=_rounded(whole.ttft_s)),
    )


def _partner(
    prefill: WorkerView, decodes: Sequence[tuple[float, WorkerView, KindCosts]]
) -> tuple[float, WorkerView, KindCosts] | None:
    """The least loaded one that may read this one's KV."""
    partners = prefill.partners
    return next((found for found in decodes if partners.get(found[1].facts.worker) is _PROVED), None)


def _has_slot(worker: WorkerView) -> bool:
    return worker.sequences < (worker.facts.slots or _SLOTS)


def _has_kv(worker: WorkerView, tokens: float) -> bool:
    room = worker.facts.kv_capacity_tokens
    return room is None or tokens <= _KV_SHARE * room or worker.sequences == 0


def _rounded(seconds: float) -> float | None:
    return None if seconds == inf else round(seconds, 4)
