"""Small scenarios: few workers of the plain kind, a minute of traffic. Costs are not known: the least loaded gets work."""

from typing import Any

import msgspec
from tests.sim.plain import PROFILE

from twinpool.config import Balance, BalanceMode, Routing
from twinpool.core.model import Role
from twinpool.profile import Profile
from twinpool.sim.run import Run, simulate
from twinpool.sim.scenario import Scenario, TrafficSpec, WorkerGroup
from twinpool.workload.arrivals import Poisson


def group(count: int, role: Role, **changes: Any) -> WorkerGroup:
    return WorkerGroup(count=count, role=role, profile="plain", **changes)


PAIR = (group(2, Role.PREFILL), group(1, Role.DECODE))


def scene(**changes: Any) -> Scenario:
    base = Scenario(
        name="scene",
        traffic=TrafficSpec(mix="mixed-90-10", arrivals=Poisson(rate=8)),
        duration_s=60,
        routing=Routing(request_timeout_s=60, max_waiting=100_000),
        workers=PAIR,
        balance=Balance(mode=BalanceMode.OFF),
        knows_costs=False,
    )
    return msgspec.structs.replace(base, **changes)


def play(scenario: Scenario, *, profile: Profile = PROFILE, **options: Any) -> Run:
    (arm,) = scenario.all_arms()
    return simulate(scenario, arm, load=lambda name: profile, **options)
