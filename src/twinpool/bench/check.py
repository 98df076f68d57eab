"""The verdict on a service that is not ours to change: probed, watched, judged, advised."""

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import msgspec

from twinpool.bench.gpus import open_gpus
from twinpool.bench.prepare import Prepared, prepare
from twinpool.bench.probe import ENOUGH_LONG, Probe, Probed, Seen
from twinpool.bench.run import beside
from twinpool.bench.target import Target
from twinpool.bench.use import Watch, pages_of
from twinpool.bench.words import change, ratio, seconds
from twinpool.config import Objectives
from twinpool.errors import UserError
from twinpool.http1 import Pool
from twinpool.measure.blocks import Recorder, Window
from twinpool.measure.indicators import FEWEST_WINDOWS, Indicators, Judged, Limits, judge, use_of
from twinpool.measure.interference import Interference, judge_interference
from twinpool.measure.report import Tallied, figures_of, ratio_intervals, report_of

EXITS = {"pass": 0, "fail": 1, "unknown": 2}

_BLOCKS = 10
"""Of a probe: a few long prompts in each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to check, and what is fit."""

    limits: Limits = Limits()
    objectives: Objectives = Objectives()
    duration_s: float = 420.0
    timeout_s: float = 120.0
    model: str | None = None
    metrics: tuple[str, ...] = ()
    seed: int = 1


@dataclass(slots=True)
class Checked:
    """What was seen of one service; probes of it add up."""

    prepared: Prepared
    probes: list[Probed]
    windows: list[Any]
    source: str | None
    unobserved: str
    """Why there is no use, where there is none."""
    is_disaggregated: bool | None = None


async def check_one(
    pool: Pool,
    target: Target,
    asked: Asked,
    *,
    enough_long: int = ENOUGH_LONG,
    enough_windows: int = FEWEST_WINDOWS,
    show: Callable[[Seen], None] | None = None,
) -> Checked:
    """Probe a service. It goes on until the use at the peak is known, where it can be, or its time is over."""
    pages, first, unobserved = await pages_of(pool, target, asked.metrics)
    prepared = await prepare(pool, target, asked.model, timeout_s=asked.timeout_s, needs_usage=False)
    if prepared.prompts.fewest_tokens > asked.objectives.long_prompt_tokens:
        raise UserError(f"{target.url} puts a template of {prepared.prompts.fewest_tokens} tokens in front of every prompt")
    gpus = open_gpus() if not pages and _is_local(target) else None
    probe: Probe
    watch = Watch(pool, pages, gpus, lambda: float(probe.offered_tokens))
    probe = Probe(
        pool,
        prepared,
        long_prompt_tokens=asked.objectives.long_prompt_tokens,
        duration_s=asked.duration_s,
        timeout_s=asked.timeout_s,
        knows_enough=lambda answered: answered >= enough_long and (not watch.can_see or len(watch.windows) >= enough_windows),
        show=show,
    )
    async with beside(watch.run if watch.can_see else None):
        probed = await probe.run()
    source = f"{first[0].source} at {pages[0].url}" if first else f"NVML, {len(gpus)} GPUs here" if gpus else None
    said = {page.is_disaggregated for page in first} - {None}
    known = True in said if said else True if "disaggregated" in probed.paths else None
    unseen = watch.why_unseen() if watch.can_see else unobserved
    return Checked(prepared, [probed], watch.windows, source, unseen, known)


def turns(services: int) -> list[tuple[int, int]]:
    """Which service is probed when, and for how many long requests: two take turns (A B B A), so that a machine or a network
    that changes meanwhile does not do it to one of them."""
    if services == 1:
        return [(0, ENOUGH_LONG)]
    half = ENOUGH_LONG // 2
    return [(0, half), (1, half), (1, half), (0, half)]


def merge(parts: Sequence[Checked]) -> Checked:
    """Several probes of one service, as one."""
    first = parts[0]
    return Checked(
        first.prepared,
        [probed for part in parts for probed in part.probes],
        [window for part in parts for window in part.windows],
        first.source,
        first.unobserved,
        first.is_disaggregated,
    )


def _is_local(target: Target) -> bool:
    host = target.origin.host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def recorder_of(checked: Checked, objectives: Objectives, number: int = 0) -> Recorder:
    """All of a probe's time is counted: it has no load to warm up to."""
    probed = checked.probes[number]
    recorder = Recorder(Window(0.0, max(probed.ended - probed.began, 1e-3)), objectives, _BLOCKS)
    for sample in probed.samples:
        recorder.add(sample)
    return recorder


def result_of(checked: Checked, asked: Asked) -> dict[str, Any]:
    """By the keys of the reports, and beside them the interference and the advice."""
    recorders = [recorder_of(checked, asked.objectives, number) for number in range(len(checked.probes))]
    rng = Random(asked.seed)  # noqa: S311  # repeatable, not secret
    long = figures_of([[block] for recorder in recorders for block in recorder.long], rng)
    mean, peak, windows = use_of(checked.windows)
    seen = Indicators(
        ttft_long_s=long.ttft_s.mean if long.ttft_s else None,
        ttft_long_interval_s=long.intervals.get("ttft_s", {}).get("mean"),
        long_requests=long.requests - long.failed,
        long_failed=long.failed,
        utilization_mean_ratio=mean,
        utilization_at_peak_ratio=peak,
        windows=windows,
        unobserved=checked.unobserved,
    )
    judged = judge(seen, asked.limits)
    interference = judge_interference(
        [stream for probed in checked.probes for stream in probed.streams],
        [span for probed in checked.probes for span in probed.reads],
        [span for probed in checked.probes for span in probed.controls],
    )
    built: dict[str, Any] = msgspec.to_builtins(report_of(recorders, seen, judged, rng))
    return {
        **built,
        "service": {"url": checked.prepared.target.url, "model": checked.prepared.target.model},
        "interference": msgspec.to_builtins(interference),
        "disaggregated": checked.is_disaggregated,
        "advice": advice(interference, judged, checked.is_disaggregated),
        "use_source": checked.source,
        "limits": msgspec.to_builtins(asked.limits),
        "notes": notes(checked, judged, mean),
        "messages": {kind: text for probed in checked.probes for kind, text in probed.messages.items()},
        "long_prompt_tokens": asked.objectives.long_prompt_tokens,
        "probed_s": round(sum(probed.ended - probed.began for probed in checked.probes), 1),
    }


def notes(checked: Checked, judged: Judged, mean_use: float | None) -> list[str]:
    """What a reader must know beside the figures."""
    said = list(checked.prepared.notes)
    said += dict.fromkeys(f"the probe ended early: {probed.stopped}" for probed in checked.probes if probed.stopped)
    said += dict.fromkeys(f"the probe took all of its time: {probed.over}" for probed in checked.probes if probed.over)
    if checked.source is not None and checked.source.startswith(("vLLM", "SGLang")):
        said.append(
            f"{checked.source} tells whether a request runs, not how much is computed, and the probe's own streams run all the "
            "time: a DCGM exporter's page (--metrics) tells more"
        )
    if mean_use is not None and "under the floor" in " ".join(judged.reasons):
        said.append("the probe is a small load: judge the use of a service while its real traffic runs")
    return said


def advice(interference: Interference, judged: Judged, is_disaggregated: bool | None) -> str:
    """Would disaggregation help here, or is it on already?"""
    is_slow = judged.reasons[0].endswith("s") and "over the limit" in judged.reasons[0]
    if interference.found == "unknown":
        return f"Whether long prompts disturb running streams could not be told: {interference.why}."
    pace = f"running streams go at {ratio(interference.pace_ratio)} of their pace while a long prompt is read"
    if interference.found == "yes":
        worst = f"{pace}, and one stood still for {seconds(interference.worst_gap_s)}"
        if is_disaggregated:
            return (
                f"Prefill and decode have workers of their own, and yet {worst}: look at where prompts are read "
                "(prefill done by decode workers, a pool too small, cores or GPUs shared)."
            )
        return f"Disaggregation would help the gaps here: {worst}."
    if is_disaggregated:
        return f"Disaggregation is on, and works: {pace}."
    rest = " The TTFT of long requests is another matter: they wait for capacity." if is_slow else ""
    return f"Disaggregation would not help the gaps here, or is on already: {pace}.{rest}"


_COMPARED = (
    ("ttft_long_mean_ratio", "long", "ttft_s", "mean"),
    ("ttft_short_mean_ratio", "short", "ttft_s", "mean"),
    ("itl_p99_ratio", "short", "itl_s", "p99"),
    ("itl_worst_p50_ratio", "short", "itl_worst_s", "p50"),
    ("itl_worst_p99_ratio", "short", "itl_worst_s", "p99"),
)


def compare_two(first: Checked, second: Checked, asked: Asked) -> dict[str, Any]:
    """How the second service compares with the first, each figure with its 95 % interval."""
    tallied = [_tallied(checked, asked.objectives) for checked in (first, second)]
    found: dict[str, Any] = {"intervals": {}}
    for key, length_class, figure, part in _COMPARED:
        figures = {key: partial(_part, figure=figure, part=part)}
        rng = Random(asked.seed)  # noqa: S311  # repeatable, not secret
        value, interval = ratio_intervals(tallied[1][length_class], tallied[0][length_class], figures, rng)[key]
        found[key], found["intervals"][key] = value, list(interval) if interval else None
    return found


def _part(figures: dict[str, Any], *, figure: str, part: str) -> float | None:
    return (figures[figure] or {}).get(part)


def _tallied(checked: Checked, objectives: Objectives) -> dict[str, Tallied]:
    recorders = [recorder_of(checked, objectives, number) for number in range(len(checked.probes))]
    return {
        "short": Tallied([[block] for recorder in recorders for block in recorder.short]),
        "long": Tallied([[block] for recorder in recorders for block in recorder.long]),
    }


def compared_lines(found: dict[str, Any], first: str, second: str) -> list[str]:
    """In words; what the interval does not settle is said to be the same, as far as was seen."""
    names = {
        "ttft_long_mean_ratio": "mean TTFT of long requests",
        "ttft_short_mean_ratio": "mean TTFT of short requests",
        "itl_p99_ratio": "gap between tokens, p99",
        "itl_worst_p50_ratio": "worst gap of a short stream, p50",
        "itl_worst_p99_ratio": "worst gap of a short stream, p99",
    }
    lines = [f"{second} against {first}:"]
    for key, name in names.items():
        interval = found["intervals"][key]
        if found[key] is None or interval is None:
            lines.append(f"  {name}: not seen")
            continue
        sure = "" if interval[0] > 1 or interval[1] < 1 else ", not a sure difference"
        lines.append(f"  {name}: {change(found[key])} (95 %: {change(interval[0])} to {change(interval[1])}){sure}")
    return lines


def exit_code(verdicts: Sequence[str]) -> int:
    """1 when one failed, 0 when all passed, 2 else."""
    if "fail" in verdicts:
        return EXITS["fail"]
    return EXITS["pass"] if all(verdict == "pass" for verdict in verdicts) else EXITS["unknown"]
