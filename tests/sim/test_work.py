"""What one more request costs in calls of Python functions: work that can be counted, where seconds hang on the machine.

A change that makes the controller or the engines do much more for a request fails here. Whoever means to raises the bound, and
says why."""

import sys
from collections.abc import Callable
from itertools import islice
from random import Random
from types import FrameType

import pytest

from twinpool.assemble import build_controller
from twinpool.config import Balance, BalanceMode, Routing, RoutingPolicy
from twinpool.core.events import Event, RequestArrived
from twinpool.core.model import Role
from twinpool.sim.run import kind_of, law_of, simulate
from twinpool.sim.scenario import Scenario, TrafficSpec, WorkerGroup
from twinpool.workload.arrivals import Poisson
from twinpool.workload.mixes import MIXES
from twinpool.workload.offered import Offered, offered

RATE_A_WORKER = 11.0
"""Requests a second near the limit: some wait for their turn."""


def service(workers: int, policy: RoutingPolicy) -> Scenario:
    pools = {Role.PREFILL: workers * 3 // 4, Role.DECODE: workers // 4}
    return Scenario(
        name="work",
        traffic=TrafficSpec(mix="mixed-60-40", arrivals=Poisson(rate=RATE_A_WORKER * workers)),
        duration_s=60,
        routing=Routing(policy=policy, prefill_window_tokens=4096, max_waiting=100_000),
        balance=Balance(mode=BalanceMode.OFF),
        workers=tuple(
            WorkerGroup(count=count, role=role, profile="llama-3.1-70b-h100-tp8", budget_tokens=4096)
            for role, count in pools.items()
        ),
    )


def requests(scenario: Scenario, count: int) -> list[Offered]:
    if scenario.traffic.arrivals is None:
        raise ValueError("the scenario has no arrivals")
    return list(islice(offered(scenario.traffic.arrivals, MIXES["mixed-60-40"], Random(1), duration_s=1e9), count))


def calls(work: Callable[[], object]) -> int:
    """Of functions of the project, while it works."""
    found = 0

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal found
        found += event == "call" and frame.f_globals["__name__"].startswith("twinpool.")

    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def test_a_simulated_request() -> None:
    scenario = service(16, RoutingPolicy.LEAST_LOADED)
    (arm,) = scenario.all_arms()
    few, many = (
        calls(lambda count=count: simulate(scenario, arm, requests=iter(requests(scenario, count)))) for count in (200, 800)
    )
    assert 100 < (many - few) / 600 < 300


@pytest.mark.parametrize(
    ("policy", "workers", "most"),
    [
        (RoutingPolicy.LEAST_LOADED, 8, 230),
        (RoutingPolicy.LEAST_LOADED, 64, 230),  # its calls do not grow with the workers
        (RoutingPolicy.LEAST_COST, 8, 215),
        (RoutingPolicy.LEAST_COST, 64, 310),  # each that decodes is weighed
    ],
)
def test_the_controller_s_part_of_a_request(policy: RoutingPolicy, workers: int, most: int) -> None:
    scenario = service(workers, policy)
    (arm,) = scenario.all_arms()
    told: list[Event] = []
    simulate(scenario, arm, requests=iter(requests(scenario, 800)), on_step=lambda event, _: told.append(event))
    controller = build_controller(scenario.routing, law=law_of(scenario, [kind_of(group) for group in arm.workers]))
    second_half = next(n for n, event in enumerate(told) if isinstance(event, RequestArrived) and event.request == "r400")
    for event in told[:second_half]:
        controller.handle(event)

    def handle() -> None:
        for event in told[second_half:]:
            controller.handle(event)

    assert 50 < calls(handle) / 400 < most
