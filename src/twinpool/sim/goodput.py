"""The highest rate that a fleet carries: where so many of the requests still meet the objectives.

The same requests are played faster and slower (the same lengths in the same order, time stretched), so that rates differ in
nothing but the rate. A run that cannot reach the wanted share any more is given up."""

from collections.abc import Callable
from math import inf
from typing import Generic, NamedTuple, Protocol, TypeVar

ATTAINMENT_RATIO = 0.9
RESOLUTION = 0.01


class Attained(Protocol):
    """What a search must know of a run."""

    @property
    def attainment_ratio(self) -> float: ...


R = TypeVar("R", bound=Attained)


class Found(NamedTuple, Generic[R]):
    """`scale` times the traffic's own rate is carried; `run` is the run at that scale, None where not even the lowest is."""

    scale: float
    run: R | None
    runs: int


def highest_scale(
    play: Callable[[float], R],
    low: float,
    high: float,
    *,
    attainment: float = ATTAINMENT_RATIO,
    resolution: float = RESOLUTION,
    most: float = inf,
) -> Found[R]:
    """Between `low` and `high`, to within `resolution` of itself, for one sample of traffic. Attainment is taken to fall with
    the rate, which it does but for noise. A `high` that is carried is gone beyond, up to `most`: requests that are all served
    before the objective for the first token ends are carried at any rate."""
    high = min(high, most)
    runs = 0
    best: R | None = None
    carried = 0.0

    def carries(scale: float) -> bool:
        nonlocal runs, best, carried
        runs += 1
        run = play(scale)
        is_carried = run.attainment_ratio >= attainment
        if is_carried:
            best, carried = run, scale
        return is_carried

    lowest, fall = low / 64, 0.9
    is_high_known = False
    while not carries(low):
        if low <= lowest:  # a fleet that fails when it is nearly idle fails at any rate
            return Found(0.0, None, runs)
        low, high, is_high_known = low * fall, low, True
        fall *= fall
    while not is_high_known and high > low and carries(high):
        low, high = high, min(high * 1.15, most)
    while high - low > resolution * high:
        middle = (low + high) / 2
        if carries(middle):
            low = middle
        else:
            high = middle
    return Found(carried, best, runs)
