"""Many values in little room: counts in buckets 1 % wide (a DDSketch, Masson et al. 2019).

A quantile is within half a percent of the true one, whatever the number of values; mean and maximum are exact. So a test of an
hour and a simulated day fit into memory, and two digests add up.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import ceil, fsum, log
from operator import mul

_GROWTH = 1.01
_PER_LOG = 1 / log(_GROWTH)
_SMALLEST = 1e-6
"""Seconds; what is shorter is counted as this."""


def _value(bucket: int) -> float:
    """The middle of a bucket, as seen from both ends."""
    return 2 * _GROWTH**bucket / (1 + _GROWTH)


class Digest:
    """Values from 0 on, each with a weight."""

    __slots__ = ("counts", "high", "total", "weight")

    def __init__(self) -> None:
        self.counts: dict[int, float] = {}
        self.weight = 0.0
        self.total = 0.0
        self.high = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        bucket = ceil(log(max(_SMALLEST, value)) * _PER_LOG)
        self.counts[bucket] = self.counts.get(bucket, 0.0) + weight
        self.weight += weight
        self.total += value * weight
        if value > self.high:
            self.high = value

    def include(self, other: "Digest") -> None:
        """Add all of another's."""
        for bucket, count in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0.0) + count
        self.weight += other.weight
        self.total += other.total
        self.high = max(self.high, other.high)


def together(digests: Iterable[Digest]) -> Digest:
    """All of them in one."""
    found = Digest()
    for digest in digests:
        found.include(digest)
    return found


class Layers:
    """Digests of several blocks, to be added up again and again with other weights a block."""

    def __init__(self, digests: Sequence[Digest]) -> None:
        self._weights = [digest.weight for digest in digests]
        self._totals = [digest.total for digest in digests]
        rows: dict[int, list[tuple[int, float]]] = {}
        for block, digest in enumerate(digests):
            for bucket, count in digest.counts.items():
                rows.setdefault(bucket, []).append((block, count))
        self._rows = [(_value(bucket), rows[bucket]) for bucket in sorted(rows)]
        self.high = max((digest.high for digest in digests), default=0.0)

    def weight(self, weights: Sequence[float]) -> float:
        return fsum(map(mul, weights, self._weights))

    def mean(self, weights: Sequence[float]) -> float | None:
        weight = self.weight(weights)
        return fsum(map(mul, weights, self._totals)) / weight if weight else None

    def quantiles(self, weights: Sequence[float], shares: Sequence[float]) -> list[float | None]:
        """The least value that at least each share of the weight does not exceed; `shares` rise. None without any value."""
        weight = self.weight(weights)
        if not weight:
            return [None] * len(shares)
        found: list[float | None] = []
        wanted = iter(shares)
        share = next(wanted, None)
        for value, below in self._running(weights):
            while share is not None and below >= share * weight * (1 - 1e-12):
                found.append(min(value, self.high))
                share = next(wanted, None)
            if share is None:
                break
        return found + [self.high] * (len(shares) - len(found))

    def _running(self, weights: Sequence[float]) -> Iterator[tuple[float, float]]:
        below = 0.0
        for value, row in self._rows:
            for block, count in row:
                below += weights[block] * count
            yield value, below
