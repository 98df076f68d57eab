"""The clock: a heap of what will happen, and the order of what happens at the same moment.

At one moment first the engines' steps end, then legs and handoffs arrive, then faults strike, then probes look, then clients
come and leave, then the controller's own timer rings: an effect is seen before anybody decides anew. Last, engines that were
idle begin with all that has come. Within a rank it goes by the order of asking. So a run depends on nothing but its scenario
and its seed.
"""

from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush
from typing import Any


class Rank(IntEnum):
    """Who comes first at the same moment."""

    STEP = 0
    HANDOFF = 1
    FAULT = 2
    PROBE = 3
    CLIENT = 4
    TIMER = 5
    BEGIN = 6


Call = Callable[[float, Any], None]
"""What is called when its time has come: with the time, and what was given along."""


class Loop:
    """`at` is now, in seconds; it never goes back."""

    __slots__ = ("_heap", "_is_stopped", "_order", "at")

    def __init__(self) -> None:
        self.at = 0.0
        self._is_stopped = False
        self._heap: list[tuple[float, int, int, Call, Any]] = []
        self._order = 0

    def call_at(self, at: float, rank: int, call: Call, what: Any = None) -> None:
        """Nothing is ever taken back: whoever changes their mind ignores the call."""
        self._order += 1
        if at < self.at:
            at = self.at
        heappush(self._heap, (at, rank, self._order, call, what))

    def run(self) -> None:
        """Until nothing is left to happen, or `stop` is called."""
        heap = self._heap
        while heap and not self._is_stopped:
            self.at, _, _, call, what = heappop(heap)
            call(self.at, what)

    def stop(self) -> None:
        """What happens now is the last."""
        self._is_stopped = True

    def __len__(self) -> int:
        return len(self._heap)
