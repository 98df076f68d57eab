"""Small fleets of a 70B model's workers in virtual time, under the law."""

import msgspec

from twinpool.config import Balance, BalanceMode, Objectives, Routing, RoutingPolicy
from twinpool.core.decisions import Balanced
from twinpool.core.model import Role
from twinpool.sim.run import Run, simulate
from twinpool.sim.scenario import Arm, Fault, Scenario, TrafficSpec, WorkerGroup
from twinpool.workload.arrivals import Poisson
from twinpool.workload.mixes import AnyTraffic

PROFILE = "llama-3.1-70b-h100-tp8"


def arm(prefill: int, decode: int, *, budget_tokens: int = 8192, **group: object) -> Arm:
    groups = [
        WorkerGroup(count=count, role=role, profile=PROFILE, budget_tokens=budget_tokens, **group)  # type: ignore[arg-type]
        for count, role in ((prefill, Role.PREFILL), (decode, Role.DECODE))
        if count
    ]
    return Arm(name="fleet", workers=tuple(groups))


def play(
    workers: Arm,
    mix: AnyTraffic | str,
    rate: float,
    *,
    seconds: float = 40.0,
    seed: int = 1,
    mode: BalanceMode = BalanceMode.AUTO,
    itl_s: float = 0.05,
    knows_costs: bool = True,
    policy: RoutingPolicy = RoutingPolicy.LEAST_COST,
    faults: tuple[Fault, ...] = (),
) -> Run:
    scenario = Scenario(
        name="law",
        traffic=TrafficSpec(mix=mix if isinstance(mix, str) else msgspec.to_builtins(mix), arrivals=Poisson(rate=rate)),
        duration_s=seconds,
        seed=seed,
        objectives=Objectives(slo_itl_s=itl_s),
        routing=Routing(policy=policy, max_waiting=100_000, prefill_window_tokens=4096),
        balance=Balance(mode=mode),
        knows_costs=knows_costs,
        workers=workers.workers,
        faults=faults,
    )
    return simulate(scenario, scenario.all_arms()[0])


def flips(run: Run) -> list[tuple[float, Role]]:
    """What balance changed, and when."""
    return [(at, role) for at, _, role, why in run.role_changes if why != "manual"]


def split_after(run: Run, prefill: int) -> int:
    """Prefill workers at the end, of so many at the beginning."""
    return prefill + sum(1 if role is Role.PREFILL else -1 for _, role in flips(run))


def reasons(run: Run) -> list[str]:
    return [found.why.value for _, found in run.balanced]


def found(run: Run) -> list[Balanced]:
    return [found for _, found in run.balanced]
