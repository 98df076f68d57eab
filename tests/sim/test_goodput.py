from types import SimpleNamespace
from typing import Any

import pytest

from twinpool.sim.goodput import highest_scale


def carrying(limit: float) -> Any:
    return lambda scale: SimpleNamespace(attainment_ratio=1.0 if scale <= limit else 0.5)


@pytest.mark.parametrize("limit", [0.9, 1.0, 0.2, 3.0, 0.05])
def test_the_limit_is_found_wherever_it_lies(limit: float) -> None:
    found = highest_scale(carrying(limit), 0.7, 1.0)
    assert found.scale <= limit
    assert found.scale == pytest.approx(limit, rel=0.02)
    assert found.run is not None


def test_what_fails_at_any_rate_is_given_up() -> None:
    found = highest_scale(carrying(0.0), 0.7, 1.0)
    assert (found.scale, found.run, found.runs) == (0.0, None, 7)


def test_what_is_carried_at_any_rate_ends_at_the_most() -> None:
    assert highest_scale(carrying(1e9), 0.7, 1.0, most=2.0).scale == 2.0
    assert highest_scale(carrying(1e9), 0.7, 1.0, most=0.8).scale == 0.8
    assert highest_scale(carrying(0.75), 0.7, 1.0, most=0.8).scale == pytest.approx(0.75, rel=0.02)
