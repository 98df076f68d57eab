"""The best of a row of options, found by climbing: from a first guess to either side, as long as the next one carries more.

An option is played at a rate a little over the best one's; only one that carries it is searched for what it carries. One whose
bound is lower than what the best carries is not played, nor one that lies behind an option that fell short: along a row what
is carried rises to one best and falls again."""

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import NamedTuple

from twinpool.sim.goodput import ATTAINMENT_RATIO, Attained, highest_scale

Play = Callable[[float], Attained]
"""One option's, at so many requests a second."""

RESOLUTION = 0.02
"""Of the highest rate."""

_BETTER = 1.0 + RESOLUTION / 2
LIKELY = 0.92  # of its bound, is carried by steady traffic; bursts can make it a third of that
_APART = 1.12  # the first two rates that are tried
_NEAR = 1.04  # the same, for one that has carried more than the best one already
_IDLE = 1 / 64  # of its bound: who fails there fails at any rate
_OVER_BOUND = 1.03  # at the end of a run a queue may remain, and one request in ten may miss
_FARTHEST = 1.25  # of its bound: where all requests may come at once the search would never end


class Outcome(StrEnum):
    """What became of an option. Closed."""

    SEARCHED = "searched"  # the highest rate it carries is known
    FELL_SHORT = "fell_short"  # it did not carry what another of its row carries
    BOUND_BELOW = "bound_below"  # it cannot
    BEHIND = "behind"  # it lies behind one that fell short


class Climbed(NamedTuple):
    """`req_s`: what it carries, where it was searched; what it did not carry, where it fell short; else None."""

    outcome: Outcome
    req_s: float | None = None


class _Played:
    """One option, no rate twice."""

    def __init__(self, play: Play) -> None:
        self._play = play
        self._runs: dict[float, Attained] = {}

    def at(self, rate: float) -> Attained:
        if rate not in self._runs:
            self._runs[rate] = self._play(rate)
        return self._runs[rate]

    def carries(self, rate: float) -> bool:
        return self.at(rate).attainment_ratio >= ATTAINMENT_RATIO


def climb(bounds: list[float], first: int, player: Callable[[int], Play], *, likely: float = LIKELY) -> list[Climbed]:
    """What became of each option of the row; `bounds` in requests a second, `player` gives the one at an index. The search
    begins at the share `likely` of a bound."""
    found = [Climbed(Outcome.BEHIND)] * len(bounds)
    best = 0.0
    is_hopeless = False  # the one before carried nothing: this one is asked first whether it carries anything

    def is_better(index: int) -> bool:
        """And puts down what was found."""
        nonlocal best, is_hopeless
        if best and bounds[index] * _OVER_BOUND <= best:
            found[index] = Climbed(Outcome.BOUND_BELOW)
            return False
        played = _Played(player(index))
        if is_hopeless and not played.carries(_IDLE * bounds[index]):
            found[index] = Climbed(Outcome.SEARCHED, 0.0)
            return False
        rate = best * _BETTER
        if best and not played.carries(rate):
            found[index] = Climbed(Outcome.FELL_SHORT, rate)
            return False
        guess, apart = (rate, _NEAR) if best else (likely * bounds[index], _APART)
        carried = highest(played.at, guess, bounds[index], apart=apart)
        found[index] = Climbed(Outcome.SEARCHED, carried)
        best, is_hopeless = max(best, carried), not carried
        return carried > 0

    start = next((index for index in _outward(first, len(bounds)) if is_better(index)), None)
    if start is None:
        return found
    for step in (-1, 1):
        index = start + step
        while 0 <= index < len(bounds) and found[index].outcome is Outcome.BEHIND and is_better(index):
            index += step
    return _with_bounds(found, bounds, best)


def highest(play: Play, guess: float, bound: float, *, apart: float = _APART, resolution: float = RESOLUTION) -> float:
    """Requests a second that are carried, searched from `guess` to `apart` times as much, and beyond where it lies there, a
    little beyond the bound at most."""
    return highest_scale(play, guess, guess * apart, resolution=resolution, most=bound * _FARTHEST).scale


def _outward(first: int, count: int) -> Iterator[int]:
    return iter(sorted(range(count), key=lambda index: (abs(index - first), index)))


def _with_bounds(found: list[Climbed], bounds: list[float], best: float) -> list[Climbed]:
    """Of those that were passed over, some need no climbing to be out."""
    return [
        Climbed(Outcome.BOUND_BELOW) if each.outcome is Outcome.BEHIND and bound * _OVER_BOUND <= best else each
        for each, bound in zip(found, bounds, strict=True)
    ]
