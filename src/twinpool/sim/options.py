"""The ways to serve with N workers, what no policy could exceed in each, and how one of them is played.

    colocated   every worker does everything; the token budget of its engines is tuned
    pools       so many prefill, so many decode workers, as they stand: the gateway's own defaults
    balanced    two pools whose workers change role as traffic shifts, and requests that go the way that costs least: the law,
                `[balance] mode = "auto"` and `[routing] policy = "least_cost"`

Each way is a row of options along which what is carried rises to a best one and falls again: budgets from small to large,
splits from one prefill worker to all but one."""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from twinpool.assemble import build_controller
from twinpool.config import Balance, BalanceMode, Objectives, Routing, RoutingPolicy
from twinpool.core.controller import Controller
from twinpool.core.law import Law
from twinpool.core.model import Role
from twinpool.profile import Profile
from twinpool.sim.bound import Configuration, Demand, capacity_req_s, configurations, least_ttft_s
from twinpool.sim.cost import StepCost
from twinpool.sim.goodput import ATTAINMENT_RATIO
from twinpool.sim.run import Run, simulate
from twinpool.sim.sampling import Sample
from twinpool.sim.scenario import Arm, Scenario, TrafficSpec, WorkerGroup
from twinpool.workload.offered import Offered, scaled

COLOCATED_BUDGETS = (128, 192, 256, 384, 512, 640, 768, 1024, 1536, 2048, 4096, 8192)
"""Close where engines differ most: a coarse row flatters two pools by as much as a third at short ITL objectives."""

POOL_BUDGET = 4096
"""Of the engines of two pools: one for both roles, as engines have it. A prefill worker is worse off with less, and a decode
worker does not use it."""

ANY_BUDGET = 8192
"""Beyond it a step gains nothing more."""


class Way(StrEnum):
    """From the simplest on."""

    COLOCATED = "colocated"
    POOLS = "pools"
    BALANCED = "balanced"


class Option(NamedTuple):
    """`budget_tokens` a step, of every engine. A balanced one starts from these pools."""

    way: Way
    prefill: int
    decode: int
    colocated: int
    budget_tokens: int

    def __str__(self) -> str:
        if self.way is Way.COLOCATED:
            return f"{self.colocated} colocated, budget {self.budget_tokens:,}"
        pools = f"{self.prefill} prefill, {self.decode} decode"
        return pools if self.way is Way.POOLS else f"balanced from {pools}, budget {self.budget_tokens:,}"


class Fleet(NamedTuple):
    """What is planned with. A price is for one worker and hour."""

    profile: Profile
    workers: int
    objectives: Objectives
    price_per_hour: float | None = None


class Row(NamedTuple):
    """One way's options with their bounds (requests a second), and where its best one is looked for first."""

    options: list[tuple[Option, float]]
    first: int


class Bounds:
    """What no policy exceeds, for traffic of these means."""

    def __init__(self, fleet: Fleet, demand: Demand) -> None:
        self._fleet = fleet
        self._demand = demand
        self._cost = StepCost(fleet.profile)
        self._found: dict[tuple[int, bool, bool], list[Configuration]] = {}

    def of(self, option: Option) -> float:
        """Requests a second."""
        if option.way is Way.POOLS:
            read, write = self._steps(option.budget_tokens, writes=False), self._steps(option.budget_tokens, reads=False)
            return capacity_req_s(self._demand, [(option.prefill, read), (option.decode, write)])
        return self._of_all(option.budget_tokens)

    def any_policy(self) -> float:
        """Requests a second. 0 where the engine's shortest step is over the objective."""
        return self._of_all(ANY_BUDGET)

    def least_ttft_s(self, requests: Sequence[Offered], share: float) -> float:
        """Within which so many of them could have their first token at best."""
        return least_ttft_s(requests, self._cost, share)

    def rows(self) -> dict[Way, Row]:
        """Of the ways whose options are known beforehand."""
        workers = self._fleet.workers
        near = self._budget_that_keeps_itl()
        splits = [Option(Way.POOLS, n, workers - n, 0, POOL_BUDGET) for n in range(1, workers)]
        pools = [(option, self.of(option)) for option in splits]
        best = max(range(len(pools)), key=lambda n: pools[n][1])
        together = [Option(Way.COLOCATED, 0, 0, workers, budget) for budget in COLOCATED_BUDGETS]
        return {
            Way.COLOCATED: Row([(option, self.of(option)) for option in together], COLOCATED_BUDGETS.index(near)),
            Way.POOLS: Row(pools, best),
        }

    def balanced(self, pools: Row, colocated_budget_tokens: int) -> Row:
        """From the split whose bound is best. With the pools' budget, and with the one that was best for colocated: where
        everybody doing everything carries most, the law does that."""
        start, _ = pools.options[pools.first]
        budgets = sorted({colocated_budget_tokens, POOL_BUDGET})
        moving = [start._replace(way=Way.BALANCED, budget_tokens=budget) for budget in budgets]
        return Row([(option, self.of(option)) for option in moving], len(moving) - 1)

    def _of_all(self, budget_tokens: int) -> float:
        return capacity_req_s(self._demand, [(self._fleet.workers, self._steps(budget_tokens))])

    def _steps(self, budget_tokens: int, *, reads: bool = True, writes: bool = True) -> list[Configuration]:
        key = (budget_tokens, reads, writes)
        if key not in self._found:
            self._found[key] = configurations(
                self._fleet.profile,
                self._cost,
                self._demand,
                self._fleet.objectives.slo_itl_s,
                budget_tokens=budget_tokens,
                reads=reads,
                writes=writes,
            )
        return self._found[key]

    def _budget_that_keeps_itl(self) -> int:
        """About the largest whose full step keeps the objective while a worker writes its share of the bound."""
        demand, itl_s = self._demand, self._fleet.objectives.slo_itl_s
        batch = max(1, round(self.any_policy() / self._fleet.workers * demand.decode_tokens * itl_s))
        attended_a_token = demand.attended / demand.prompt_tokens

        def keeps(budget: int) -> bool:
            chunk = budget - batch
            step_s = self._cost.mixed(batch, batch * demand.context_tokens, chunk, chunk * attended_a_token)
            return chunk > 0 and step_s <= itl_s

        return max((budget for budget in COLOCATED_BUDGETS if keeps(budget)), default=COLOCATED_BUDGETS[0])


def play(option: Option, fleet: Fleet, sample: Sample, scale: float, *, may_give_up: bool = False) -> Run:
    """The sample, so many times as fast."""
    profile = fleet.profile

    def group(count: int, role: Role) -> WorkerGroup:
        return WorkerGroup(count=count, role=role, profile=profile.name, budget_tokens=option.budget_tokens)

    roles = ((option.prefill, Role.PREFILL), (option.decode, Role.DECODE), (option.colocated, Role.COLOCATED))
    arm = Arm(name=str(option), workers=tuple(group(count, role) for count, role in roles if count))
    is_balanced = option.way is Way.BALANCED
    scenario = Scenario(
        name="plan",
        traffic=TrafficSpec(trace="the planned one"),
        duration_s=sample.seconds / scale,
        objectives=fleet.objectives,
        routing=Routing(
            policy=RoutingPolicy.LEAST_COST if is_balanced else RoutingPolicy.LEAST_LOADED,
            max_waiting=100_000,
            prefill_window_tokens=POOL_BUDGET,
        ),
        balance=Balance(mode=BalanceMode.AUTO if is_balanced else BalanceMode.OFF),
        arms=(arm,),
    )
    allowed = (1 - ATTAINMENT_RATIO) * 0.85 * len(sample.requests) if may_give_up else float("inf")
    requests = scaled(sample.requests, rate=scale)
    build = None if is_balanced else _build_simple
    return simulate(scenario, arm, build=build, requests=requests, load=lambda name: profile, misses_allowed=allowed)


def _build_simple(rules: Routing) -> Controller:
    """Where the least loaded worker is chosen, what could be learnt of costs decides nothing."""
    return build_controller(rules, law=Law(learns=False))
