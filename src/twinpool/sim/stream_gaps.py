"""The gaps of every stream of one engine, in constant time a step.

All sequences of a batch get a token at the end of a step, so they share its gap. The engine counts its steps' gaps once; a
stream remembers the counts at its beginning, and its own are what was added by its end. The worst of them is a query on a
stack of falling maxima. Only a stream's first gap, or one across a preemption, is its own."""

from bisect import bisect_left
from typing import NamedTuple

import msgspec

_KEPT = 4096
"""Maxima; older ones than any running stream needs fall out long before, in anything but a contrived run."""


class GapLimits(NamedTuple):
    """What a gap is held against: over the first it misses the objective, over the second the stream stands still."""

    itl_s: float
    stall_s: float


class StepGaps:
    """What has been counted so far."""

    __slots__ = ("_limits", "_max_s", "_max_steps", "gaps", "over", "stalled_s", "total_s")

    def __init__(self, limits: GapLimits) -> None:
        self.gaps = 0
        self.over = 0  # the ITL limit
        self.total_s = 0.0
        self.stalled_s = 0.0
        self._limits = limits
        self._max_steps: list[int] = []  # numbers of steps, rising, and their gaps, falling
        self._max_s: list[float] = []

    def count(self, gap_s: float, first_step: int, steps: int) -> None:
        """`steps` steps from `first_step` on had this gap each."""
        self.gaps += steps
        self.total_s += gap_s * steps
        if gap_s > self._limits.itl_s:
            self.over += steps
            if gap_s > self._limits.stall_s:
                self.stalled_s += gap_s * steps
        maxima, numbers = self._max_s, self._max_steps
        while maxima and maxima[-1] <= gap_s:
            maxima.pop()
            numbers.pop()
        maxima.append(gap_s)
        numbers.append(first_step + steps - 1)
        if len(maxima) > _KEPT:
            del maxima[0], numbers[0]

    def forget(self) -> None:
        """Nobody streams: no maximum is needed any more."""
        self._max_s.clear()
        self._max_steps.clear()

    def worst_since(self, step: int) -> float:
        """The longest gap of the steps after number `step`, 0 where there was none."""
        at = bisect_left(self._max_steps, step + 1)
        return self._max_s[at] if at < len(self._max_s) else 0.0


class StreamGaps(msgspec.Struct, eq=False, gc=False):
    """One stream's: between `begin` and `pause` it shares the engine's, the others are told one by one."""

    gaps: int = 0
    over: int = 0
    total_s: float = 0.0
    stalled_s: float = 0.0
    worst_s: float = 0.0
    # what the engine had counted at the beginning, where it shares now
    _begun: bool = False
    _begun_step: int = 0
    _begun_gaps: int = 0
    _begun_over: int = 0
    _begun_total_s: float = 0.0
    _begun_stalled_s: float = 0.0

    def own(self, gap_s: float, limits: GapLimits) -> None:
        self.gaps += 1
        self.total_s += gap_s
        if gap_s > limits.itl_s:
            self.over += 1
            if gap_s > limits.stall_s:
                self.stalled_s += gap_s
        if gap_s > self.worst_s:
            self.worst_s = gap_s

    def begin(self, shared: StepGaps, step: int) -> None:
        """From the end of step number `step` on it has every gap of the engine."""
        self._begun = True
        self._begun_step = step
        self._begun_gaps = shared.gaps
        self._begun_over = shared.over
        self._begun_total_s = shared.total_s
        self._begun_stalled_s = shared.stalled_s

    def pause(self, shared: StepGaps) -> None:
        if not self._begun:
            return
        self._begun = False
        self.gaps += shared.gaps - self._begun_gaps
        self.over += shared.over - self._begun_over
        self.total_s += shared.total_s - self._begun_total_s
        self.stalled_s += shared.stalled_s - self._begun_stalled_s
        worst_s = shared.worst_since(self._begun_step)
        if worst_s > self.worst_s:
            self.worst_s = worst_s
