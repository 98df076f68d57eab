"""The two indicators by which any service can be judged, and the verdict.

1. TTFT of long requests (mean): over its limit, the service is not fit.
2. Use at the peak: the mean use of the workers in the busiest tenth of ten-second windows, by offered load. Under its floor,
   capacity stands idle just when it is wanted: the service is not fit.

Use is the share of time that an engine computes. An engine that does both prefill and decode is busy at half its load already,
so beside it stands the useful work: what the finished tokens would cost at full batches, over workers times time.
"""

from collections.abc import Iterable
from math import ceil, fsum
from typing import Literal

import msgspec

WINDOW_S = 10.0
PEAK_SHARE = 0.1
FEWEST_WINDOWS = 30
FEWEST_LONG = 20
MOST_FAILED_SHARE = 0.05
"""Of the long requests: a mean over those that were answered says nothing when more than these were not."""

Verdict = Literal["pass", "fail", "unknown"]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What is fit."""

    ttft_long_s: float = 1.3
    utilization_floor_ratio: float = 0.85


class Load(msgspec.Struct, frozen=True):
    """One ten-second window: what was offered (tokens, or seconds of work: only the order matters) and the share of it that the
    workers computed; None where nobody could tell."""

    offered: float
    busy_ratio: float | None


class Indicators(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen; None for what could not be."""

    ttft_long_s: float | None = None
    ttft_long_interval_s: tuple[float, float] | None = None
    long_requests: int = 0
    """That were answered."""
    long_failed: int = 0
    utilization_mean_ratio: float | None = None
    utilization_at_peak_ratio: float | None = None
    windows: int = 0
    useful_work_ratio: float | None = None
    unobserved: str = "no metrics of the workers"
    """Why there is no use, where there is none."""


class Judged(msgspec.Struct, frozen=True):
    """`reasons` are sentences, the indicators' in their order; `verdicts` those of each."""

    verdict: Verdict
    reasons: tuple[str, ...]
    verdicts: tuple[Verdict, ...] = ()


class UnitCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one worker at full batches."""

    prefill_s_per_token: float
    decode_s_per_token: float


def use_of(windows: Iterable[Load]) -> tuple[float | None, float | None, int]:
    """Mean use, use at the peak, and of how many windows; of windows whose use is known. None without any; no peak from fewer
    windows than `FEWEST_WINDOWS`."""
    known = [(window.offered, window.busy_ratio) for window in windows if window.busy_ratio is not None]
    if not known:
        return None, None, 0
    mean = fsum(busy for _, busy in known) / len(known)
    if len(known) < FEWEST_WINDOWS:
        return mean, None, len(known)
    known.sort(key=lambda window: -window[0])
    peak = known[: ceil(PEAK_SHARE * len(known))]
    return mean, fsum(busy for _, busy in peak) / len(peak), len(known)


def useful_work_ratio(
    costs: UnitCosts, *, prompt_tokens: float, output_tokens: float, workers: int, seconds: float
) -> float | None:
    """`prompt_tokens` are those computed, once each, wherever their KV went afterwards."""
    if workers < 1 or seconds <= 0:
        return None
    return (costs.prefill_s_per_token * prompt_tokens + costs.decode_s_per_token * output_tokens) / (workers * seconds)


def judge(seen: Indicators, limits: Limits) -> Judged:
    """`fail` when one indicator is not fit, `pass` when both are, `unknown` else."""
    results = (_judge_ttft(seen, limits), _judge_use(seen, limits))
    verdicts = tuple(verdict for verdict, _ in results)
    reasons = tuple(reason for _, reason in results)
    if "fail" in verdicts:
        return Judged("fail", reasons, verdicts)
    return Judged("pass" if verdicts == ("pass", "pass") else "unknown", reasons, verdicts)


def _judge_ttft(seen: Indicators, limits: Limits) -> tuple[Verdict, str]:
    asked = seen.long_requests + seen.long_failed
    if asked >= FEWEST_LONG and seen.long_failed > MOST_FAILED_SHARE * asked:
        return "fail", f"{seen.long_failed} of {asked} long requests got no whole answer"
    if seen.ttft_long_s is None or seen.long_requests < FEWEST_LONG:
        plural = " was" if seen.long_requests == 1 else "s were"
        return "unknown", f"{seen.long_requests} long request{plural} answered, {FEWEST_LONG} are needed to judge their TTFT"
    low, high = seen.ttft_long_interval_s or (None, None)
    range_s = f" (95 %: {low:.2f} to {high:.2f})" if low is not None and high is not None else ""
    said = f"TTFT of {seen.long_requests} long requests: mean {seen.ttft_long_s:.2f} s{range_s}"
    if seen.ttft_long_s > limits.ttft_long_s:
        return "fail", f"{said}, over the limit of {limits.ttft_long_s:g} s"
    return "pass", f"{said}, within the limit of {limits.ttft_long_s:g} s"


def _judge_use(seen: Indicators, limits: Limits) -> tuple[Verdict, str]:
    if seen.utilization_mean_ratio is None:
        return "unknown", f"use at the peak is not observable: {seen.unobserved}"
    mean = f"mean use {seen.utilization_mean_ratio:.0%}"
    if seen.utilization_at_peak_ratio is None:
        needed = f"{FEWEST_WINDOWS} are needed for the peak"
        return "unknown", f"{mean} over {seen.windows} window{'s' * (seen.windows != 1)} of {WINDOW_S:g} s, {needed}"
    said = f"use at the peak {seen.utilization_at_peak_ratio:.0%} ({mean}, {seen.windows} windows)"
    if seen.utilization_at_peak_ratio < limits.utilization_floor_ratio:
        return "fail", f"{said}, under the floor of {limits.utilization_floor_ratio:.0%}"
    return "pass", f"{said}, at or over the floor of {limits.utilization_floor_ratio:.0%}"
