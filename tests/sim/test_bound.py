from random import Random

import pytest
from tests.sim.plain import PROFILE, profile
from tests.sim.scenes import group, play, scene

from twinpool.core.model import Role
from twinpool.sim.bound import capacity_req_s, configurations, demand_of
from twinpool.sim.cost import StepCost
from twinpool.sim.findings import findings_of
from twinpool.sim.scenario import TrafficSpec
from twinpool.sim.shelf import load_profile
from twinpool.workload.arrivals import Poisson
from twinpool.workload.lengths import Exactly
from twinpool.workload.mixes import short_and_long
from twinpool.workload.offered import Offered, offered

PLAIN = StepCost(PROFILE)


def test_reading_alone_is_bound_by_the_reading() -> None:
    demand = demand_of([Offered(0.0, 1000, 1, False)])
    steps = configurations(PROFILE, PLAIN, demand, 0.05)
    assert capacity_req_s(demand, [(3, steps)]) == pytest.approx(3 * 10.0)


def test_writing_alone_is_bound_by_the_largest_batch() -> None:
    four = profile(max_sequences=4)
    demand = demand_of([Offered(0.0, 1, 101, False)])
    steps = configurations(four, StepCost(four), demand, 0.05, reads=False)
    read = configurations(four, StepCost(four), demand, 0.05, writes=False)
    assert capacity_req_s(demand, [(1, steps), (100, read)]) == pytest.approx(4 / 0.010 / 100)


def test_room_for_kv_bounds_the_batch() -> None:
    tight = profile(kv_tokens=3500)
    demand = demand_of([Offered(0.0, 1000, 3, False)])
    wide = configurations(PROFILE, PLAIN, demand, 0.05, reads=False)
    narrow = configurations(tight, StepCost(tight), demand, 0.05, reads=False)
    assert max(each.output_tokens_s for each in narrow) == pytest.approx(3 / 0.010)
    assert max(each.output_tokens_s for each in wide) > 3 / 0.010


def test_a_tighter_limit_a_smaller_budget_and_fixed_roles_carry_less() -> None:
    tp8 = load_profile("llama-3.1-70b-h100-tp8")
    cost = StepCost(tp8)
    demand = demand_of(offered(Poisson(rate=50), short_and_long(0.4, output=Exactly(200)), Random(1), duration_s=60))
    free = capacity_req_s(demand, [(8, configurations(tp8, cost, demand, 0.05))])
    tight = capacity_req_s(demand, [(8, configurations(tp8, cost, demand, 0.02))])
    small = capacity_req_s(demand, [(8, configurations(tp8, cost, demand, 0.05, budget_tokens=256))])
    read, write = (
        configurations(tp8, cost, demand, 0.05, reads=reads, writes=not reads, budget_tokens=8192) for reads in (True, False)
    )
    fixed = [capacity_req_s(demand, [(n, read), (8 - n, write)]) for n in range(1, 8)]
    assert tight < free
    assert small < free
    assert 0 < min(fixed) < max(fixed) < free
    assert 100 < free < 115  # 13.9 a worker in a study of the same profile with its own mix of the kind


def test_what_came_before_need_not_be_read_again() -> None:
    once = demand_of([Offered(0.0, 1024, 9, False, (1, 2)), Offered(0.0, 1024, 9, False, (3, 4))])
    twice = demand_of([Offered(0.0, 1024, 9, False, (1, 2)), Offered(0.0, 1024, 9, False, (1, 5))])
    assert (once.prompt_tokens, twice.prompt_tokens) == (1024, 768)


@pytest.mark.parametrize("rate", [6, 12, 30])
def test_no_run_of_any_length_of_time_carries_more(rate: float) -> None:
    traffic = TrafficSpec(mix="mixed-90-10", arrivals=Poisson(rate=rate))
    found = findings_of(play(scene(workers=(group(2, Role.COLOCATED, budget_tokens=300),), traffic=traffic, duration_s=120)))
    assert found.report.throughput_req_s <= max(found.bound_req_s, found.report.goodput_req_s)
    assert found.report.goodput_req_s <= found.bound_req_s
