from random import Random

import pytest

from twinpool.policy.fits import Fit


def fed(fit: Fit, count: int, *, noise: float = 0.0, intercept: float = 0.01, slope: float = 2e-5) -> Fit:
    rng = Random(1)
    for _ in range(count):
        x = rng.uniform(1, 200)
        fit.add((1.0, x), (intercept + slope * x) * (1 + noise * rng.uniform(-1, 1)))
    return fit


def test_a_line_is_found() -> None:
    fit = fed(Fit(2), 64)
    assert fit.coefficients == pytest.approx([0.01, 2e-5], rel=1e-3)


def test_nothing_is_said_before_there_is_enough() -> None:
    assert fed(Fit(2, enough=12), 11).coefficients is None
    assert fed(Fit(2, enough=12), 12).coefficients is not None


def test_a_prior_is_known_at_once_and_gives_way() -> None:
    fit = Fit(2, prior=[((1.0, 1.0), 0.02, 1.0), ((1.0, 200.0), 0.024, 1.0)])
    assert fit.coefficients == pytest.approx([0.02, 2e-5], rel=0.02)
    assert fed(fit, 400).coefficients == pytest.approx([0.01, 2e-5], rel=0.1)


def test_outliers_move_little() -> None:
    """Cold starts, a stalled engine: one sample in ten is twenty times too long."""
    fit = fed(Fit(2), 100)
    rng = Random(2)
    for n in range(200):
        x = rng.uniform(1, 200)
        fit.add((1.0, x), (0.01 + 2e-5 * x) * (20 if n % 10 == 0 else 1))
    guess = sum(a * b for a, b in zip(fit.coefficients or [], (1.0, 100.0), strict=True))
    assert guess == pytest.approx(0.012, rel=0.15)


def test_a_lasting_change_wins() -> None:
    fit = fed(fed(Fit(2), 400), 2400, intercept=0.04, slope=8e-5)
    assert fit.coefficients == pytest.approx([0.04, 8e-5], rel=0.15)


def test_coefficients_are_never_negative() -> None:
    fit = Fit(2)
    for x in range(1, 40):
        fit.add((1.0, float(x)), 0.01 / x)
    assert min(fit.coefficients or [-1]) >= 0


def test_two_columns_that_say_the_same_share_what_they_say() -> None:
    fit = Fit(3)
    for x in range(1, 65):
        fit.add((1.0, float(x), 1000.0 * x), 0.01 + 1e-4 * x)
    assert sum(a * b for a, b in zip(fit.coefficients or [], (1.0, 32.0, 32_000.0), strict=True)) == pytest.approx(0.0132)


def test_the_error_is_that_of_predictions() -> None:
    assert fed(Fit(2), 200).error_ratio < 0.01
    assert fed(Fit(2), 400, noise=0.5).error_ratio > 0.1


def test_what_it_knows_can_be_taken_over() -> None:
    one, other = fed(Fit(2), 50), Fit(2)
    other.recall(one.remember())
    assert other.coefficients == one.coefficients


def test_samples_above_the_fit_can_weigh_less() -> None:
    """A link that is sometimes shared: the fit is what it does when it is not."""
    fit = Fit(2, above=0.05, enough=8)
    for n in range(200):
        x = 1.0 + n % 20
        fit.add((1.0, x), (0.003 + 1e-3 * x) * (1.8 if n % 2 else 1.0))
    guess = sum(a * b for a, b in zip(fit.coefficients or [], (1.0, 10.0), strict=True))
    assert guess == pytest.approx(0.013, rel=0.15)


# One length


def prior_of(scale: float, weight: float = 10.0) -> list[tuple[tuple[float, float], float, float]]:
    return [((1.0, x), scale * (0.01 + 1e-4 * x), weight) for x in (10.0, 100.0, 1000.0, 10_000.0)]


def guess(fit: Fit, x: float) -> float:
    assert fit.coefficients is not None
    return fit.coefficients[0] + fit.coefficients[1] * x


@pytest.mark.parametrize("slower", [0.25, 3.0])
@pytest.mark.parametrize("has_prior", [True, False])
def test_of_one_length_only_the_scale_is_learnt(slower: float, has_prior: bool) -> None:
    """Without a prior its shape may come at any scale."""
    rng = Random(3)
    fit = Fit(2, prior=prior_of(1.0)) if has_prior else Fit(2, shape=prior_of(1234.0))
    for _ in range(400):
        x = 2000.0 * rng.uniform(0.995, 1.005)
        fit.add((1.0, x), slower * (0.01 + 1e-4 * x) * rng.uniform(0.95, 1.05))
    for x in (100.0, 500.0, 2000.0, 8000.0):
        assert guess(fit, x) == pytest.approx(slower * (0.01 + 1e-4 * x), rel=0.15)


def test_lengths_that_differ_say_more_than_a_shape() -> None:
    """However wrong the shape is: of this one, that a length costs five times as much, hardly anything is left."""
    with_shape, without = Fit(2, shape=prior_of(1.0, weight=1.0)), Fit(2)
    for fit in (with_shape, without):
        fed(fit, 400, noise=0.1)
    assert guess(with_shape, 10.0) == pytest.approx(guess(without, 10.0), rel=0.03)
    assert guess(with_shape, 150.0) == pytest.approx(guess(without, 150.0), rel=0.03)


def test_what_a_shape_is_silent_on_does_not_stretch_it() -> None:
    """A second kind of work in the samples is no reason to think that the first takes longer."""
    rng = Random(5)
    fit = Fit(3, shape=[((1.0, x, 0.0), 0.01 + 1e-4 * x, 1.0) for x in (10.0, 1000.0)])
    for _ in range(200):
        beside = rng.uniform(0.0, 50.0)
        fit.add((1.0, 100.0, beside), 0.02 + 1e-3 * beside)
    assert fit.coefficients == pytest.approx([0.01, 1e-4, 1e-3], rel=0.05)
