import pytest
from tests.sim.plain import PROFILE

from twinpool.config import Objectives
from twinpool.core.decisions import Choice
from twinpool.sim.bound import demand_of
from twinpool.sim.options import Bounds, Fleet, Option, Way, play
from twinpool.sim.sampling import Sample
from twinpool.workload.offered import Offered

FLEET = Fleet(PROFILE, 3, Objectives())
REQUESTS = [Offered(n * 0.2, 400 + 13 * n % 300, 40, False) for n in range(150)]
SAMPLE = Sample(REQUESTS, 30.0)


def test_pools_are_bound_by_the_tighter_one_and_the_law_as_one_pool_is() -> None:
    bounds = Bounds(FLEET, demand_of(REQUESTS))
    one, two = (bounds.of(Option(Way.POOLS, n, 3 - n, 0, 4096)) for n in (1, 2))
    together = bounds.of(Option(Way.COLOCATED, 0, 0, 3, 4096))
    assert max(one, two) < together <= bounds.any_policy()
    assert bounds.of(Option(Way.BALANCED, 2, 1, 0, 4096)) == together


def test_rows_begin_where_the_best_one_should_be() -> None:
    bounds = Bounds(FLEET, demand_of(REQUESTS))
    rows = bounds.rows()
    pools = rows[Way.POOLS]
    assert pools.options[pools.first][1] == max(bound for _, bound in pools.options)
    together = rows[Way.COLOCATED]
    first = together.options[together.first][0].budget_tokens
    assert first == 384  # 10 ms for those that write, and 0.1 ms for each token of a chunk: just under 50 ms
    assert {option.budget_tokens for option, _ in bounds.balanced(pools, 384).options} == {384, 4096}


@pytest.mark.parametrize(
    ("option", "choice"),
    [
        (Option(Way.COLOCATED, 0, 0, 3, 512), {Choice.COLOCATED}),
        (Option(Way.POOLS, 2, 1, 0, 4096), {Choice.DISAGGREGATED}),
        (Option(Way.BALANCED, 2, 1, 0, 384), {Choice.COLOCATED, Choice.DISAGGREGATED}),
    ],
)
def test_each_way_is_played_by_its_own_policy(option: Option, choice: set[Choice]) -> None:
    run = play(option, FLEET, SAMPLE, 1.0)
    assert run.attainment_ratio == 1.0
    assert {Choice(name) for name, _ in run.decisions} - {Choice.WAIT} == choice
    assert bool(run.balanced) is (option.way is Way.BALANCED)
