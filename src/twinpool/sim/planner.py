"""Which way N workers should serve this traffic: every option against the same requests.

An option is all of them colocated with one of the budgets, a split into prefill and decode workers, or pools that the law
balances (`options`). Of each way the best option is found by climbing (`climb`), with as few plays as that takes: the others
were beaten by it, or could not have been better. What was searched is played once more, at the rate that is asked for.

A long trace is represented by its heaviest stretch (`sampling`). Another stretch is played for the two options that the
recommendation is about: how far they differ there is what it calls uncertain."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import msgspec

from twinpool.config import Objectives
from twinpool.errors import UserError
from twinpool.sim.advice import advise, remarks
from twinpool.sim.bound import demand_of
from twinpool.sim.climb import LIKELY, RESOLUTION, Climbed, Play, climb, highest
from twinpool.sim.findings import Findings, findings_of
from twinpool.sim.goodput import ATTAINMENT_RATIO
from twinpool.sim.options import Bounds, Fleet, Option, Row, Way, play
from twinpool.sim.planned import Planned
from twinpool.sim.run import Run
from twinpool.sim.sampling import Sample, check_plannable, said, samples, those_that_fit
from twinpool.workload.offered import Offered

SAMPLE_S = 60.0
"""Seconds at the highest rate. In a shorter run a queue never grows as long as the objective for the first token allows."""

FEWEST_REQUESTS = 1000
MOST_REQUESTS = 5000
"""Unless more seconds are asked for: with so many, a plan for 16 workers takes less than a minute of one core."""

AT_RATE_REQUESTS = 2000
"""That are played at the rate asked for, or a minute of them where that is more: for means and percentiles, not for a limit."""

_SEED_RATIO = 0.03
"""By so much four seeds of the same traffic differ, where there is no other stretch to look at."""

_COARSE = 0.03
"""Of the highest rate: the search on the other stretch, which is half as long."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`options` best first. `choice` is a `Way`, or none. `margin_ratio` is what the best option with two pools, fixed or
    balanced, carries beyond the best colocated one. `sample_s` are seconds at the highest rate."""

    recommendation: str
    choice: str
    margin_ratio: float | None
    uncertainty_ratio: float | None
    bound_req_s: float
    asked_req_s: float
    workers: int
    profile: str
    objectives: Objectives
    requests_in_trace: int
    requests_simulated: int
    sample: str
    sample_s: float
    options: list[Planned]
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        plan: dict[str, Any] = msgspec.to_builtins(self)
        return plan


def plan(
    offered: Iterable[Offered],
    fleet: Fleet,
    *,
    sample_s: float = SAMPLE_S,
    fewest_requests: int = FEWEST_REQUESTS,
    most_requests: int = MOST_REQUESTS,
    executor: Executor | None = None,
) -> Plan:
    """Raises `UserError` where the traffic is none to plan for. With an `executor` two ways are played at a time."""
    if fleet.workers < 2:
        raise UserError("one worker is colocated, whatever the traffic: plan for two or more")
    requests = list(offered)
    check_plannable(requests)
    fitting, notes = those_that_fit(requests, fleet.profile)
    size = round(sample_s * Bounds(fleet, demand_of(fitting)).any_policy())
    size = max(fewest_requests, min(size, most_requests))
    first, second = samples(fitting, size, fewest_requests)
    demand = demand_of(first.requests)
    bounds = Bounds(fleet, demand)
    any_policy = bounds.any_policy()
    least_ttft_s = bounds.least_ttft_s(first.requests, ATTAINMENT_RATIO)
    if any_policy and least_ttft_s <= fleet.objectives.slo_ttft_s:
        planned = _play_all(bounds, fleet, first, demand.prompt_tokens, executor)
        planned.sort(key=_by_what_it_carries)
        best = {way: each for way in Way if (each := _best(planned, way)) is not None}
        margin, uncertainty = _margin(best, fleet, second, any_policy)
    else:  # an objective is out of reach: nothing needs to be played
        planned, best, margin, uncertainty = [], {}, None, None
    carried = max((each.capacity_req_s or 0.0 for each in best.values()), default=0.0)
    choice, recommendation = advise(best, margin, uncertainty, first.rate, fleet, least_ttft_s)
    return Plan(
        recommendation=recommendation,
        choice=choice,
        margin_ratio=margin,
        uncertainty_ratio=uncertainty,
        bound_req_s=any_policy,
        asked_req_s=first.rate,
        workers=fleet.workers,
        profile=fleet.profile.name,
        objectives=fleet.objectives,
        requests_in_trace=len(requests),
        requests_simulated=len(first.requests),
        sample=said(first, requests),
        sample_s=len(first.requests) / (carried or first.rate),
        options=planned,
        notes=notes + remarks(best, fleet, len(first.requests)),
    )


def _play_all(bounds: Bounds, fleet: Fleet, sample: Sample, prompt_tokens: float, executor: Executor | None) -> list[Planned]:
    """Colocated first: how near it comes to its bound shows where to look for the others, and its budget is one for the law."""
    rows = bounds.rows()
    submit = _at_once if executor is None else executor.submit
    planned = submit(_best_of, rows[Way.COLOCATED], fleet, sample, prompt_tokens, LIKELY).result()
    carried = max(planned, key=lambda each: each.capacity_req_s or 0.0)
    likely = 0.97 * carried.capacity_req_s / carried.bound_req_s if carried.capacity_req_s else LIKELY
    others = [rows[Way.POOLS], bounds.balanced(rows[Way.POOLS], carried.option().budget_tokens)]
    asked = [submit(_best_of, row, fleet, sample, prompt_tokens, likely) for row in others]
    return planned + [each for done in asked for each in done.result()]


def _at_once(play_row: Callable[..., list[Planned]], *of: Any) -> "Future[list[Planned]]":
    """As an executor's `submit`, here and now."""
    done: Future[list[Planned]] = Future()
    done.set_result(play_row(*of))
    return done


def _by_what_it_carries(each: Planned) -> tuple[float, float, str]:
    return -(each.capacity_req_s or 0.0), -each.bound_req_s, each.name()


def _best(planned: Sequence[Planned], way: Way) -> Planned | None:
    return next((each for each in planned if each.way() is way and each.capacity_req_s), None)


def _best_of(row: Row, fleet: Fleet, sample: Sample, prompt_tokens: float, likely: float) -> list[Planned]:
    """All of one way's, with what was found."""

    def player(index: int) -> Play:
        option, _ = row.options[index]
        return lambda rate: _play_at(rate, option, fleet, sample)

    found = climb([bound for _, bound in row.options], row.first, player, likely=likely)
    return [
        _planned(option, bound, climbed, fleet, sample, prompt_tokens)
        for (option, bound), climbed in zip(row.options, found, strict=True)
    ]


def _play_at(rate: float, option: Option, fleet: Fleet, sample: Sample) -> Run:
    """Up to where it is clear that it is not carried."""
    return play(option, fleet, sample, rate / sample.rate, may_give_up=True)


def _planned(option: Option, bound: float, climbed: Climbed, fleet: Fleet, sample: Sample, prompt_tokens: float) -> Planned:
    plain = Planned.of(option, bound, climbed)
    if not plain.capacity_req_s:
        return plain
    ingress = None
    if option.decode:
        ingress = plain.capacity_req_s * prompt_tokens * fleet.profile.kv_bytes_per_token / option.decode
    at_rate = sample.first(max(AT_RATE_REQUESTS, round(SAMPLE_S * sample.rate)))
    return _with_figures(plain, findings_of(play(option, fleet, at_rate, 1.0)), fleet, ingress)


def _with_figures(plain: Planned, found: Findings, fleet: Fleet, ingress: float | None) -> Planned:
    report = found.report
    cost = None
    if fleet.price_per_hour is not None and report.throughput_output_tok_s:
        cost = fleet.price_per_hour * fleet.workers / 3600 / report.throughput_output_tok_s * 1e6
    return msgspec.structs.replace(
        plain,
        goodput_req_s=report.goodput_req_s,
        attainment_ratio=found.attainment_ratio,
        ttft_s=msgspec.to_builtins(report.ttft_s),
        ttft_short_mean_s=report.short.ttft_s.mean if report.short.ttft_s else None,
        ttft_long_mean_s=report.long.ttft_s.mean if report.long.ttft_s else None,
        itl_p99_s=report.itl_s.p99 if report.itl_s else None,
        itl_worst_p99_s=report.itl_worst_s.p99 if report.itl_worst_s else None,
        utilization_mean_ratio=report.utilization_mean_ratio,
        useful_work_ratio=report.useful_work_ratio,
        cost_per_million_output_tokens=cost,
        beyond_table_ratio=found.beyond_table_ratio,
        handoff_bytes_s_per_decode_worker=ingress,
        role_changes=len(found.role_changes),
    )


def _margin(
    best: dict[Way, Planned], fleet: Fleet, second: Sample | None, bound_req_s: float
) -> tuple[float | None, float | None]:
    """Of the better two pools over colocated; and how far the other stretch says something else, with the search's own
    resolution."""
    together = best.get(Way.COLOCATED)
    apart = max(
        (each for way, each in best.items() if way is not Way.COLOCATED),
        key=lambda each: each.capacity_req_s or 0.0,
        default=None,
    )
    if apart is None or together is None or not apart.capacity_req_s or not together.capacity_req_s:
        return None, None
    margin = apart.capacity_req_s / together.capacity_req_s - 1
    if second is None:
        return margin, RESOLUTION + _SEED_RATIO
    there = Bounds(fleet, demand_of(second.requests)).any_policy() / bound_req_s
    together_there = _highest(together, fleet, second, there * together.capacity_req_s, there)
    apart_there = _highest(apart, fleet, second, (1 + margin) * together_there, there) if together_there else 0.0
    if not apart_there:
        return margin, RESOLUTION + _SEED_RATIO
    return margin, RESOLUTION + abs(apart_there / together_there - 1 - margin) / 2


def _highest(each: Planned, fleet: Fleet, sample: Sample, guess: float, there: float) -> float:
    """Of the same option on another sample, whose bound is `there` times as high."""
    return highest(
        lambda rate: _play_at(rate, each.option(), fleet, sample),
        guess / 1.05,
        there * each.bound_req_s,
        apart=1.05 * 1.05,
        resolution=_COARSE,
    )
