"""What came of a comparison: the change of each figure with its interval, the words, the rules; no I/O."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec

from twinpool.bench.arms import ARMS, Split, Workers
from twinpool.bench.run import Measured, indicators_of, report, warnings_of
from twinpool.bench.words import change, rate, ratio, seconds
from twinpool.config import Objectives
from twinpool.measure.indicators import Limits, UnitCosts, judge, useful_work_ratio
from twinpool.measure.report import Tallied, ratio_intervals, report_of
from twinpool.workload.mixes import AnyTraffic

BATCHES = (128, 256, 512)
"""Tokens a step that the colocated arm is tried with; the default is among them."""

BURST_REQUESTS = 24
DEFAULT_LOAD = 0.7
DEFAULT_WORKERS = 3
DEFAULT_ROUNDS = 2
LONG_REQUESTS = 60
"""In each arm at least."""

_WORSE_STILL = 0.01
"""Of their time: streams that stood still for less longer did so by chance."""

FEWEST_REQUESTS = 20
"""In an arm: stretches of time with a request or none in them are no sample to draw from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What was asked for; None is found out."""

    mix: str
    traffic: AnyTraffic
    engines: tuple[str, ...] = ()
    workers: int = DEFAULT_WORKERS
    worker_options: tuple[str, ...] = ()
    rounds: int = DEFAULT_ROUNDS
    rate: float | None = None
    load: float = DEFAULT_LOAD
    duration_s: float | None = None
    scale_lengths: float | None = None
    split: Split | None = None
    seed: int = 1
    minutes: float = 14.0
    api_key: str | None = None
    model: str | None = None
    objectives: Objectives = Objectives()
    arm_options: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """More options of `serve` for an arm."""


@dataclass(slots=True)
class Found:
    """What the tuning found, and each arm's rounds."""

    scale: float = 1.0
    rate: float = 0.0
    duration_s: float = 0.0
    batch_tokens: int | None = None
    split: Split = field(default_factory=lambda: Split(1, 1))
    tuning: list[str] = field(default_factory=list)
    costs: UnitCosts | None = None
    role_changes: int = 0
    """In the balanced arm, in all rounds."""
    rounds: dict[str, list[Measured]] = field(default_factory=lambda: {arm: [] for arm in ARMS})
    notes: list[str] = field(default_factory=list)


def summary(settings: Settings, found: Found, workers: Workers) -> dict[str, Any]:
    """The whole result, JSON-ready, by the contract of the reports."""
    arms = {arm: _arm(settings, found, arm, len(workers.urls)) for arm in ARMS}
    tallied = {arm: _tallied(found.rounds[arm]) for arm in ARMS}
    changes = {arm: _change(tallied[arm], tallied["colocated"], settings.seed) for arm in ("disaggregated", "balanced")}
    fewest = min(found["requests"] for found in arms.values())
    few = f"{fewest} requests in an arm are too few to tell" if fewest < FEWEST_REQUESTS else None
    wanted, why = recommendation(changes) if few is None else ("unknown", few)
    result: dict[str, Any] = {
        "arms": arms,
        "change": changes["balanced"],
        "changes": changes,
        "recommendation": wanted,
        "recommendation_why": why,
        "words": words(arms, changes, wanted, why),
        "fairness": fairness(settings, found, workers),
        "warnings": _warnings(found, arms, workers),
        "traffic": {
            "mix": settings.mix,
            "lengths": str(settings.traffic),
            "rate": found.rate,
            "duration_s": found.duration_s,
            "rounds": settings.rounds,
            "seed": settings.seed,
            "scale_lengths": found.scale,
            "long_prompt_tokens": settings.objectives.long_prompt_tokens,
        },
        "title": f"{len(workers.urls)} workers, {settings.mix} at {found.rate:g} requests/s",
    }
    result["table"] = table(arms)
    result["change_table"] = change_table(changes)
    return result


def _arm(settings: Settings, found: Found, arm: str, workers: int) -> dict[str, Any]:
    rounds = found.rounds[arm]
    rng = Random(settings.seed)  # noqa: S311
    seen = indicators_of(rounds, unobserved="engines that were given are not watched", rng=rng)
    recorders = [measured.recorder for measured in rounds]
    blocks = [block for recorder in recorders for block in (*recorder.short, *recorder.long)]
    if found.costs is not None:
        useful = useful_work_ratio(
            found.costs,
            prompt_tokens=sum(block.prompt_tokens for block in blocks),
            output_tokens=sum(block.tokens_out for block in blocks),
            workers=workers,
            seconds=sum(recorder.window.seconds for recorder in recorders),
        )
        seen = msgspec.structs.replace(seen, useful_work_ratio=useful)
    limits = Limits(ttft_long_s=settings.objectives.slo_ttft_s)
    built: dict[str, Any] = msgspec.to_builtins(report_of(recorders, seen, judge(seen, limits), rng))
    built["generator"] = [msgspec.to_builtins(measured.generator) for measured in rounds]
    served: dict[str, int] = {}
    for measured in rounds:
        for worker, count in measured.generator.workers.items():
            served[worker] = served.get(worker, 0) + count
    prefill, decode = (0, 0) if arm == "colocated" else (found.split.prefill, found.split.decode)
    built["workers"] = {"prefill": prefill, "decode": decode, "colocated": workers if arm == "colocated" else 0}
    built["requests_by_worker"] = served
    if arm == "balanced":
        built["role_changes"] = found.role_changes
    built["throughput_output_tok_s_per_worker"] = built["throughput_output_tok_s"] / workers
    return built


def _tallied(rounds: Sequence[Measured]) -> dict[str, Tallied]:
    short = [block for measured in rounds for block in measured.recorder.short]
    long = [block for measured in rounds for block in measured.recorder.long]
    return {"all": Tallied(list(zip(short, long, strict=True))), "long": Tallied([[block] for block in long])}


_CHANGES: Mapping[str, tuple[str, Callable[[dict[str, Any]], float | None]]] = {
    "throughput_ratio": ("all", lambda figures: figures["throughput_req_s"]),
    "throughput_output_tok_ratio": ("all", lambda figures: figures["throughput_output_tok_s"]),
    "goodput_ratio": ("all", lambda figures: figures["goodput_req_s"]),
    "ttft_mean_ratio": ("all", lambda figures: (figures["ttft_s"] or {}).get("mean")),
    "ttft_long_mean_ratio": ("long", lambda figures: (figures["ttft_s"] or {}).get("mean")),
    "itl_p99_ratio": ("all", lambda figures: (figures["itl_s"] or {}).get("p99")),
    "itl_worst_p99_ratio": ("all", lambda figures: (figures["itl_worst_s"] or {}).get("p99")),
}


def _change(arm: Mapping[str, Tallied], base: Mapping[str, Tallied], seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {"intervals": {}}
    for length_class in ("all", "long"):
        figures = {key: figure for key, (of, figure) in _CHANGES.items() if of == length_class}
        rng = Random(seed)  # noqa: S311  # repeatable, not secret
        for key, (value, interval) in ratio_intervals(arm[length_class], base[length_class], figures, rng).items():
            found[key], found["intervals"][key] = value, list(interval) if interval else None
    return found


def _is_surely(interval: Sequence[float] | None, *, above: float | None = None, below: float | None = None) -> bool:
    if interval is None:
        return False
    return (above is not None and interval[0] > above) or (below is not None and interval[1] < below)


def recommendation(changes: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """Which arm this traffic wants, and why. What the intervals do not settle is settled by simplicity: colocated."""
    better = [arm for arm, found in changes.items() if _is_surely(found["intervals"]["goodput_ratio"], above=1.0)]
    if better:
        arm = max(better, key=lambda name: changes[name]["goodput_ratio"])
        return arm, f"goodput {change(changes[arm]['goodput_ratio'])} against colocated"
    calmer = [
        arm
        for arm, found in changes.items()
        if _is_surely(found["intervals"]["itl_worst_p99_ratio"], below=1.0)
        and not _is_surely(found["intervals"]["goodput_ratio"], below=1.0)
        and not _is_surely(found["intervals"]["ttft_mean_ratio"], above=1.0)
    ]
    if calmer:
        arm = min(calmer, key=lambda name: changes[name]["itl_worst_p99_ratio"])
        return arm, f"goodput and TTFT no worse for sure, worst gaps {change(changes[arm]['itl_worst_p99_ratio'])}"
    if all(_is_surely(found["intervals"]["goodput_ratio"], below=1.0) for found in changes.values()):
        return "colocated", "more of its requests met the objectives, for sure"
    return "colocated", "nothing else was surely better, and one pool is simpler"


_WORDED = (
    ("goodput_ratio", "goodput", True),
    ("throughput_ratio", "throughput", True),
    ("ttft_mean_ratio", "mean TTFT", False),
    ("ttft_long_mean_ratio", "mean TTFT of long requests", False),
    ("itl_worst_p99_ratio", "the worst gaps (p99)", False),
)


def words(arms: Mapping[str, Any], changes: Mapping[str, Mapping[str, Any]], wanted: str, why: str) -> list[str]:
    """What helped, what it cost, what is not sure."""
    said = []
    fewest = min(found["requests"] for found in arms.values())
    if fewest < FEWEST_REQUESTS:
        said.append(f"Only {fewest} requests were counted in an arm: whatever is said here, nothing is sure of so few.")
    for arm, found in changes.items():
        helped: list[str] = []
        cost: list[str] = []
        unsure: list[str] = []
        for key, name, more_is_better in _WORDED:
            interval = found["intervals"][key]
            if found[key] is None or interval is None:
                continue
            text = f"{name} {change(found[key])} ({change(interval[0])} to {change(interval[1])})"
            if _is_surely(interval, above=1.0):
                (helped if more_is_better else cost).append(text)
            elif _is_surely(interval, below=1.0):
                (cost if more_is_better else helped).append(text)
            else:
                low, high = map(change, interval)
                unsure.append(f"{name} ({low})" if low == high else f"{name} ({low} to {high})")
        parts = [
            f"{label} {', '.join(items)}"
            for label, items in (("helped", helped), ("cost", cost), ("not settled:", unsure))
            if items
        ]
        said.append(f"{arm.capitalize()} against colocated: {'; '.join(parts) or 'nothing to compare'}.")
        said += _stood_still(arms[arm]["stalled_time_ratio"], arms["colocated"]["stalled_time_ratio"])
    if not any(found["goodput_req_s"] for found in arms.values()):
        said.append("No arm met the objectives: more traffic than these workers can serve, or objectives that are too tight.")

    failed = {arm: found["failed"] for arm, found in arms.items() if found["failed"]}
    if failed:
        said.append("Failed: " + ", ".join(f"{count} of {arms[arm]['requests']} {arm}" for arm, count in failed.items()) + ".")
    said.append(
        f"What this traffic wants cannot be told: {why}." if wanted == "unknown" else f"This traffic wants: {wanted} ({why})."
    )
    return said


def _stood_still(share: float | None, base: float | None) -> list[str]:
    """Where it got worse, by as much as can be read."""
    if share is None or base is None or share - base < _WORSE_STILL:
        return []
    return [f"Its streams stood still for {ratio(share)} of their time, those of colocated for {ratio(base)}."]


def rounds_of(count: int) -> str:
    return f"{count} round{'s' * (count != 1)}"


def fairness(settings: Settings, found: Found, workers: Workers) -> list[str]:
    """The rules, with what they came to here."""
    count = len(workers.urls)
    cores = len(set(workers.cores))
    said = [f"The same {count} workers, started with the same flags, serve every arm; rates are of all {count} together."]
    if cores:
        shared = f", so some share a core: they are oversubscribed {count / cores:.2g} times" if cores < count else ""
        said.append(f"{count} workers on {cores} cores{shared}.")
    if found.batch_tokens:
        said.append(f"Colocated got its best batch size of {', '.join(map(str, BATCHES))} tokens a step: {found.batch_tokens}.")
    how = "as given" if settings.split else "the best of all splits by the same rule"
    said.append(f"Disaggregated got {found.split} (prefill:decode), {how}; balanced began with it.")
    said.append(f"Of a burst of {BURST_REQUESTS} requests: " + "; ".join(found.tuning) + "." if found.tuning else "")
    how = " whose order moved on" if settings.rounds > 1 else ""
    said += [
        "Every arm got the same requests at the same times, with prompts of its own that no cache knew, in "
        f"{rounds_of(settings.rounds)}{how}; each through a gateway, from the same client.",
        f"Lengths and the border of {settings.objectives.long_prompt_tokens:,} tokens were divided by {found.scale:g}.",
        f"Objectives: TTFT {seconds(settings.objectives.slo_ttft_s)}, ITL {seconds(settings.objectives.slo_itl_s)}.",
    ]
    return [line for line in said if line]


def _warnings(found: Found, arms: Mapping[str, Any], workers: Workers) -> list[str]:
    said = list(found.notes)
    for arm in ARMS:
        for number, measured in enumerate(found.rounds[arm], 1):
            of_round = report([measured], Limits(), unobserved="", seed=1)
            said += [f"{arm}, round {number}: {one}" for one in warnings_of(of_round, measured.generator, shares_prefixes=True)]
        known = arms[arm]["requests_by_worker"]
        if known and len(known) < len(workers.urls):
            idle = len(workers.urls) - len(known)
            said.append(f"{arm}: {idle} of {len(workers.urls)} workers got no request")
        if arms[arm]["long"]["requests"] < LONG_REQUESTS:
            said.append(f"{arm}: {arms[arm]['long']['requests']} long requests were counted, under {LONG_REQUESTS}")
    return said


def _workers(arm: Mapping[str, Any]) -> str:
    return " + ".join(str(arm["workers"][role]) for role in ("prefill", "decode", "colocated"))


def table(arms: Mapping[str, Any]) -> dict[str, Any]:
    """The article's rows, with an arm a column."""

    def of(figures: Any, key: str, part: str) -> str:
        return seconds((figures[key] or {}).get(part))

    rows: list[tuple[str, Callable[[Any], str]]] = [
        ("throughput, requests/s", lambda arm: rate(arm["throughput_req_s"], "")),
        ("throughput, tokens/s", lambda arm: rate(arm["throughput_output_tok_s"], "")),
        ("goodput, requests/s", lambda arm: rate(arm["goodput_req_s"], "")),
        ("TTFT, mean", lambda arm: of(arm, "ttft_s", "mean")),
        ("TTFT of long requests, mean", lambda arm: of(arm["long"], "ttft_s", "mean")),
        ("TTFT of long requests, p99", lambda arm: of(arm["long"], "ttft_s", "p99")),
        ("gap between tokens, p99", lambda arm: of(arm, "itl_s", "p99")),
        ("worst gap of a stream, p50", lambda arm: of(arm, "itl_worst_s", "p50")),
        ("worst gap of a stream, p99", lambda arm: of(arm, "itl_worst_s", "p99")),
        ("streams stood still", lambda arm: ratio(arm["stalled_time_ratio"])),
        ("workers busy, mean", lambda arm: ratio(arm["utilization_mean_ratio"])),
        ("workers busy at the peak", lambda arm: ratio(arm["utilization_at_peak_ratio"])),
        ("useful work", lambda arm: ratio(arm["useful_work_ratio"])),
        ("requests counted (long)", lambda arm: f"{arm['requests']} ({arm['long']['requests']})"),
        ("failed", lambda arm: str(arm["failed"])),
        ("prefill + decode + colocated", _workers),
    ]
    return {"head": ["", *ARMS], "rows": [[name, *(pick(arms[arm]).strip() for arm in ARMS)] for name, pick in rows]}


_CHANGE_ROWS = (
    ("throughput, requests/s", "throughput_ratio"),
    ("throughput, tokens/s", "throughput_output_tok_ratio"),
    ("goodput", "goodput_ratio"),
    ("TTFT, mean", "ttft_mean_ratio"),
    ("TTFT of long requests, mean", "ttft_long_mean_ratio"),
    ("gap between tokens, p99", "itl_p99_ratio"),
    ("worst gap of a stream, p99", "itl_worst_p99_ratio"),
)


def change_table(changes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Each arm against colocated, with the 95 % interval."""

    def cell(found: Mapping[str, Any], key: str) -> str:
        interval = found["intervals"][key]
        span = f" ({change(interval[0])} to {change(interval[1])})" if interval else ""
        return f"{change(found[key])}{span}"

    rows = [[name, *(cell(found, key) for found in changes.values())] for name, key in _CHANGE_ROWS]
    return {"head": ["against colocated (95 %)", *changes], "rows": rows}
