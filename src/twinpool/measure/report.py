"""The figures of a test, with the keys that every report has; None where there is nothing to tell.

Intervals are 95 % intervals from a bootstrap over the blocks of time: 200 resamples of whole blocks, from a fixed seed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import fsum
from operator import mul
from random import Random
from typing import Any

import msgspec

from twinpool.config import Objectives
from twinpool.measure.blocks import WARM_UP_RULE, Block, Recorder
from twinpool.measure.digest import Layers, together
from twinpool.measure.indicators import Indicators, Judged, Verdict

Interval = tuple[float, float]

RESAMPLES = 200
INTERVAL_RULE = f"95 % intervals: {RESAMPLES} bootstrap resamples of blocks of time"
_SHARES = (0.5, 0.9, 0.99)


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


class Worst(msgspec.Struct, frozen=True, kw_only=True):
    """Over the streams, the longest gap of each; seconds."""

    p50: float
    p90: float
    p99: float
    max: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of all requests, or of one length class. Rates are a second of counted time. `intervals` has, under the same keys, the
    95 % intervals (of a spread under `mean`, `p50`, …)."""

    requests: int
    failed: int
    throughput_req_s: float
    throughput_output_tok_s: float
    goodput_req_s: float
    ttft_s: Spread | None
    itl_s: Spread | None
    e2e_s: Spread | None
    itl_worst_s: Worst | None
    stalled_time_ratio: float | None
    prompt_tokens_mean: float | None
    output_tokens_mean: float | None
    cached_tokens_ratio: float | None
    without_gaps: int
    """Answers of one piece: they have no ITL, and are in none of its figures."""
    intervals: dict[str, Any] = {}


class Report(Figures, frozen=True, kw_only=True):
    """What `bench`, `compare`, `check` and `simulate` print."""

    short: Figures
    long: Figures
    measured_s: float
    failures: dict[str, int]
    utilization_mean_ratio: float | None
    utilization_at_peak_ratio: float | None
    useful_work_ratio: float | None
    verdict: Verdict
    reasons: list[str]
    objectives: Objectives
    warm_up_rule: str = WARM_UP_RULE
    interval_rule: str = INTERVAL_RULE


_SPREADS = {"ttft_s": "ttft_s", "itl_s": "itl_s", "e2e_s": "e2e_s", "itl_worst_s": "worst_s"}
_SUMMED = (
    "requests",
    "failed",
    "met",
    "finished",
    "without_gaps",
    "prompt_tokens",
    "output_tokens",
    "cached_tokens",
    "tokens_out",
    "stalled_s",
    "stream_s",
)


class Tallied:
    """Blocks of one length class, or of both: every figure as a function of how much each block weighs."""

    def __init__(self, blocks: Sequence[Sequence[Block]]) -> None:
        """`blocks[i]` are those (of each class) of the i-th stretch of time."""
        self.size = len(blocks)
        self._sums = {field: [fsum(getattr(block, field) for block in both) for both in blocks] for field in _SUMMED}
        self._sums["seconds"] = [both[0].seconds for both in blocks]
        self._layers = {
            key: Layers([together(getattr(block, of) for block in both) for both in blocks]) for key, of in _SPREADS.items()
        }

    def figures(self, weights: Sequence[float] | None = None) -> dict[str, Any]:
        """By key; the spreads as dictionaries."""
        weights = weights or [1.0] * self.size

        def total(field: str) -> float:
            return fsum(map(mul, weights, self._sums[field]))

        seconds = total("seconds")
        answered = total("requests") - total("failed")
        stream_s, prompt_tokens = total("stream_s"), total("prompt_tokens")
        return {
            "requests": round(total("requests")),
            "failed": round(total("failed")),
            "throughput_req_s": total("finished") / seconds,
            "throughput_output_tok_s": total("tokens_out") / seconds,
            "goodput_req_s": total("met") / seconds,
            **{key: self._spread(key, weights) for key in self._layers},
            "stalled_time_ratio": total("stalled_s") / stream_s if stream_s else None,
            "prompt_tokens_mean": prompt_tokens / answered if answered else None,
            "output_tokens_mean": total("output_tokens") / answered if answered else None,
            "cached_tokens_ratio": total("cached_tokens") / prompt_tokens if prompt_tokens else None,
            "without_gaps": round(total("without_gaps")),
        }

    def _spread(self, key: str, weights: Sequence[float]) -> dict[str, float] | None:
        layers = self._layers[key]
        mean = layers.mean(weights)
        if mean is None:
            return None
        p50, p90, p99 = layers.quantiles(weights, _SHARES)
        ends = {"p50": p50 or 0.0, "p90": p90 or 0.0, "p99": p99 or 0.0}
        return {**ends, "max": layers.high} if key == "itl_worst_s" else {"mean": mean, **ends}


_WITH_INTERVALS = (
    "throughput_req_s",
    "throughput_output_tok_s",
    "goodput_req_s",
    "ttft_s",
    "itl_s",
    "e2e_s",
    "itl_worst_s",
    "stalled_time_ratio",
)


def figures_of(blocks: Sequence[Sequence[Block]], rng: Random) -> Figures:
    tallied = Tallied(blocks)
    drawn = [tallied.figures(weights) for weights in resamples(tallied.size, rng)]
    intervals = {key: _interval([of_one[key] for of_one in drawn]) for key in _WITH_INTERVALS}
    found = {key: value for key, value in intervals.items() if value is not None}
    return msgspec.convert({**tallied.figures(), "intervals": found}, Figures)


def report_of(recorders: Sequence[Recorder], indicators: Indicators, judged: Judged, rng: Random) -> Report:
    """Of one test, or of the rounds of one: their counted times are added up."""
    short = [block for recorder in recorders for block in recorder.short]
    long = [block for recorder in recorders for block in recorder.long]
    both = figures_of(list(zip(short, long, strict=True)), rng)
    failures: dict[str, int] = {}
    for recorder in recorders:
        for failure, count in recorder.failures.items():
            failures[failure] = failures.get(failure, 0) + count
    return Report(
        **{field: getattr(both, field) for field in both.__struct_fields__},
        short=figures_of([[block] for block in short], rng),
        long=figures_of([[block] for block in long], rng),
        measured_s=fsum(recorder.window.seconds for recorder in recorders),
        failures=failures,
        utilization_mean_ratio=indicators.utilization_mean_ratio,
        utilization_at_peak_ratio=indicators.utilization_at_peak_ratio,
        useful_work_ratio=indicators.useful_work_ratio,
        verdict=judged.verdict,
        reasons=list(judged.reasons),
        objectives=recorders[0].objectives,
    )


def ratio_intervals(
    tallied: Tallied, base: Tallied, figures: Mapping[str, Callable[[dict[str, Any]], float | None]], rng: Random
) -> dict[str, tuple[float | None, Interval | None]]:
    """How each figure compares with the base's, and the 95 % interval of that. Both have the same stretches of the same
    traffic, so each resample takes the same stretches of both."""
    if tallied.size != base.size:
        raise ValueError("what is compared has the same blocks")
    pairs = [(tallied.figures(weights), base.figures(weights)) for weights in resamples(tallied.size, rng)]
    whole, whole_base = tallied.figures(), base.figures()
    return {
        key: (
            _ratio(figure(whole), figure(whole_base)),
            _ends([_ratio(figure(found), figure(against)) for found, against in pairs]),
        )
        for key, figure in figures.items()
    }


def resamples(blocks: int, rng: Random) -> Iterable[list[float]]:
    """How often each block is drawn when as many are drawn as there are."""
    for _ in range(RESAMPLES):
        weights = [0.0] * blocks
        for _ in range(blocks):
            weights[rng.randrange(blocks)] += 1
        yield weights


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _interval(values: Sequence[Any]) -> Any:
    """Of numbers, or of dictionaries of numbers; None without values."""
    known = [value for value in values if value is not None]
    if not known or not isinstance(known[0], dict):
        return _ends(known)
    return {key: _ends([value[key] for value in known]) for key in known[0] if key != "max"}


def _ends(values: Sequence[float | None]) -> Interval | None:
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    last = len(known) - 1
    return known[round(0.025 * last)], known[round(0.975 * last)]
