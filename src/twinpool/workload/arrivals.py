"""When requests arrive: seconds from the beginning, rising, without end. Open loop: nobody waits for an answer.

Each shape tells its rate at any moment; `Poisson`, `Burst` and `Ramp` draw from that rate (thinning, Lewis and Shedler 1979),
`Constant` does not draw at all.
"""

from collections.abc import Iterator
from math import inf
from random import Random
from typing import Protocol

import msgspec

from twinpool.errors import UserError

_MOST = 1_000_000
"""Requests a second: more than any fleet gets."""


class Arrivals(Protocol):
    """One shape of traffic over time; rates are requests a second."""

    def rate_at(self, at_s: float) -> float: ...
    def times(self, rng: Random) -> Iterator[float]: ...


class Constant(msgspec.Struct, frozen=True, kw_only=True, tag="constant", tag_field="shape", forbid_unknown_fields=True):
    """One every 1/rate seconds."""

    rate: float

    def __post_init__(self) -> None:
        _check_rates(self.rate)

    def rate_at(self, at_s: float) -> float:
        return self.rate

    def times(self, rng: Random) -> Iterator[float]:
        count = 0
        while True:
            yield count / self.rate  # not a running sum: its rounding would drift
            count += 1


class Poisson(msgspec.Struct, frozen=True, kw_only=True, tag="poisson", tag_field="shape", forbid_unknown_fields=True):
    """Many clients that do not know of each other."""

    rate: float

    def __post_init__(self) -> None:
        _check_rates(self.rate)

    def rate_at(self, at_s: float) -> float:
        return self.rate

    def times(self, rng: Random) -> Iterator[float]:
        return _thinned(self, self.rate, rng)


class Burst(msgspec.Struct, frozen=True, kw_only=True, tag="burst", tag_field="shape", forbid_unknown_fields=True):
    """Poisson at `rate`, and `factor` times that for `lasts_s` seconds from `starts_s` on; again every `every_s` if given."""

    rate: float
    factor: float = 3.0
    starts_s: float = 60.0
    lasts_s: float = 60.0
    every_s: float | None = None

    def __post_init__(self) -> None:
        _check_rates(self.rate, self.rate * self.factor)
        is_again = self.every_s is None or self.lasts_s <= self.every_s < inf
        if not (0 < self.lasts_s < inf and 0 <= self.starts_s < inf and is_again):
            raise UserError("a burst has a starts_s from 0 on, lasts_s above 0, and comes again (every_s) after it is over")

    def rate_at(self, at_s: float) -> float:
        since_s = at_s - self.starts_s
        if since_s >= 0 and self.every_s is not None:
            since_s %= self.every_s
        return self.rate * self.factor if 0 <= since_s < self.lasts_s else self.rate

    def times(self, rng: Random) -> Iterator[float]:
        return _thinned(self, self.rate * max(1.0, self.factor), rng)


class Ramp(msgspec.Struct, frozen=True, kw_only=True, tag="ramp", tag_field="shape", forbid_unknown_fields=True):
    """Poisson from `rate` to `to_rate` in a straight line over `over_s`, then on at `to_rate`."""

    rate: float
    to_rate: float
    over_s: float

    def __post_init__(self) -> None:
        _check_rates(self.rate, self.to_rate)
        if not 0 < self.over_s < inf:
            raise UserError("a ramp takes over_s above 0 seconds")

    def rate_at(self, at_s: float) -> float:
        return self.rate + (self.to_rate - self.rate) * min(1.0, at_s / self.over_s)

    def times(self, rng: Random) -> Iterator[float]:
        return _thinned(self, max(self.rate, self.to_rate), rng)


Shape = Constant | Poisson | Burst | Ramp


def _thinned(arrivals: Arrivals, peak: float, rng: Random) -> Iterator[float]:
    """Points of a Poisson process at the peak rate, each kept with the share of the peak that its moment has."""
    at_s = 0.0
    while True:
        at_s += rng.expovariate(peak)
        rate = arrivals.rate_at(at_s)
        if rate >= peak or rng.random() * peak < rate:
            yield at_s


def _check_rates(*rates: float) -> None:
    if not all(0 < rate <= _MOST for rate in rates):
        raise UserError(f"a rate is a number of requests a second above 0, {_MOST:,} at most")
