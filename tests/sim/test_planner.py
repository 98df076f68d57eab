import re
from collections.abc import Iterable, Iterator
from random import Random

import pytest
from tests.sim.plain import PROFILE, profile

from twinpool.config import Objectives
from twinpool.errors import UserError
from twinpool.sim import planner
from twinpool.sim.advice import WORTH_IT_RATIO
from twinpool.sim.climb import Outcome
from twinpool.sim.options import COLOCATED_BUDGETS, Fleet, Way
from twinpool.sim.plan_page import page_of
from twinpool.sim.planner import Plan
from twinpool.workload.arrivals import Poisson
from twinpool.workload.lengths import Exactly
from twinpool.workload.mixes import short_and_long
from twinpool.workload.offered import Offered, offered

OBJECTIVES = Objectives(slo_itl_s=0.05)


def trace(rate: float, seconds: float = 100) -> Iterator[Offered]:
    return offered(Poisson(rate=rate), short_and_long(0.1, output=Exactly(40)), Random(1), duration_s=seconds)


def plan(requests: Iterable[Offered], fleet: Fleet) -> Plan:
    """With samples that are too short for figures and long enough for what is asked here."""
    return planner.plan(requests, fleet, sample_s=4, fewest_requests=150)


@pytest.fixture(scope="module")
def three() -> Plan:
    return plan(trace(5), Fleet(PROFILE, 3, OBJECTIVES, price_per_hour=2.0))


def test_every_option_is_there_and_the_best_is_first(three: Plan) -> None:
    splits = {(each.prefill, each.decode) for each in three.options if each.way() is Way.POOLS}
    assert splits == {(1, 2), (2, 1)}
    assert {each.budget_tokens for each in three.options if each.colocated} == set(COLOCATED_BUDGETS)
    carried = [each.capacity_req_s for each in three.options if each.capacity_req_s is not None]
    assert carried == sorted(carried, reverse=True)
    for each in three.options:
        assert each.bound_req_s <= three.bound_req_s * 1.001
        assert (each.capacity_req_s is not None) == (each.outcome is Outcome.SEARCHED)


def test_each_way_has_a_best_one_and_the_law_is_among_them(three: Plan) -> None:
    for way in Way:
        found = [each for each in three.options if each.way() is way]
        best = max(each.capacity_req_s or 0.0 for each in found)
        assert best > 0
        for each in found:
            if each.outcome is Outcome.BOUND_BELOW:
                assert each.bound_req_s < best
            if each.fell_short_req_s is not None:
                assert each.fell_short_req_s > best / 1.02
    balanced = [each for each in three.options if each.balance]
    assert any(each.role_changes is not None for each in balanced)
    assert "balanced pools" in three.recommendation


def test_a_plan_says_what_to_do_by_how_much_and_how_sure(three: Plan) -> None:
    assert three.choice in set(Way)
    assert three.margin_ratio is not None
    assert three.uncertainty_ratio is not None
    assert f"{three.margin_ratio:+.1%}" in three.recommendation
    assert (three.choice != "colocated") == (three.margin_ratio > max(three.uncertainty_ratio, WORTH_IT_RATIO))


def test_figures_at_the_rate_asked_for(three: Plan) -> None:
    for way in Way:
        best = next(each for each in three.options if each.way() is way)
        assert best.goodput_req_s == pytest.approx(three.asked_req_s, rel=0.15)
        assert best.ttft_long_mean_s is not None
        assert best.ttft_short_mean_s is not None
        assert best.ttft_long_mean_s > best.ttft_short_mean_s
        assert (best.itl_worst_p99_s or 0) >= (best.itl_p99_s or 1)
        tokens_s = 2.0 * 3 / 3600 / (best.cost_per_million_output_tokens or 0) * 1e6
        assert tokens_s == pytest.approx(40 * three.asked_req_s, rel=0.15)


def test_the_page_stands_alone_and_says_the_same(three: Plan) -> None:
    page = page_of(three, "a <trace>")
    assert "a &lt;trace&gt;" in page
    assert three.recommendation.split(":")[0] in page
    assert "http" not in page
    assert page.count("<tr>") == len(three.options) + 1
    assert "cost of 1M tokens" in page
    assert "balanced from" in page


def test_more_than_they_carry_is_no_plan() -> None:
    found = plan(trace(30, 20), Fleet(PROFILE, 2, OBJECTIVES))
    assert found.choice == "none"
    assert "workers would do" in found.recommendation


@pytest.mark.parametrize(
    ("objectives", "why"),
    [
        (Objectives(slo_itl_s=0.005), "this engine's fastest step takes 10.0 ms"),
        (Objectives(slo_ttft_s=0.05), r"Nine in ten take up to 0\.[012]\d s there"),  # half of the prompts have 500 tokens
    ],
)
def test_objectives_out_of_reach_are_named_and_nothing_is_played(objectives: Objectives, why: str) -> None:
    found = plan(trace(5), Fleet(PROFILE, 2, objectives))
    assert (found.choice, found.options) == ("none", [])
    assert re.search(why, found.recommendation)


def test_objectives_that_no_way_meets_are_no_plan() -> None:
    """Ten come at once, at whatever rate: alone each would do."""
    together = [Offered(float(n // 10), 1000, 40, False) for n in range(200)]
    found = plan(together, Fleet(PROFILE, 2, Objectives(slo_ttft_s=0.3)))
    assert found.choice == "none"
    assert "no way for 2 workers" in found.recommendation


@pytest.mark.parametrize(
    ("requests", "why"),
    [
        ([], "0 requests are no traffic"),
        ([Offered(0.0, 10, 10, False)], "1 request is no traffic"),
        ([Offered(0.0, 10, 10, False)] * 200, "same moment"),
        ([Offered(float(n), 500_000, 10, True) for n in range(200)], "no request of the trace fits"),
    ],
)
def test_what_is_no_traffic_to_plan_for(requests: list[Offered], why: str) -> None:
    with pytest.raises(UserError, match=why):
        plan(requests, Fleet(PROFILE, 2, OBJECTIVES))


def test_one_worker_has_no_split() -> None:
    with pytest.raises(UserError, match="one worker"):
        plan(trace(5), Fleet(PROFILE, 1, OBJECTIVES))


def test_a_sample_has_no_more_requests_than_asked_for() -> None:
    found = planner.plan(trace(8), Fleet(PROFILE, 2, OBJECTIVES), fewest_requests=100, most_requests=120)
    assert found.requests_simulated == 120
    assert any("--sample plays longer" in note for note in found.notes)


def test_where_all_may_come_at_once_the_search_ends_near_the_bound() -> None:
    found = plan(trace(5), Fleet(PROFILE, 2, Objectives(slo_ttft_s=1000)))
    assert found.choice != "none"
    assert all(each.capacity_req_s <= each.bound_req_s * 1.26 for each in found.options if each.capacity_req_s)
    assert any("was not seen" in note for note in found.notes)


def test_what_is_too_long_is_left_out_and_said() -> None:
    requests = sorted([*trace(5), Offered(50.0, 150_000, 10, True)], key=lambda each: each.at_s)
    found = plan(requests, Fleet(profile(max_sequences=8), 2, OBJECTIVES))
    assert any("left out" in note for note in found.notes)


def test_a_long_trace_is_represented_by_its_heaviest_stretch() -> None:
    light, heavy = list(trace(2, 600)), list(trace(8, 600))
    requests = light + [Offered(each.at_s + 600, each.prompt_tokens, each.output_tokens, each.is_long) for each in heavy]
    found = plan(requests, Fleet(PROFILE, 2, OBJECTIVES))
    assert found.requests_simulated < found.requests_in_trace
    assert "heaviest" in found.sample
    assert found.asked_req_s == pytest.approx(8, rel=0.2)
