"""The last quarter of an hour, for the charts of the page: what the indicators keep anyway, a column a figure."""

from collections.abc import Callable, Sequence
from typing import Any

from twinpool.core.model import Role
from twinpool.measure.indicators import WINDOW_S
from twinpool.measure.live import Window


def describe_history(past: Sequence[Window], now: Window, passed_s: float) -> dict[str, Any]:
    """The answer of `GET /admin/history`. Each list has a value for every whole window of ten seconds, the oldest first, and
    one more for the window that is not over, of which `passed_s` have gone by. None where nothing was seen: use is of whole
    windows alone."""
    windows = [*past, now]

    def column(value: Callable[[Window], Any]) -> list[Any]:
        return [value(window) for window in windows]

    return {
        "window_s": WINDOW_S,
        "passed_s": round(passed_s, 3),
        "workers": {str(role): [window.pools.get(role, 0) for window in windows] for role in Role},
        "ttft_short_s": column(lambda window: _mean(window.short_ttft_s, window.short_answered)),
        "ttft_long_s": column(lambda window: _mean(window.long_ttft_s, window.long_answered)),
        "worst_gap_s": column(lambda window: _rounded(window.worst_gap_s)),
        "utilization_ratio": [*(_rounded(window.busy_ratio) for window in past), None],
        "offered_tokens": column(lambda window: round(window.offered)),
        "prompt_tokens": column(lambda window: window.prompt_tokens),
        "output_tokens": column(lambda window: window.output_tokens),
        "waiting_most": column(lambda window: window.waiting_most),
        "ended": {outcome: [window.ended[outcome] for window in windows] for outcome in ("ok", "failed", "refused")},
    }


def _mean(total: float, count: int) -> float | None:
    return _rounded(total / count) if count else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
