"""The indicators of a service that runs: over the last hour, from what its gateway sees.

A worker is busy while it has a leg; the busy time is kept by ten-second windows, beside the load that was offered in each. What
a token costs at full batches is learnt from the requests themselves: as little as it was seen to cost here (the cheapest
twentieth), so the useful work compares the service with its own best moments.
"""

from collections import Counter, deque
from collections.abc import Mapping
from math import fsum

import msgspec

from twinpool.measure.digest import Digest, Layers
from twinpool.measure.indicators import (
    WINDOW_S,
    Indicators,
    Judged,
    Limits,
    Load,
    UnitCosts,
    judge,
    use_of,
    useful_work_ratio,
)

WINDOWS_KEPT = 360
CHEAP_SHARE = 0.05
FEWEST_TO_LEARN = 20
"""Requests, before a cost is believed."""

SMALLEST_PROMPT_TOKENS = 64
"""Shorter ones are all overhead."""


class Window(msgspec.Struct):
    """Ten seconds. `busy_s` is of all workers together, `offered` in tokens, `pools` how many workers had which role at its
    end. Requests count in the window in which they ended."""

    workers: int = 0
    pools: dict[str, int] = {}
    offered: float = 0.0
    busy_s: float = 0.0
    long_answered: int = 0
    long_failed: int = 0
    long_ttft_s: float = 0.0
    short_answered: int = 0
    short_ttft_s: float = 0.0
    worst_gap_s: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    waiting_most: int = 0
    ended: Counter[str] = msgspec.field(default_factory=Counter)

    @property
    def busy_ratio(self) -> float | None:
        """Of a whole window. None without a worker."""
        return self.busy_s / (self.workers * WINDOW_S) if self.workers else None


class _Busy(msgspec.Struct):
    """One worker's. `total_s` up to `since`, which is when its window was last brought up to date."""

    legs: int = 0
    since: float = 0.0
    total_s: float = 0.0
    window_s: float = 0.0
    last_ratio: float = 0.0


class LiveIndicators:
    """Told of legs, arrivals and ends, at rising times in seconds on one clock; asked now and then."""

    def __init__(self, limits: Limits, began: float) -> None:
        self._limits = limits
        self._ends_at = began + WINDOW_S
        self._now = Window()
        self._past: deque[Window] = deque(maxlen=WINDOWS_KEPT)
        self._busy: dict[str, _Busy] = {}
        self._up: dict[str, str] = {}
        self._waiting = 0
        self._prefill_s_per_token, self._decode_s_per_token = Digest(), Digest()
        self._answers = self._answer_tokens = 0

    def leg_began(self, at: float, worker: str) -> None:
        self._roll(at)
        busy = self._busy_of(worker, at)
        self._settle(busy, at)
        busy.legs += 1

    def leg_ended(self, at: float, worker: str) -> None:
        self._roll(at)
        busy = self._busy_of(worker, at)
        self._settle(busy, at)
        busy.legs = max(0, busy.legs - 1)

    def arrived(self, at: float, prompt_tokens: float) -> None:
        """A request of about so many tokens; its answer is taken to be as long as those before were."""
        self._roll(at)
        self._now.offered += prompt_tokens + (self._answer_tokens / self._answers if self._answers else 0.0)

    def waiting_are(self, at: float, count: int) -> None:
        """So many requests wait, from now on."""
        self._roll(at)
        self._waiting = count
        self._now.waiting_most = max(self._now.waiting_most, count)

    def ended(
        self,
        at: float,
        *,
        is_long: bool,
        is_failed: bool,
        ttft_s: float | None,
        prompt_tokens: int = 0,
        output_tokens: int = 0,
        worst_gap_s: float | None = None,
        outcome: str = "ok",
    ) -> None:
        """A client's request is over. Tokens are those of whole answers, computed ones alone."""
        self._roll(at)
        now = self._now
        now.ended[outcome] += 1
        now.prompt_tokens += prompt_tokens
        now.output_tokens += output_tokens
        if output_tokens:
            self._answers += 1
            self._answer_tokens += output_tokens
        if is_long and is_failed:
            now.long_failed += 1
        elif is_long and ttft_s is not None:
            now.long_answered += 1
            now.long_ttft_s += ttft_s
        elif ttft_s is not None:
            now.short_answered += 1
            now.short_ttft_s += ttft_s
        if worst_gap_s is not None:
            now.worst_gap_s = max(worst_gap_s, now.worst_gap_s or 0.0)

    def cost_seen(self, *, prefill: tuple[float, int] | None = None, decode: tuple[float, int, int] | None = None) -> None:
        """What a request took: (seconds, tokens) of its prompt, and (seconds, tokens, sequences that ran beside and with it) of
        its answer."""
        if prefill is not None and prefill[1] >= SMALLEST_PROMPT_TOKENS:
            self._prefill_s_per_token.add(prefill[0] / prefill[1])
        if decode is not None and decode[1] > 1:
            self._decode_s_per_token.add(decode[0] / decode[1] / max(1, decode[2]))

    def legs_of(self, worker: str) -> int:
        busy = self._busy.get(worker)
        return busy.legs if busy is not None else 0

    def workers_are(self, at: float, workers: Mapping[str, str]) -> None:
        """Who is up now, and in which role. What an earlier one did stays counted; what is forgotten is only its own total."""
        if self._up:
            self._roll(at)
        self._up = dict(workers)
        for worker in [name for name, busy in self._busy.items() if name not in self._up and not busy.legs]:
            del self._busy[worker]

    def busy(self, at: float) -> dict[str, tuple[float, float]]:
        """Of each worker that is up: seconds busy so far, and the share of the last whole window."""
        self._roll(at)
        found = {}
        for worker in sorted(self._up):
            busy = self._busy_of(worker, at)
            self._settle(busy, at)
            found[worker] = (busy.total_s, busy.last_ratio)
        return found

    def read(self, at: float) -> tuple[Indicators, Judged]:
        """The last hour's."""
        self._roll(at)
        windows = [Load(window.offered, window.busy_ratio) for window in self._past]
        mean, peak, count = use_of(windows)
        answered = sum(window.long_answered for window in (*self._past, self._now))
        ttft_s = fsum(window.long_ttft_s for window in (*self._past, self._now))
        seen = Indicators(
            ttft_long_s=ttft_s / answered if answered else None,
            long_requests=answered,
            long_failed=sum(window.long_failed for window in (*self._past, self._now)),
            utilization_mean_ratio=mean,
            utilization_at_peak_ratio=peak,
            windows=count,
            useful_work_ratio=self._useful_work(),
            unobserved="no whole window of ten seconds with a worker yet",
        )
        return seen, judge(seen, self._limits)

    def windows(self, at: float, count: int) -> tuple[list[Window], Window, float]:
        """The last whole windows, the oldest first, the one that is not over, and how many seconds of that have passed."""
        self._roll(at)
        now = msgspec.structs.replace(self._now, pools=Counter(self._up.values()))
        return list(self._past)[-count:], now, WINDOW_S - (self._ends_at - at)

    def costs(self) -> UnitCosts | None:
        """None until enough was seen."""
        found = []
        for digest in (self._prefill_s_per_token, self._decode_s_per_token):
            if digest.weight < FEWEST_TO_LEARN:
                return None
            found.append(Layers([digest]).quantiles([1.0], (CHEAP_SHARE,))[0] or 0.0)
        return UnitCosts(prefill_s_per_token=found[0], decode_s_per_token=found[1])

    def _useful_work(self) -> float | None:
        costs = self.costs()
        worker_s = sum(window.workers for window in self._past) * WINDOW_S
        if costs is None or not worker_s:
            return None
        return useful_work_ratio(
            costs,
            prompt_tokens=sum(window.prompt_tokens for window in self._past),
            output_tokens=sum(window.output_tokens for window in self._past),
            workers=1,
            seconds=worker_s,
        )

    # Time

    def _roll(self, at: float) -> None:
        """Close the windows that are over. After a long silence only as many as are kept."""
        silent = int((at - self._ends_at) / WINDOW_S) - WINDOWS_KEPT
        if silent > 0:
            for busy in self._busy.values():
                if busy.legs:
                    busy.total_s += silent * WINDOW_S
                    busy.since += silent * WINDOW_S
            self._ends_at += silent * WINDOW_S
        while at >= self._ends_at:
            self._close_window()

    def _close_window(self) -> None:
        for busy in self._busy.values():
            self._settle(busy, self._ends_at)
            self._now.busy_s += busy.window_s
            busy.last_ratio = min(1.0, busy.window_s / WINDOW_S)
            busy.window_s = 0.0
        self._now.workers = len(self._up.keys() | {worker for worker, busy in self._busy.items() if busy.legs})
        self._now.pools = Counter(self._up.values())
        self._past.append(self._now)
        self._now = Window(waiting_most=self._waiting)
        self._ends_at += WINDOW_S

    def _busy_of(self, worker: str, at: float) -> _Busy:
        busy = self._busy.get(worker)
        if busy is None:
            busy = self._busy[worker] = _Busy(since=at)
        return busy

    @staticmethod
    def _settle(busy: _Busy, at: float) -> None:
        """Count what it was busy up to `at`."""
        if busy.legs and at > busy.since:
            busy.total_s += at - busy.since
            busy.window_s += at - busy.since
        busy.since = max(at, busy.since)
