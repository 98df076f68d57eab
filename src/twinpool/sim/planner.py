"""Which split of N workers serves this traffic, or whether none should: every option against the same requests.

An option is a number of prefill and of decode workers, or all of them colocated with one of the budgets. Each is first held
against its bound (see `bound`): one that cannot beat the best of its own sort is not simulated. Of the others the highest
rate is searched that they carry (see `goodput`), and they are played once at the rate that is asked for.

A long trace is represented by its heaviest stretch, long enough for a minute at the highest rate; a short one is repeated
until it is. Another stretch is played for the two options that the recommendation is about: how far they differ there is what
the recommendation calls uncertain."""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from math import ceil
from typing import Any, NamedTuple

import msgspec

from twinpool.config import Balance, BalanceMode, Objectives, Routing
from twinpool.core.model import Role
from twinpool.errors import UserError
from twinpool.profile import Profile
from twinpool.sim.bound import capacity_req_s, configurations, demand_of
from twinpool.sim.cost import StepCost
from twinpool.sim.findings import Findings, findings_of
from twinpool.sim.goodput import ATTAINMENT_RATIO, highest_scale
from twinpool.sim.run import Run, simulate
from twinpool.sim.scenario import Arm, Scenario, TrafficSpec, WorkerGroup
from twinpool.workload.offered import Offered, scaled

SAMPLE_S = 60.0
"""Seconds at the highest rate. In a shorter run a queue never grows as long as the objective for the first token allows."""

FEWEST_REQUESTS = 1000

AT_ONCE = 2
"""Options that are played side by side, on as many cores as there are: always so many, or another machine would prune
others."""

COLOCATED_BUDGETS = (256, 512, 1024, 2048, 4096)
POOL_BUDGET = 4096
"""Of the engines of two pools: one for both roles, as engines have it. A prefill worker is worse off with less, and a decode
worker does not use it."""

RESOLUTION = 0.02
"""Of the highest rate."""

WORTH_IT_RATIO = 0.03
"""Under this, one way of serving is not recommended over a simpler one."""


class Option(NamedTuple):
    prefill: int
    decode: int
    colocated: int
    budget_tokens: int

    def __str__(self) -> str:
        if self.colocated:
            return f"{self.colocated} colocated, budget {self.budget_tokens:,}"
        return f"{self.prefill} prefill, {self.decode} decode"


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """One option. `capacity_req_s` is the highest rate at which nine in ten requests meet the objectives; None where the bound
    showed that it is less than another's. The figures under it are at the rate that was asked for."""

    prefill: int
    decode: int
    colocated: int
    balance: bool
    budget_tokens: int
    bound_req_s: float
    capacity_req_s: float | None = None
    goodput_req_s: float | None = None
    attainment_ratio: float | None = None
    ttft_s: dict[str, float] | None = None
    ttft_short_mean_s: float | None = None
    ttft_long_mean_s: float | None = None
    itl_p99_s: float | None = None
    itl_worst_p99_s: float | None = None
    utilization_mean_ratio: float | None = None
    useful_work_ratio: float | None = None
    cost_per_million_output_tokens: float | None = None
    beyond_table_ratio: float | None = None
    handoff_bytes_s_per_decode_worker: float | None = None

    def name(self) -> str:
        return str(Option(self.prefill, self.decode, self.colocated, self.budget_tokens))


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`options` best first. `margin_ratio` is what the best two-pool option carries beyond the best colocated one."""

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
    options: list[Planned]
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        plan: dict[str, Any] = msgspec.to_builtins(self)
        return plan


class Fleet(NamedTuple):
    """What is planned with. A price is for one worker and hour."""

    profile: Profile
    workers: int
    objectives: Objectives
    price_per_hour: float | None = None


class _Sample(NamedTuple):
    """A stretch of the traffic, from 0 on, at the rate that is asked for."""

    requests: list[Offered]
    seconds: float

    @property
    def rate(self) -> float:
        return len(self.requests) / self.seconds


def plan(
    offered: Iterable[Offered], fleet: Fleet, *, sample_s: float = SAMPLE_S, fewest_requests: int = FEWEST_REQUESTS
) -> Plan:
    """Raises `UserError` where the traffic is none to plan for."""
    if fleet.workers < 2:
        raise UserError("one worker is colocated, whatever the traffic: plan for two or more")
    requests = list(offered)
    _check(requests)
    profile, objectives = fleet.profile, fleet.objectives
    fitting, notes = _that_fit(requests, profile)
    cost = StepCost(profile)
    demand = demand_of(fitting)

    def configurations_of(*, reads: bool, writes: bool, budget_tokens: int) -> list[Any]:
        itl_s = objectives.slo_itl_s
        return configurations(profile, cost, demand, itl_s, budget_tokens=budget_tokens, reads=reads, writes=writes)

    def bound(option: Option) -> float:
        if option.colocated:
            both = configurations_of(reads=True, writes=True, budget_tokens=option.budget_tokens)
            return capacity_req_s(demand, [(option.colocated, both)])
        read = configurations_of(reads=True, writes=False, budget_tokens=option.budget_tokens)
        write = configurations_of(reads=False, writes=True, budget_tokens=option.budget_tokens)
        return capacity_req_s(demand, [(option.prefill, read), (option.decode, write)])

    def any_policy_bound() -> float:
        return capacity_req_s(demand, [(fleet.workers, configurations_of(reads=True, writes=True, budget_tokens=8192))])

    size = max(fewest_requests, round(sample_s * any_policy_bound()))
    first, second = _samples(fitting, size, fewest_requests)
    demand = demand_of(first.requests)
    any_policy = any_policy_bound()
    ranked = sorted(((bound(option), option) for option in _options(fleet.workers)), key=lambda pair: -pair[0])
    planned: list[Planned] = []
    with ProcessPoolExecutor(min(AT_ONCE, os.cpu_count() or 1)) as pool:
        for sort in (True, False):
            left = [(ceiling, option) for ceiling, option in ranked if bool(option.colocated) is sort]
            best = 0.0
            while left:
                batch, left = left[:AT_ONCE], left[AT_ONCE:]
                worth = [pair for pair in batch if pair[0] > best]
                planned += [_named(option, ceiling) for ceiling, option in batch if ceiling <= best]
                asked = [pool.submit(_tried, option, ceiling, fleet, first, demand.prompt_tokens) for ceiling, option in worth]
                found = [each.result() for each in asked]
                planned += found
                best = max([best, *(each.capacity_req_s or 0.0 for each in found)])
    planned.sort(key=lambda each: (-(each.capacity_req_s or 0.0), -each.bound_req_s, each.name()))
    pools = next((each for each in planned if not each.colocated and each.capacity_req_s), None)
    together = next((each for each in planned if each.colocated and each.capacity_req_s), None)
    margin, uncertainty = _margin(pools, together, fleet, second)
    choice, recommendation = _recommend(pools, together, margin, uncertainty, first.rate, fleet)
    notes += _remarks(planned[0], profile)
    return Plan(
        recommendation=recommendation,
        choice=choice,
        margin_ratio=margin,
        uncertainty_ratio=uncertainty,
        bound_req_s=any_policy,
        asked_req_s=first.rate,
        workers=fleet.workers,
        profile=profile.name,
        objectives=objectives,
        requests_in_trace=len(requests),
        requests_simulated=len(first.requests),
        sample=_said(first, requests),
        options=planned,
        notes=notes,
    )


def _check(requests: Sequence[Offered]) -> None:
    if len(requests) < 100:
        raise UserError(
            f"{len(requests)} request{'s are' if len(requests) != 1 else ' is'} no traffic to plan for: give 100 or more"
        )
    if requests[-1].at_s <= requests[0].at_s:
        raise UserError("all requests of the trace come at the same moment: it has no rate to plan for")


def _that_fit(requests: Sequence[Offered], profile: Profile) -> tuple[list[Offered], list[str]]:
    """Without those that no worker could ever hold."""
    room = min(profile.context_tokens, profile.kv_tokens)
    fitting = [request for request in requests if request.prompt_tokens + request.output_tokens <= room]
    if not fitting:
        raise UserError(f"no request of the trace fits: a worker holds {room:,} tokens")
    left_out = len(requests) - len(fitting)
    if not left_out:
        return fitting, []
    return fitting, [
        f"{left_out} of {len(requests)} requests are longer than the {room:,} tokens a worker holds, and were left out"
    ]


def _samples(requests: Sequence[Offered], size: int, fewest: int) -> tuple[_Sample, _Sample | None]:
    """The heaviest stretch of `size`, and the heaviest that does not overlap with it, where the traffic is long enough."""
    if len(requests) < 2 * size:
        half = len(requests) // 2
        second = _repeated(_from_zero(requests[half:]), size) if half >= fewest else None
        return _repeated(_from_zero(requests[:size]), size), second
    starts = range(0, len(requests) - size + 1, size // 4)

    def weight(start: int) -> float:
        stretch = requests[start : start + size]
        return sum(each.prompt_tokens + 2 * each.output_tokens for each in stretch) / (
            stretch[-1].at_s - stretch[0].at_s or 1e-9
        )

    by_weight = sorted(starts, key=lambda start: (-weight(start), start))
    first = by_weight[0]
    second_start = next((start for start in by_weight if abs(start - first) >= size), None)
    second = None if second_start is None else _from_zero(requests[second_start : second_start + size])
    return _from_zero(requests[first : first + size]), second


def _repeated(sample: _Sample, size: int) -> _Sample:
    """Again and again until it is long enough. What a prompt shares with others it shares within one round only."""
    rounds = ceil(size / len(sample.requests))
    if rounds == 1:
        return sample
    apart = 1 + max((block for request in sample.requests for block in request.prefix), default=0)
    moved = [
        msgspec.structs.replace(
            request,
            at_s=request.at_s + turn * sample.seconds,
            prefix=tuple(block + turn * apart for block in request.prefix),
        )
        for turn in range(rounds)
        for request in sample.requests
    ]
    return _Sample(moved, rounds * sample.seconds)


def _from_zero(requests: Sequence[Offered]) -> _Sample:
    began = requests[0].at_s
    moved = [msgspec.structs.replace(request, at_s=request.at_s - began) for request in requests]
    return _Sample(moved, moved[-1].at_s * len(moved) / (len(moved) - 1))


def _said(sample: _Sample, requests: Sequence[Offered]) -> str:
    if len(sample.requests) == len(requests):
        return "all of the trace"
    if len(sample.requests) > len(requests):
        return f"all of the trace, {len(sample.requests) / len(requests):.0f} times over"
    return f"the heaviest {len(sample.requests):,} consecutive requests of {len(requests):,}"


def _options(workers: int) -> Iterator[Option]:
    for budget in COLOCATED_BUDGETS:
        yield Option(0, 0, workers, budget)
    for prefill in range(1, workers):
        yield Option(prefill, workers - prefill, 0, POOL_BUDGET)


def _named(option: Option, bound: float) -> Planned:
    return Planned(**option._asdict(), balance=False, bound_req_s=bound)


def _play(option: Option, fleet: Fleet, sample: _Sample, scale: float, *, may_give_up: bool = False) -> Run:
    profile = fleet.profile

    def group(count: int, role: Role) -> WorkerGroup:
        return WorkerGroup(count=count, role=role, profile=profile.name, budget_tokens=option.budget_tokens)

    if option.colocated:
        groups: tuple[WorkerGroup, ...] = (group(option.colocated, Role.COLOCATED),)
    else:
        groups = (group(option.prefill, Role.PREFILL), group(option.decode, Role.DECODE))
    arm = Arm(name=str(option), workers=groups)
    seconds = sample.seconds / scale
    scenario = Scenario(
        name="plan",
        traffic=TrafficSpec(trace="the planned one"),
        duration_s=seconds,
        objectives=fleet.objectives,
        routing=Routing(max_waiting=100_000, prefill_window_tokens=POOL_BUDGET),
        balance=Balance(mode=BalanceMode.OFF),
        arms=(arm,),
    )
    allowed = (1 - ATTAINMENT_RATIO) * 0.85 * len(sample.requests) if may_give_up else float("inf")
    requests = scaled(sample.requests, rate=scale)
    return simulate(scenario, arm, requests=requests, load=lambda name: profile, misses_allowed=allowed)


def _tried(option: Option, bound: float, fleet: Fleet, sample: _Sample, prompt_tokens: float) -> Planned:
    capacity = _capacity(option, fleet, sample, bound)
    at_rate = findings_of(_play(option, fleet, sample, 1.0))
    return _with_figures(option, bound, capacity, at_rate, fleet, prompt_tokens)


def _capacity(option: Option, fleet: Fleet, sample: _Sample, bound: float) -> float:
    """Requests a second."""
    at_bound = bound / sample.rate
    found = highest_scale(
        lambda scale: _play(option, fleet, sample, scale, may_give_up=True),
        0.75 * at_bound,
        1.02 * at_bound,
        resolution=RESOLUTION,
    )
    return found.scale * sample.rate


def _with_figures(
    option: Option, bound: float, capacity: float, found: Findings, fleet: Fleet, prompt_tokens: float
) -> Planned:
    report = found.report
    cost = None
    if fleet.price_per_hour is not None and report.throughput_output_tok_s:
        cost = fleet.price_per_hour * fleet.workers / 3600 / report.throughput_output_tok_s * 1e6
    ingress = None
    if option.decode:
        ingress = capacity * prompt_tokens * fleet.profile.kv_bytes_per_token / option.decode
    return Planned(
        **option._asdict(),
        balance=False,
        bound_req_s=bound,
        capacity_req_s=capacity,
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
    )


def _margin(
    pools: Planned | None, together: Planned | None, fleet: Fleet, second: _Sample | None
) -> tuple[float | None, float | None]:
    """Of two pools over colocated; and how far the other stretch says something else, with the search's own resolution."""
    if pools is None or together is None or not pools.capacity_req_s or not together.capacity_req_s:
        return None, None
    margin = pools.capacity_req_s / together.capacity_req_s - 1
    if second is None:
        return margin, RESOLUTION + 0.03  # four seeds of the same traffic differ by so much
    there = []
    for each in (pools, together):
        option = Option(each.prefill, each.decode, each.colocated, each.budget_tokens)
        there.append(_capacity(option, fleet, second, each.bound_req_s))
    if not all(there):
        return margin, RESOLUTION + 0.03
    return margin, RESOLUTION + abs(there[0] / there[1] - 1 - margin) / 2


def _recommend(
    pools: Planned | None, together: Planned | None, margin: float | None, uncertainty: float | None, asked: float, fleet: Fleet
) -> tuple[str, str]:
    """What to do, in one word and in words."""
    best = max(
        (each for each in (pools, together) if each is not None), key=lambda each: each.capacity_req_s or 0.0, default=None
    )
    if best is None or not best.capacity_req_s:
        return "none", (
            f"No split of {fleet.workers} workers meets the objectives at any rate that was tried: "
            "loosen them, or take another engine."
        )
    if best.capacity_req_s < asked:
        needed = -(-asked * fleet.workers // best.capacity_req_s)
        return "none", (
            f"No plan: {fleet.workers} workers carry {best.capacity_req_s:.1f} requests a second at best ({best.name()}), "
            f"{asked:.1f} are asked for. About {needed:.0f} workers would do."
        )
    room = f"{best.capacity_req_s:.1f} requests a second carried, {asked:.1f} asked for"
    if pools is None or together is None or margin is None or uncertainty is None:
        return ("pools" if best is pools else "colocated"), f"{best.name()}: {room}; nothing else comes near."
    found = f"{margin:+.1%} (± {uncertainty:.1%}) against colocated with its best budget ({together.budget_tokens:,})"
    if margin > max(uncertainty, WORTH_IT_RATIO):
        return "pools", f"Two pools, {pools.name()}: {room}; {found}."
    if margin < -max(uncertainty, WORTH_IT_RATIO):
        return "colocated", f"Do not disaggregate: {together.name()}. The best split ({pools.name()}) carries {found}; {room}."
    return "colocated", (
        f"Do not disaggregate: {together.name()}. The best split ({pools.name()}) carries {found}, which is no difference to "
        f"build on; {room}."
    )


def _remarks(best: Planned, profile: Profile) -> list[str]:
    notes = [f"step costs from profile {profile.name}: {profile.source}"]
    if best.beyond_table_ratio and best.beyond_table_ratio > 0.01:
        notes.append(
            f"{best.beyond_table_ratio:.0%} of the best option's engine time is beyond the profile's table and extrapolated"
        )
    over = (best.capacity_req_s or 0.0) / best.bound_req_s - 1
    if over > 0:
        notes.append(
            f"the best option is {over:.1%} over its bound, which is for endless traffic: in a run of a minute "
            "a queue may remain, and "
            "one request in ten may miss"
        )
    if not profile.mixed_step_extra_ms:
        notes.append("mixed steps are taken to cost nothing extra: two pools gain with whatever they do cost; measure it")
    ingress = best.handoff_bytes_s_per_decode_worker
    if ingress and ingress > 0.6 * profile.handoff_bytes_per_s:
        notes.append(
            f"each decode worker takes in {ingress / 1e9:.1f} GB/s at capacity, over 60 % of "
            f"the {profile.handoff_bytes_per_s / 1e9:.0f} "
            "GB/s that the profile has for it"
        )
    return notes
