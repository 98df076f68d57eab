"""Workers that take minutes to start, reports that are old, an objective that nobody can meet: the law must not chase them."""

import msgspec
from tests.law.fleet import arm, flips, play, split_after

from twinpool.config import Balance, Objectives, Routing, RoutingPolicy
from twinpool.sim.run import simulate
from twinpool.sim.scenario import Fault, FaultKind, Gateway, Scenario, TrafficSpec
from twinpool.workload.arrivals import Poisson
from twinpool.workload.lengths import Exactly, Uniform
from twinpool.workload.mixes import Drift, Mix, Part, short_and_long
from twinpool.workload.offered import Offered

ANSWERS = Mix(parts=(Part(share=1.0, prompt=Uniform(2000, 3000), output=Exactly(800)),))


def test_roles_change_while_a_worker_takes_long_to_start_and_are_enough_when_it_is_there() -> None:
    """BS-11: the only decode worker is gone for longer than the traffic lasts; one flip, not several, fills its place."""
    crash = Fault(at_s=10.0, worker="w004", kind=FaultKind.CRASH, lasts_s=180.0)
    run = play(arm(4, 1), "mixed-60-40", 35.0, seconds=60.0, faults=(crash,))
    changes = [at for at, _ in flips(run) if at < 60.0]
    assert 1 <= len(changes) <= 2
    assert changes[0] < 13.0
    assert run.recording.outcomes["ok"] > 0.97 * run.demand.requests


def test_nobody_notices_a_flip() -> None:
    """BS-12: what the worker has goes on, in both directions."""
    for prefill, decode, mix, rate in ((1, 5, "mixed-60-40", 66.0), (3, 1, ANSWERS, 26.0)):
        run = play(arm(prefill, decode), mix, rate)
        assert flips(run)
        assert run.recording.outcomes["ok"] == run.demand.requests
        assert run.lost_leases == 0


def test_the_last_worker_of_a_pool_stays() -> None:
    """BS-12: answers of one token; there must still be somebody to write them."""
    short = [Offered(0.02 * n, 4000, 1, is_long=True) for n in range(1500)]
    scenario = Scenario(
        name="last",
        traffic=TrafficSpec(trace="given"),
        duration_s=30.0,
        routing=Routing(policy=RoutingPolicy.LEAST_COST, max_waiting=10_000, queue_timeout_s=600.0),
        workers=arm(3, 2).workers,
        balance=Balance(),
    )
    run = simulate(scenario, scenario.all_arms()[0], requests=iter(short))
    assert split_after(run, 3) == 4
    assert run.recording.outcomes["ok"] == 1500


def test_a_first_token_that_nobody_can_give_in_time_moves_nobody_and_leaves_nothing_behind() -> None:
    """BS-05: a prompt of 32,000 tokens against 10 ms, then silence for half an hour, then a little as usual."""
    requests = [Offered(0.0, 32_000, 50, is_long=True)] + [Offered(1800.0 + n, 500, 100, is_long=False) for n in range(20)]
    scenario = Scenario(
        name="impossible",
        traffic=TrafficSpec(trace="given"),
        duration_s=1830.0,
        objectives=Objectives(slo_ttft_s=0.01),
        routing=Routing(policy=RoutingPolicy.LEAST_COST),
        workers=arm(2, 2).workers,
        balance=Balance(),
    )
    run = simulate(scenario, scenario.all_arms()[0], requests=iter(requests))
    assert run.role_changes == []
    assert run.recording.outcomes["ok"] == 21


def test_old_reports_of_load_move_nobody_to_and_fro() -> None:
    """Engines say how full they are every five seconds, and it is four seconds old then: the law counts what it gives."""
    scenario = Scenario(
        name="stale",
        traffic=TrafficSpec(mix="mixed-60-40", arrivals=Poisson(rate=60.0)),
        duration_s=90.0,
        routing=Routing(policy=RoutingPolicy.LEAST_COST, max_waiting=10_000),
        workers=arm(2, 4).workers,
        balance=Balance(),
    )
    fresh = simulate(scenario, scenario.all_arms()[0])
    stale = msgspec.structs.replace(scenario, gateway=Gateway(load_reports_s=5.0, load_age_s=4.0))
    run = simulate(stale, stale.all_arms()[0])
    assert len(flips(run)) <= len(flips(fresh)) + 1
    assert split_after(run, 2) == split_after(fresh, 2)
    assert run.attainment_ratio > fresh.attainment_ratio - 0.03


def test_a_drift_and_back_costs_three_flips_each_way() -> None:
    """From one prompt in ten that is long to seven, and back."""
    drift = Drift(start=short_and_long(0.0), to=short_and_long(1.0), points=((0, 0.1), (75, 0.7), (150, 0.1)))
    run = play(arm(5, 3), drift, 66.0, seconds=150.0)
    changes = [at for at, _ in flips(run) if at < 150.0]
    assert len([at for at in changes if at < 75.0]) <= 3
    assert len([at for at in changes if at >= 75.0]) <= 3
    assert run.attainment_ratio > 0.9
