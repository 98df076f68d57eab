"""When requests arrive."""

from itertools import pairwise, takewhile
from random import Random

import pytest

from twinpool.errors import UserError
from twinpool.workload.arrivals import Arrivals, Burst, Constant, Poisson, Ramp


def _until(arrivals: Arrivals, end_s: float, seed: int = 1) -> list[float]:
    return list(takewhile(lambda at_s: at_s < end_s, arrivals.times(Random(seed))))


def test_constant_does_not_drift() -> None:
    times = _until(Constant(rate=10), 1000)
    assert len(times) == 10_000
    assert times[9_990] == 999.0


def test_poisson_has_its_rate_and_its_spread() -> None:
    times = _until(Poisson(rate=50), 400)
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 50, rel=0.03)
    assert deviation == pytest.approx(mean, rel=0.05)  # as an exponential's is


def test_the_same_seed_gives_the_same_times_and_another_one_others() -> None:
    assert _until(Poisson(rate=5), 20) == _until(Poisson(rate=5), 20)
    assert _until(Poisson(rate=5), 20) != _until(Poisson(rate=5), 20, seed=2)


def test_a_burst_is_its_factor_denser_and_comes_again() -> None:
    burst = Burst(rate=20, factor=3, starts_s=50, lasts_s=50, every_s=200)
    times = _until(burst, 400)

    def count(start: float) -> int:
        return sum(start <= at_s < start + 50 for at_s in times)

    for start in (50, 250):
        assert count(start) == pytest.approx(3000, rel=0.06)
    for start in (0, 100, 200, 300):
        assert count(start) == pytest.approx(1000, rel=0.1)


def test_a_ramp_rises_in_a_straight_line_and_stays() -> None:
    ramp = Ramp(rate=10, to_rate=50, over_s=100)
    assert [ramp.rate_at(at_s) for at_s in (0, 50, 100, 1000)] == [10, 30, 50, 50]
    times = _until(ramp, 200)
    assert sum(at_s < 100 for at_s in times) == pytest.approx(3000, rel=0.06)
    assert sum(at_s >= 100 for at_s in times) == pytest.approx(5000, rel=0.06)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(UserError, match="rate"):
        Poisson(rate=rate)


def test_a_burst_that_overlaps_itself_is_refused() -> None:
    with pytest.raises(UserError, match="burst"):
        Burst(rate=1, lasts_s=60, every_s=30)
