"""Quantiles out of buckets."""

from random import Random

import pytest

from twinpool.measure.digest import Digest, Layers


def _digest(values: list[float]) -> Digest:
    digest = Digest()
    for value in values:
        digest.add(value)
    return digest


@pytest.mark.parametrize("sigma", [0.1, 1.0, 2.5])
def test_quantiles_are_within_half_a_percent_and_the_mean_is_exact(sigma: float) -> None:
    rng = Random(1)
    values = [rng.lognormvariate(-2, sigma) for _ in range(20_000)]
    layers = Layers([_digest(values[:5000]), _digest(values[5000:])])
    values.sort()
    for share, found in zip((0.5, 0.9, 0.99), layers.quantiles([1, 1], (0.5, 0.9, 0.99)), strict=True):
        assert found == pytest.approx(values[round(share * len(values)) - 1], rel=0.0051)
    assert layers.mean([1, 1]) == pytest.approx(sum(values) / len(values))


def test_its_room_does_not_grow_with_the_values() -> None:
    rng = Random(1)
    digest = _digest([rng.uniform(0.001, 10) for _ in range(50_000)])
    assert len(digest.counts) < 1000


def test_layers_weigh_as_told() -> None:
    layers = Layers([_digest([1.0] * 10), _digest([2.0] * 10)])
    assert layers.quantiles([1, 0], (0.99,)) == [pytest.approx(1.0, rel=0.005)]
    assert layers.quantiles([0, 3], (0.01,)) == [pytest.approx(2.0, rel=0.005)]
    assert layers.mean([1, 3]) == pytest.approx(1.75)


def test_a_quantile_is_a_value_that_the_share_does_not_exceed() -> None:
    layers = Layers([_digest([1.0, 2.0, 3.0, 4.0])])
    assert [round(value or 0, 1) for value in layers.quantiles([1], (0.25, 0.26, 0.75, 1.0))] == [1.0, 2.0, 3.0, 4.0]


def test_nothing_has_no_quantile() -> None:
    layers = Layers([Digest()])
    assert (layers.mean([1]), layers.quantiles([1], (0.5, 0.9))) == (None, [None, None])


def test_nothing_is_lost_below_a_microsecond() -> None:
    assert Layers([_digest([0.0, 0.0])]).quantiles([1], (0.5,)) == [0.0]
