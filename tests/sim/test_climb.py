from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from twinpool.sim.climb import RESOLUTION, Outcome, climb


class Fleet:
    """Options that carry just so much, and what was played of each."""

    def __init__(self, *carried: float) -> None:
        self.carried = carried
        self.played: list[list[float]] = [[] for _ in carried]

    def player(self, index: int) -> Callable[[float], Any]:
        def play(rate: float) -> Any:
            self.played[index].append(rate)
            return SimpleNamespace(attainment_ratio=1.0 if rate <= self.carried[index] else 0.0)

        return play


@pytest.mark.parametrize("first", range(5))
def test_the_best_is_found_from_wherever_the_climb_begins(first: int) -> None:
    fleet = Fleet(40, 70, 90, 60, 20)
    found = climb([100.0] * 5, first, fleet.player)
    best = max((each for each in found if each.outcome is Outcome.SEARCHED), key=lambda each: each.req_s or 0)
    assert found.index(best) == 2
    assert best.req_s == pytest.approx(90, rel=RESOLUTION)


def test_one_that_falls_short_is_played_once_and_nothing_behind_it() -> None:
    fleet = Fleet(40, 70, 90, 60, 20)
    found = climb([100.0] * 5, 2, fleet.player)
    outcomes = [each.outcome for each in found]
    assert outcomes == [Outcome.BEHIND, Outcome.FELL_SHORT, Outcome.SEARCHED, Outcome.FELL_SHORT, Outcome.BEHIND]
    assert [len(rates) for rates in fleet.played] == [0, 1, len(fleet.played[2]), 1, 0]
    assert all(len(rates) == len(set(rates)) for rates in fleet.played)
    short = found[1].req_s or 0
    assert found[2].req_s < short <= 1.02 * (found[2].req_s or 0)


def test_what_cannot_be_better_is_not_played() -> None:
    fleet = Fleet(50, 90, 80)
    found = climb([60.0, 100.0, 85.0], 1, fleet.player)
    assert [each.outcome for each in found] == [Outcome.BOUND_BELOW, Outcome.SEARCHED, Outcome.BOUND_BELOW]
    assert fleet.played[0] == fleet.played[2] == []


def test_a_bound_a_hair_below_the_best_is_no_proof() -> None:
    """A minute's run can come out a little over it."""
    found = climb([100.0, 89.0], 0, Fleet(90, 95).player)
    assert found[1].req_s == pytest.approx(95, rel=RESOLUTION)


def test_where_the_first_carries_nothing_the_next_is_tried() -> None:
    found = climb([100.0] * 4, 0, Fleet(0, 0, 50, 0).player)
    assert found[2].req_s == pytest.approx(50, rel=RESOLUTION)
    assert (found[0].outcome, found[0].req_s) == (Outcome.SEARCHED, 0.0)


def test_a_hopeless_row_says_so() -> None:
    fleet = Fleet(0, 0, 0)
    found = climb([100.0] * 3, 1, fleet.player)
    assert all(each.req_s == 0.0 for each in found)
    assert [len(rates) for rates in fleet.played] == [1, len(fleet.played[1]), 1]
