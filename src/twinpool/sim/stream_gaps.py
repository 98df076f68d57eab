"""The gaps of every stream of one engine, in constant time a step.

All sequences of a batch get a token at the end of a step, so they share its gap. The engine counts its steps' gaps once, by bucket;
a stream remembers the counts at its beginning, and its own gaps are what was added by its end. The worst of them is a query on
a stack of falling maxima. Only a stream's first gap, or one across a preemption, is its own.
"""

from bisect import bisect_left

from twinpool.measure.gaps import BOUNDS_S, Gaps

_KEPT = 4096
"""Maxima; older ones than any running stream needs fall out long before in anything but a contrived run."""


class StepGaps:
    """What has been counted so far."""

    __slots__ = ("_max_s", "_max_steps", "_stalled_from_s", "counts", "stalled_s", "total_s")

    def __init__(self, stalled_from_s: float) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0
        self.stalled_s = 0.0  # inside gaps over `stalled_from_s`
        self._stalled_from_s = stalled_from_s
        self._max_steps: list[int] = []  # numbers of steps, rising, and their gaps, falling
        self._max_s: list[float] = []

    def count(self, gap_s: float, first_step: int, steps: int) -> None:
        """`steps` steps from `first_step` on had this gap each."""
        self.counts[bisect_left(BOUNDS_S, gap_s)] += steps
        self.total_s += gap_s * steps
        if gap_s > self._stalled_from_s:
            self.stalled_s += gap_s * steps
        maxima = self._max_s
        while maxima and maxima[-1] <= gap_s:
            maxima.pop()
            self._max_steps.pop()
        maxima.append(gap_s)
        self._max_steps.append(first_step + steps - 1)
        if len(maxima) > _KEPT:
            del maxima[0], self._max_steps[0]

    def forget(self) -> None:
        """Nobody streams: no maximum is needed any more."""
        self._max_s.clear()
        self._max_steps.clear()

    def worst_since(self, step: int) -> float:
        """The longest gap of the steps after number `step`, 0 where there was none."""
        at = bisect_left(self._max_steps, step + 1)
        return self._max_s[at] if at < len(self._max_s) else 0.0


class StreamGaps:
    """One stream's: between `begin` and `pause` it shares the engine's, the others are told one by one."""

    __slots__ = ("_begun", "_begun_stalled_s", "_begun_step", "_begun_total_s", "counts", "stalled_s", "total_s", "worst_s")

    def __init__(self) -> None:
        self.counts: list[int] | None = None  # None: no gap yet
        self.total_s = 0.0
        self.worst_s = 0.0
        self.stalled_s = 0.0
        self._begun: list[int] | None = None

    def own(self, gap_s: float, stalled_from_s: float) -> None:
        if self.counts is None:
            self.counts = [0] * (len(BOUNDS_S) + 1)
        self.counts[bisect_left(BOUNDS_S, gap_s)] += 1
        self.total_s += gap_s
        if gap_s > stalled_from_s:
            self.stalled_s += gap_s
        if gap_s > self.worst_s:
            self.worst_s = gap_s

    def begin(self, shared: StepGaps, step: int) -> None:
        """From the end of step number `step` on it has every gap of the engine."""
        self._begun = shared.counts[:]
        self._begun_step = step
        self._begun_total_s = shared.total_s
        self._begun_stalled_s = shared.stalled_s

    def pause(self, shared: StepGaps) -> None:
        begun = self._begun
        if begun is None:
            return
        self._begun = None
        before = self.counts
        if before is None:
            self.counts = [now - then for now, then in zip(shared.counts, begun, strict=True)]
        else:
            self.counts = [own + now - then for own, now, then in zip(before, shared.counts, begun, strict=True)]
        self.total_s += shared.total_s - self._begun_total_s
        self.stalled_s += shared.stalled_s - self._begun_stalled_s
        worst_s = shared.worst_since(self._begun_step)
        if worst_s > self.worst_s:
            self.worst_s = worst_s

    def measured(self, last_token_at: float) -> Gaps:
        """As `measure` knows them."""
        gaps = Gaps(last_token_at)
        if self.counts is not None:
            gaps.counts = self.counts
        gaps.total_s = self.total_s
        gaps.worst_s = self.worst_s
        return gaps
