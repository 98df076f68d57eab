"""The article's three figures on the simulator, for the 60/40 mix on eight workers: each beside the baseline that it hangs on.

    python benchmarks/article.py goodput    "+45 %": at 99 % attainment, beside engines at their defaults and well-tuned ones
    python benchmarks/article.py ttft       "-30 %": mean TTFT where colocated's is 1.8 s, with the gaps; what flips add
    python benchmarks/article.py use        "92 % steady": busy and useful work at base and in a burst, with TTFT

Budgets are options: which one is best for whom, `policies.py` finds out.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import fsum
from statistics import pstdev
from typing import NamedTuple

import msgspec

from cells import TRAFFICS, Cell, Sample, Way, bound_req_s, play, sample, scenario_of
from twinpool.assemble import build_controller
from twinpool.config import BalanceMode, Routing
from twinpool.core.cluster import WorkerView
from twinpool.core.controller import Controller
from twinpool.core.decisions import Choice, Decision, Why
from twinpool.core.model import Role
from twinpool.core.policies import Pending, Route
from twinpool.measure.blocks import Window
from twinpool.sim.client import Ended
from twinpool.sim.engine import Scheduling
from twinpool.sim.findings import findings_of
from twinpool.sim.goodput import highest_scale
from twinpool.sim.run import Run, simulate
from twinpool.workload.offered import scaled

TTFT_S = 1.8
"""Of colocated in the article."""


class Mean:
    """Meets the objectives by its mean gap: how the article, and most load tests, judge. Moves nobody."""

    every_s = 1e9

    def __init__(self, window: Window, ttft_s: float, itl_s: float) -> None:
        self._window, self._ttft_s, self._itl_s = window, ttft_s, itl_s
        self.requests = self.met = 0

    def ended(self, end: Ended) -> None:
        if not self._window.start_s <= end.timeline.arrived < self._window.end_s:
            return
        self.requests += 1
        gaps, ttft_s = end.gaps, end.timeline.ttft_s
        if gaps is not None and ttft_s is not None and ttft_s <= self._ttft_s:
            self.met += gaps.total_s <= self._itl_s * gaps.gaps

    def look(self, at: float, workers: Sequence[WorkerView], waiting: int) -> tuple[str, Role] | None:
        return None

    @property
    def attainment_ratio(self) -> float:
        return self.met / self.requests if self.requests else 0.0


def round_robin() -> Route:
    count = 0

    def route(pending: Pending, workers: Sequence[WorkerView]) -> Decision:
        nonlocal count
        count += 1
        return Decision(Choice.COLOCATED, Why.NO_PREFILL_WORKER, decode=workers[count % len(workers)].facts.worker)

    return route


def _in_turn(rules: Routing) -> Controller:
    return build_controller(rules, change=lambda policies: policies._replace(route=round_robin()))


class Judged(NamedTuple):
    attainment_ratio: float


def default_engines(cell: Cell, of: Sample, scheduling: Scheduling, rate: float, watch: Mean | None) -> Run:
    """As engines come: 8,192 tokens a step, requests in turn."""
    scale = rate / of.rate
    scenario = scenario_of(cell, Way("fixed", 0, 0, 8, 8192), of.seconds / scale, BalanceMode.OFF)
    arm = scenario.all_arms()[0]
    arm = msgspec.structs.replace(
        arm, workers=tuple(msgspec.structs.replace(group, scheduling=scheduling) for group in arm.workers)
    )
    return simulate(scenario, arm, build=_in_turn, planner=watch, requests=scaled(of.requests, rate=scale))


def goodput(cell: Cell, colocated: int, law: int) -> Iterable[str]:
    """At 99 % attainment, judged by each request's own gaps and by its mean gap."""
    of = sample(cell, 1)
    ceiling = bound_req_s(cell)

    def of_way(way: Way) -> Callable[[float, Mean | None], Run]:
        return lambda rate, watch: play(cell, way, of, rate, watch=watch)

    arms: dict[str, Callable[[float, Mean | None], Run]] = {
        "8,192 tokens, round robin": partial(default_engines, cell, of, Scheduling.CHUNKED),
        "8,192 tokens, round robin, prefill first": partial(default_engines, cell, of, Scheduling.PREFILL_FIRST),
        f"colocated, tuned ({colocated})": of_way(Way("fixed", 0, 0, 8, colocated)),
        f"the law ({law})": of_way(Way("law", 5, 3, 0, law)),
    }
    yield f"{cell}, 99 % within {TRAFFICS[cell.traffic].ttft_s} s; requests/s"
    yield "| | 1 % of a request's own gaps over the limit | its mean gap |"
    yield "|---|---|---|"
    for name, run in arms.items():

        def by_gaps(rate: float, run: Callable[[float, Mean | None], Run] = run) -> Judged:
            return Judged(run(rate, None).attainment_ratio)

        def by_mean(rate: float, run: Callable[[float, Mean | None], Run] = run) -> Judged:
            watch = Mean(Window.of(of.seconds * of.rate / rate), TRAFFICS[cell.traffic].ttft_s, cell.itl_s)
            run(rate, watch)
            return Judged(watch.attainment_ratio)

        own, mean = (
            highest_scale(judge, 0.85 * ceiling, 0.95 * ceiling, attainment=0.99, resolution=0.015).scale
            for judge in (by_gaps, by_mean)
        )
        yield f"| {name} | {own:.1f} | {mean:.1f} |"


def ttft(cell: Cell, colocated: int, law: int) -> Iterable[str]:
    """At the rate where colocated's mean TTFT is 1.8 s."""
    of = sample(cell, 1)
    ceiling = bound_req_s(cell)
    low, high = 0.8 * ceiling, 1.15 * ceiling
    while high - low > 0.002 * high:
        rate = (low + high) / 2
        low, high = (low, rate) if _ttft_s(play(cell, Way("fixed", 0, 0, 8, colocated), of, rate)) > TTFT_S else (rate, high)
    rate = (low + high) / 2
    arms = {
        f"colocated ({colocated})": (Way("fixed", 0, 0, 8, colocated), BalanceMode.OFF),
        f"the law ({law}) from 5:3": (Way("law", 5, 3, 0, law), BalanceMode.AUTO),
    }
    for n in (5, 6):
        arms[f"the law's routing ({law}), {n}:{8 - n} as it stands"] = Way("law", n, 8 - n, 0, law), BalanceMode.OFF
        arms[f"least loaded, {n}:{8 - n} as it stands"] = Way("fixed", n, 8 - n, 0, 8192), BalanceMode.OFF
    yield f"{cell}, {rate:.1f} requests/s ({rate / ceiling:.0%} of the bound)"
    yield "| | mean TTFT, s | against colocated | ITL p99, ms | worst gap p99, ms | met the objectives | flips |"
    yield "|---|---|---|---|---|---|---|"
    base = None
    for name, (way, mode) in arms.items():
        run = play(cell, way, of, rate, mode=mode)
        seen = findings_of(run).report
        mean = _ttft_s(run)
        base = base or mean
        itl = seen.itl_s.p99 * 1e3 if seen.itl_s else 0.0
        worst = seen.itl_worst_s.p99 * 1e3 if seen.itl_worst_s else 0.0
        yield (
            f"| {name} | {mean:.2f} | {mean / base - 1:+.0%} | {itl:.0f} | {worst:.0f} | {run.attainment_ratio:.0%} "
            f"| {len(run.role_changes)} |"
        )


def _ttft_s(run: Run) -> float:
    seen = findings_of(run).report.ttft_s
    return seen.mean if seen else 0.0


class Times:
    """TTFT of those that came before, and in, a burst. Moves nobody."""

    every_s = 1e9

    def __init__(self, starts_s: float, ends_s: float) -> None:
        self._starts_s, self._ends_s = starts_s, ends_s
        self.base: list[float] = []
        self.burst: list[float] = []

    def ended(self, end: Ended) -> None:
        if end.timeline.ttft_s is not None and end.timeline.arrived < self._ends_s:
            (self.base if end.timeline.arrived < self._starts_s else self.burst).append(end.timeline.ttft_s)

    def look(self, at: float, workers: Sequence[WorkerView], waiting: int) -> tuple[str, Role] | None:
        return None


def use(cell: Cell, colocated: int, law: int) -> Iterable[str]:
    """Thirty seconds at a third of a rate, then a minute at it."""
    cell = cell._replace(traffic="burst")
    of = sample(cell, 1)
    ceiling = bound_req_s(cell)
    yield f"{cell}: base, then three times as much for a minute"
    heads = ("burst, of the bound", "", "busy, base", "busy, burst", "between workers", "useful work, base", "burst")
    yield "| " + " | ".join((*heads, "TTFT, base", "burst")) + " |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for share in (0.81, 0.92, 0.97):
        rate = share * ceiling
        stretch = of.rate / rate
        starts_s, ends_s = 30.0 * stretch, 90.0 * stretch
        for name, way in (
            (f"colocated ({colocated})", Way("fixed", 0, 0, 8, colocated)),
            ("fixed 6:2", Way("fixed", 6, 2, 0, 8192)),
            (f"the law ({law})", Way("law", 5, 3, 0, law)),
        ):
            times = Times(starts_s, ends_s)
            run = play(cell, way, of, rate, watch=times)
            parts = []
            for since, until in ((10.0, starts_s), (starts_s + 10.0, ends_s)):  # the first ten seconds settle
                windows = [seen for n, seen in enumerate(run.windows) if since <= 10.0 * n and 10.0 * (n + 1) <= until]
                busy = fsum(fsum(seen.busy) / len(seen.busy) for seen in windows) / len(windows)
                apart = fsum(pstdev(seen.busy) for seen in windows) / len(windows)
                useful = fsum(seen.offered_s / (10.0 * len(seen.busy)) for seen in windows) / len(windows)
                parts.append((busy, apart, useful))
            (base_busy, _, base_useful), (busy, apart, useful) = parts
            base_s, burst_s = (fsum(each) / len(each) for each in (times.base, times.burst))
            yield (
                f"| {share:.0%} | {name} | {base_busy:.0%} | {busy:.0%} | {apart:.0%} | {base_useful:.0%} | {useful:.0%} "
                f"| {base_s:.2f} s | {burst_s:.2f} s |"
            )


FIGURES = {"goodput": goodput, "ttft": ttft, "use": use}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("--profile", default="tp8")
    parser.add_argument("--traffic", default="200")
    parser.add_argument("--itl", type=float, default=0.05)
    parser.add_argument("--colocated", type=int, default=1024, help="budget, tokens a step")
    parser.add_argument("--law", type=int, default=8192, help="budget, tokens a step")
    options = parser.parse_args()
    cell = Cell(options.profile, options.traffic, options.itl)
    for line in FIGURES[options.figure](cell, options.colocated, options.law):
        print(line, flush=True)


if __name__ == "__main__":
    main()
