"""The gaps between the pieces of one stream: counted as they pass, kept in constant memory.

A pooled percentile of gaps does not see a stall: one gap of 20 s among a thousand of 40 ms leaves the p99 where it was. So
each stream also remembers its worst gap.
"""

from bisect import bisect_left

BOUNDS_S = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the buckets; dense around the usual objectives of 25 and 50 ms."""


class Gaps:
    """Counts of gaps by bucket (one more than `BOUNDS_S`, the last without bound), their sum and the worst, seconds."""

    __slots__ = ("counts", "last", "total_s", "worst_s")

    def __init__(self, first: float) -> None:
        self.last = first
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0
        self.worst_s = 0.0

    def stamp(self, at: float) -> None:
        """A piece of the stream came at `at`."""
        gap = at - self.last
        self.last = at
        self.counts[bisect_left(BOUNDS_S, gap)] += 1
        self.total_s += gap
        if gap > self.worst_s:
            self.worst_s = gap
