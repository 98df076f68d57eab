"""How many tokens a prompt or an answer has: distributions that are drawn from with a random source handed in."""

from math import exp
from random import Random

import msgspec

from twinpool.errors import UserError

_WIDEST = 20
"""A sigma, of which lengths in the wild have about 1. Far beyond, what is drawn is no float."""


class Exactly(msgspec.Struct, frozen=True, tag="exactly", tag_field="drawn", forbid_unknown_fields=True):
    """Always the same."""

    tokens: int

    def __post_init__(self) -> None:
        _check_bounds(self.tokens, self.tokens)

    def draw(self, rng: Random) -> int:
        return self.tokens

    @property
    def most(self) -> int:
        return self.tokens

    @property
    def mean(self) -> float:
        return float(self.tokens)

    def __str__(self) -> str:
        return f"{self.tokens:,}"


class Uniform(msgspec.Struct, frozen=True, tag="uniform", tag_field="drawn", forbid_unknown_fields=True):
    """Every number from `low` to `high`, both included, as often as the others."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check_bounds(self.low, self.high)

    def draw(self, rng: Random) -> int:
        return rng.randrange(self.low, self.high + 1)

    @property
    def most(self) -> int:
        return self.high

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def __str__(self) -> str:
        return f"{self.low:,}-{self.high:,}"


class LogNormal(msgspec.Struct, frozen=True, tag="lognormal", tag_field="drawn", forbid_unknown_fields=True):
    """Around `median`, with `sigma` the spread of its logarithm, as lengths in the wild are; cut off at `low` and `high`."""

    median: int
    sigma: float
    low: int
    high: int

    def __post_init__(self) -> None:
        _check_bounds(self.low, self.high)
        if not (self.low <= self.median <= self.high and 0 <= self.sigma <= _WIDEST):
            raise UserError(f"a log-normal length has low <= median <= high and a sigma from 0 to {_WIDEST}")

    def draw(self, rng: Random) -> int:
        drawn = round(self.median * exp(rng.gauss(0.0, self.sigma)))
        return min(max(drawn, self.low), self.high)

    @property
    def most(self) -> int:
        return self.high

    def __str__(self) -> str:
        return f"about {self.median:,} ({self.low:,}-{self.high:,})"


Lengths = Exactly | Uniform | LogNormal


def _check_bounds(low: int, high: int) -> None:
    if not 1 <= low <= high:
        raise UserError("a length is at least 1 token, and its low not above its high")
