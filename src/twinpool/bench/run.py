"""One test of one service: a load, its report, and what belongs beside it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec

from twinpool.bench.load import Generator, Load, Progress
from twinpool.bench.prepare import Prepared
from twinpool.bench.series import Series
from twinpool.bench.use import Watch
from twinpool.config import Objectives
from twinpool.http1 import Pool
from twinpool.measure.blocks import Recorder, Window
from twinpool.measure.indicators import Indicators, Limits, judge, use_of
from twinpool.measure.indicators import Load as WindowLoad
from twinpool.measure.report import Report, figures_of, report_of
from twinpool.measure.sample import Sample
from twinpool.workload.offered import Offered

CACHED_SHARE = 0.05
"""Of prompt tokens: with a fresh nonce in front only a template can be cached, and more flatters the figures."""

_SHOW_S = 0.1


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """What was offered, in words and figures that let somebody offer it again."""

    mix: str
    lengths: str
    shape: str
    rate: float | None
    duration_s: float
    seed: int
    scale_lengths: float
    long_prompt_tokens: int
    """The border of the class before scaling."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a load showed."""

    recorder: Recorder
    series: Series
    generator: Generator
    windows: list[WindowLoad]
    unseen: str | None = None
    """Why there is no use, where it was watched and there is none."""


async def offer(
    pool: Pool,
    prepared: Prepared,
    requests: Iterable[Offered],
    *,
    duration_s: float,
    timeout_s: float,
    objectives: Objectives,
    watch: "Callable[[Callable[[], float]], Watch] | None" = None,
    show: Callable[[Progress], None] | None = None,
    on_sample: Callable[[Sample], None] | None = None,
    window: Window | None = None,
    long_tokens: float | None = None,
) -> Measured:
    """Send the requests and count what comes back; `show` is told several times a second. A prompt of which the engine counts
    more than `long_tokens` is long, whatever it was meant to be."""
    recorder = Recorder(window or Window.of(duration_s), objectives)
    series = Series(duration_s)
    offered_tokens = 0

    def sent(request: Offered) -> None:
        nonlocal offered_tokens
        offered_tokens += request.prompt_tokens + request.output_tokens

    def take(sample: Sample) -> None:
        recorder.add(sample)
        series.add(sample)
        if on_sample is not None:
            on_sample(sample)

    load = Load(
        pool,
        prepared.target,
        prepared.prompts,
        duration_s=duration_s,
        timeout_s=timeout_s,
        on_sample=take,
        fields=prepared.fields,
        on_sent=sent,
        long_tokens=long_tokens,
    )
    watching = watch(lambda: offered_tokens) if watch is not None else None
    async with beside(watching.run if watching else None), beside(_showing(load, show) if show else None):
        await load.run(requests)
    if watching is None:
        return Measured(recorder, series, load.generator, [])
    return Measured(recorder, series, load.generator, watching.windows, watching.why_unseen())


@contextlib.asynccontextmanager
async def beside(run: "Callable[[], Any] | None") -> AsyncIterator[None]:
    """Something that runs as long as the block does."""
    if run is None:
        yield
        return
    task = asyncio.ensure_future(run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _showing(load: Load, show: Callable[[Progress], None]) -> Callable[[], Any]:
    async def run() -> None:
        try:
            while True:
                load.tick()
                show(load.progress)
                await asyncio.sleep(_SHOW_S)
        finally:
            load.tick()
            show(load.progress)

    return run


def indicators_of(rounds: Sequence[Measured], *, unobserved: str, rng: Random) -> Indicators:
    """The two indicators, as far as they were seen; `unobserved` is why there is no use where nobody watched."""
    long = figures_of([[block] for tested in rounds for block in tested.recorder.long], rng)
    mean, peak, windows = use_of(load for tested in rounds for load in tested.windows)
    interval = long.intervals.get("ttft_s", {}).get("mean")
    return Indicators(
        ttft_long_s=long.ttft_s.mean if long.ttft_s is not None else None,
        ttft_long_interval_s=interval,
        long_requests=long.requests - long.failed,
        long_failed=long.failed,
        utilization_mean_ratio=mean,
        utilization_at_peak_ratio=peak,
        windows=windows,
        unobserved=next((tested.unseen for tested in rounds if tested.unseen), unobserved),
    )


def report(rounds: Sequence[Measured], limits: Limits, *, unobserved: str, seed: int) -> Report:
    """Of one load, or of several rounds of one."""
    seen = indicators_of(rounds, unobserved=unobserved, rng=Random(seed))  # noqa: S311
    return report_of([tested.recorder for tested in rounds], seen, judge(seen, limits), Random(seed))  # noqa: S311


def warnings_of(found: Report, generator: Generator, *, shares_prefixes: bool) -> list[str]:
    """What a reader must know before believing the figures."""
    said = []
    if generator.complaint is not None:
        said.append(generator.complaint)
    if not found.requests:
        said.append(f"none of the {generator.sent} requests sent was counted: give a longer --duration, or a higher --rate")
    if not shares_prefixes and (found.cached_tokens_ratio or 0.0) > CACHED_SHARE:
        said.append(
            f"{found.cached_tokens_ratio:.0%} of the prompt tokens came out of a cache, though no prompt was sent twice: "
            "the times are those of a warm cache"
        )
    if not generator.kept_lengths:
        said.append(
            f"prompts were {generator.prompt_length_error_ratio:.1%} off the lengths asked for: figures and length classes are "
            "of what the engine counted"
        )
    if generator.without_usage:
        said.append(f"{generator.without_usage} answers told no usage: their tokens were counted by pieces")
    if generator.usage_not_believed:
        said.append(
            f"of {generator.usage_not_believed} answers the service counted no token, or more than were asked for: "
            "their tokens were counted by pieces"
        )
    if found.e2e_s is not None and found.e2e_s.p50 > found.measured_s:
        said.append(
            f"half of the answers took over {found.e2e_s.p50:.1f} s, longer than the {found.measured_s:.1f} s that are "
            "counted: throughput is of those that ended in them, goodput of all; give a longer --duration"
        )
    if generator.tokens_a_piece is not None and generator.tokens_a_piece > 1.2:
        said.append(
            f"the service sends {generator.tokens_a_piece:.1f} tokens at a time: itl_s spreads each gap over its tokens, "
            "itl_worst_s and stalls are of the gaps as they were"
        )
    return said
