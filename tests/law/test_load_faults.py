"""Hot spots that other routers had: the law counts work when it gives it, in tokens."""

import msgspec
import pytest
from tests.law.fleet import PROFILE, arm, play

from twinpool.config import Balance, BalanceMode, Objectives, Routing, RoutingPolicy
from twinpool.core import commands as do
from twinpool.core import events as on
from twinpool.core.model import Role
from twinpool.sim.run import simulate
from twinpool.sim.scenario import Scenario, TrafficSpec, WorkerGroup
from twinpool.workload.lengths import Exactly
from twinpool.workload.mixes import Mix, Part
from twinpool.workload.offered import Offered

EXTREMES = Mix(
    parts=(
        Part(share=0.5, prompt=Exactly(100), output=Exactly(20)),
        Part(share=0.5, prompt=Exactly(20_000), output=Exactly(20)),
    )
)


def test_work_is_spread_by_tokens_and_not_by_requests() -> None:
    """LB-09: prompts of 100 and of 20,000 tokens."""
    run = play(arm(4, 1), EXTREMES, 7.0, mode=BalanceMode.OFF)
    read = [run.totals[f"w{n:03}"].read_tokens for n in range(4)]
    assert max(read) < 1.3 * min(read)


@pytest.mark.parametrize("count", [8, 40])
def test_a_burst_at_one_moment_is_spread(count: int) -> None:
    """LB-05, LB-08: what was just given counts before anybody has answered."""
    group = WorkerGroup(count=4, role=Role.PREFILL, profile=PROFILE)
    scenario = Scenario(
        name="burst",
        traffic=TrafficSpec(trace="given"),
        duration_s=1.0,
        objectives=Objectives(),
        routing=Routing(policy=RoutingPolicy.LEAST_COST, prefill_window_tokens=100_000),
        balance=Balance(mode=BalanceMode.OFF),
        workers=(group, msgspec.structs.replace(group, role=Role.DECODE, count=2)),
    )
    sent: dict[str, int] = {}

    def count_prefills(event: on.Event, commands: list[do.Command]) -> None:
        for command in commands:
            if isinstance(command, do.SendPrefill) and event.at == 0.0:
                sent[command.worker] = sent.get(command.worker, 0) + 1

    requests = iter([Offered(0.0, 3000, 20, is_long=True) for _ in range(count)])
    simulate(scenario, scenario.all_arms()[0], requests=requests, on_step=count_prefills)
    assert len(sent) == 4
    assert max(sent.values()) - min(sent.values()) <= 1


def test_one_hot_worker_leaves_the_others_their_prefixes() -> None:
    """LB-06: four tenants with long beginnings of their own, one asking most; the others' are found where they were read."""
    requests, at = [], 0.0
    for n in range(1200):
        tenant = 0 if n % 10 < 7 else 1 + n % 3
        at += 0.03
        beginning = tuple(1000 * (tenant + 1) + block for block in range(8))
        requests.append(Offered(at, 4500, 40, is_long=True, prefix=beginning))
    group = WorkerGroup(count=4, role=Role.PREFILL, profile=PROFILE)
    scenario = Scenario(
        name="tenants",
        traffic=TrafficSpec(trace="given"),
        duration_s=at,
        routing=Routing(policy=RoutingPolicy.LEAST_COST, max_waiting=10_000),
        balance=Balance(mode=BalanceMode.OFF),
        workers=(group, msgspec.structs.replace(group, role=Role.DECODE, count=2)),
    )
    run = simulate(scenario, scenario.all_arms()[0], requests=iter(requests))
    read = sum(totals.read_tokens for totals in run.totals.values())
    assert read < 0.35 * sum(request.prompt_tokens for request in requests)
    assert run.attainment_ratio > 0.99
