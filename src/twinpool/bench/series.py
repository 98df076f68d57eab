"""How a test went over time, in so few points that a page can draw them."""

from collections.abc import Sequence
from typing import Any

from twinpool.measure.sample import Sample

MOST_BINS = 120
MOST_POINTS = 2000


class Series:
    """Samples into bins of time, and some of their TTFTs as points (every one, until there are too many: then every second,
    every fourth …, so that none of the time is left out)."""

    def __init__(self, duration_s: float) -> None:
        self.bin_s = max(0.5, duration_s / MOST_BINS)
        bins = max(1, round(duration_s / self.bin_s))
        self.offered = {False: [0] * bins, True: [0] * bins}
        self.failed = [0] * bins
        self.worst_gap_s: list[float | None] = [None] * bins
        self._begun = [0] * (bins + 1)
        self._points: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        self._stride = {False: 1, True: 1}
        self._seen = {False: 0, True: 0}

    def add(self, sample: Sample) -> None:
        bins = len(self.failed)
        at = min(int(sample.meant_at_s / self.bin_s), bins - 1)
        self.offered[sample.is_long][at] += 1
        if sample.failure is not None:
            self.failed[at] += 1
            return
        self._begun[at] += 1
        if sample.e2e_s is not None:
            self._begun[min(int((sample.meant_at_s + sample.e2e_s) / self.bin_s) + 1, bins)] -= 1
        if sample.ttft_s is not None:
            self._point(sample.is_long, sample.meant_at_s, sample.ttft_s)
            moment_s = sample.meant_at_s + sample.ttft_s
            for gap_s in sample.gaps_s:
                moment_s += gap_s
                self._gap(moment_s, gap_s)

    def _gap(self, at_s: float, gap_s: float) -> None:
        at = int(at_s / self.bin_s)
        if at < len(self.worst_gap_s):
            worst = self.worst_gap_s[at]
            self.worst_gap_s[at] = gap_s if worst is None else max(worst, gap_s)

    def _point(self, is_long: bool, at_s: float, ttft_s: float) -> None:
        points = self._points[is_long]
        if self._seen[is_long] % self._stride[is_long] == 0:
            points.append((at_s, ttft_s))
            if len(points) > MOST_POINTS:
                del points[1::2]
                self._stride[is_long] *= 2
        self._seen[is_long] += 1

    def drawn(self) -> dict[str, Any]:
        """For a page: seconds and what was then."""
        in_flight, running = [], 0
        for change in self._begun[:-1]:
            running += change
            in_flight.append(running)
        return {
            "bin_s": self.bin_s,
            "at_s": [round((index + 0.5) * self.bin_s, 3) for index in range(len(self.failed))],
            "ttft_short": _rounded(self._points[False]),
            "ttft_long": _rounded(self._points[True]),
            "worst_gap_s": self.worst_gap_s,
            "offered_short_req_s": [count / self.bin_s for count in self.offered[False]],
            "offered_long_req_s": [count / self.bin_s for count in self.offered[True]],
            "failed": self.failed,
            "in_flight": in_flight,
        }


def _rounded(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(round(at_s, 3), round(value, 5)) for at_s, value in sorted(points)]
