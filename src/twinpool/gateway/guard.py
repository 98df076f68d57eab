"""Whether what a decode worker writes from a handle may be believed.

A prefill worker keeps the KV until its lease ends. What was not read by then is freed, its memory is given to other prompts,
and vLLM tells nobody: the decode worker answers 200, fluently, from whatever lies there now. So

    first token before `trusted_until`  the lease was still running when the KV was read: safe
    later                               held back until P shows that since it was asked no lease ran out and no read came late
    P was away in the meantime          the same, whatever the time: another engine may answer at its address

`Histories` remembers what the probes of each worker counted and when; `Trust` is the question about one leg.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import NamedTuple

from twinpool.engines.metrics import EngineMetrics
from twinpool.engines.probe import ProbeError

Scrape = Callable[[str], Awaitable[EngineMetrics]]
"""A worker's counts now; raises `ProbeError` where they cannot be had."""

_CHANGES_KEPT = 1000  # of one worker: a change is a lease that ran out, which is rare
_TRIES = 2


class Counted(NamedTuple):
    """What tells whether a lease ran out; None where the engine does not count that."""

    incarnation: str
    expired: int | None
    late: int | None

    @property
    def is_known(self) -> bool:
        return self.expired is not None and self.late is not None


class _Change(NamedTuple):
    at: float  # from then on, until the next
    counted: Counted


class Histories:
    """Of each worker, what it counted when, and when it was last out of sight."""

    def __init__(self) -> None:
        self._changes: dict[str, deque[_Change]] = {}
        self._away: dict[str, float] = {}

    def note(self, worker: str, at: float, metrics: EngineMetrics) -> None:
        """A scrape that was answered at that time."""
        counted = Counted(metrics.incarnation, metrics.expired_handles, metrics.late_notifications)
        changes = self._changes.setdefault(worker, deque(maxlen=_CHANGES_KEPT))
        if not changes or changes[-1].counted != counted:
            changes.append(_Change(at, counted))

    def was_away(self, worker: str, at: float) -> None:
        """It closed a connection that rested, or did not answer: it may have restarted."""
        self._away[worker] = at

    def forget(self, worker: str) -> None:
        self._changes.pop(worker, None)
        self._away.pop(worker, None)

    def is_seen_since(self, worker: str, at: float) -> bool:
        return self._away.get(worker, 0.0) < at

    def counted_at(self, worker: str, at: float) -> Counted | None:
        """As of the last scrape before that time; None where there was none."""
        for change in reversed(self._changes.get(worker, ())):
            if change.at <= at:
                return change.counted
        return None


class Trust:
    """The question about one decode leg whose KV lay on the worker `prefill`. Its lease cannot have begun before `asked`, when
    P was sent the prompt; it may have ended before P's answer came through, on a busy machine."""

    def __init__(self, guard: "Guard", prefill: str, asked: float, trusted_until: float) -> None:
        self._guard = guard
        self._prefill = prefill
        self._asked = asked
        self._trusted_until = trusted_until

    def is_safe(self, first_token: float) -> bool:
        """It was read in time, whatever anybody counts."""
        return first_token < self._trusted_until and self._guard.histories.is_seen_since(self._prefill, self._asked)

    def find_out(self, first_token: float, then: Callable[[bool], None]) -> None:
        """Ask P, and call `then` with whether the token may be believed."""
        self._guard.start(self._prefill, self._asked, then)


class Guard:
    """Asks prefill workers about leases that may have run out; one task a question."""

    def __init__(self, histories: Histories, scrape: Scrape) -> None:
        self.histories = histories
        self._scrape = scrape
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, prefill: str, asked: float, trusted_until: float) -> Trust:
        return Trust(self, prefill, asked, trusted_until)

    def start(self, prefill: str, asked: float, then: Callable[[bool], None]) -> None:
        task = asyncio.get_running_loop().create_task(self._find_out(prefill, asked, then))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _find_out(self, prefill: str, asked: float, then: Callable[[bool], None]) -> None:
        before = self.histories.counted_at(prefill, asked)
        is_same = before is not None and before.is_known and await self._counts_now(prefill) == before
        # an engine that tells no life of it from another counts the same after a restart as before: nothing
        is_told = before is not None and before.incarnation != ""
        then(is_same and (is_told or self.histories.is_seen_since(prefill, asked)))

    async def _counts_now(self, worker: str) -> Counted | None:
        for _ in range(_TRIES):
            try:
                metrics = await self._scrape(worker)
            except (ProbeError, KeyError):
                continue
            self.histories.note(worker, monotonic(), metrics)
            return Counted(metrics.incarnation, metrics.expired_handles, metrics.late_notifications)
        return None
