"""What a run showed, with the keys that every report has, and beside them what only a simulation can see."""

from math import fsum
from random import Random
from statistics import pstdev
from typing import Any

import msgspec

from twinpool.errors import UserError
from twinpool.measure.indicators import WINDOW_S, Indicators, Limits, Load, judge, use_of, useful_work_ratio
from twinpool.measure.report import Report, figures_of, report_of
from twinpool.sim.bound import fleet_bound_req_s
from twinpool.sim.run import Run
from twinpool.sim.scenario import Claim, Scenario

_SHOWN_WINDOWS = 360  # an hour: a longer run's series is thinned


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """One arm's. `offered_req_s` is of the counted time, as the report's rates are; `bound_req_s` is what no policy can exceed
    on this fleet with this traffic (see `bound`)."""

    report: Report
    offered_req_s: float
    bound_req_s: float
    attainment_ratio: float
    outcomes: dict[str, int]
    paths: dict[str, int]
    decisions: list[tuple[str, str, int]]
    role_changes: list[tuple[float, str, str, str]]
    workers: list[dict[str, Any]]
    windows: list[dict[str, float]]
    preemptions: int
    lost_leases: int
    beyond_table_ratio: float
    profiles: list[dict[str, str]]
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        """The report's keys on top."""
        own = msgspec.to_builtins(self)
        return {**own.pop("report"), **own}


def findings_of(run: Run, *, limits: Limits | None = None) -> Findings:
    """Raises `UserError` where the run has nothing to tell."""
    recording = run.recording
    if not run.demand.requests:
        if run.too_long:
            raise UserError(f"all {run.too_long:,} requests are longer than the workers' context or KV: nothing can be served")
        raise UserError("the scenario ends before its first request")
    demand = run.demand.mean()
    busy_s = fsum(totals.busy_s for totals in run.totals.values())
    decisions = run.decisions
    report = _report(run, limits or Limits(ttft_long_s=recording.objectives.slo_ttft_s))
    return Findings(
        report=report,
        offered_req_s=report.requests / report.measured_s,
        bound_req_s=fleet_bound_req_s(demand, run.kinds, recording.objectives.slo_itl_s),
        attainment_ratio=recording.attainment_ratio,
        outcomes=dict(sorted(recording.outcomes.items())),
        paths=dict(sorted(recording.paths.items())),
        decisions=[(*names, count) for names, count in sorted(decisions.items(), key=lambda item: (-item[1], item[0]))],
        role_changes=[(at, worker, role.value, reason) for at, worker, role, reason in run.role_changes],
        workers=[
            {
                "worker": name,
                "busy_ratio": totals.busy_s / run.seconds,
                "steps": totals.steps,
                "mixed_steps": totals.mixed_steps,
                "read_tokens": totals.read_tokens,
                "written_tokens": totals.written_tokens,
            }
            for name, totals in run.totals.items()
        ],
        windows=_windows(run),
        preemptions=sum(totals.preemptions for totals in run.totals.values()),
        lost_leases=run.lost_leases,
        beyond_table_ratio=run.beyond_table_ratio,
        profiles=[{"name": kind.profile.name, "source": kind.profile.source} for kind in run.kinds],
        notes=_notes(run, busy_s),
    )


def claims_beside(claims: tuple[Claim, ...], found: dict[str, Findings]) -> list[dict[str, Any]]:
    """Each claim with what was found; None where the run has no such figure."""
    rows = []
    for claim in claims:
        value = _at(found[claim.arm].as_json(), claim.key)
        if claim.over is not None:
            base = _at(found[claim.over].as_json(), claim.key)
            value = value / base if value is not None and base else None
        rows.append({"what": claim.what, "claimed": claim.claimed, "found": value})
    return rows


def _at(tree: Any, key: str) -> float | None:
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return None
        tree = tree[part]
    return float(tree) if isinstance(tree, int | float) else None


def _report(run: Run, limits: Limits) -> Report:
    recording = run.recording
    loads = [Load(seen.offered_s, fsum(seen.busy) / len(seen.busy)) for seen in run.windows]
    mean, peak, count = use_of(loads)
    long = figures_of([[block] for block in recording.long], Random(0))  # noqa: S311  # the same intervals every time
    indicators = Indicators(
        ttft_long_s=long.ttft_s.mean if long.ttft_s else None,
        ttft_long_interval_s=(long.intervals.get("ttft_s") or {}).get("mean"),
        long_requests=long.requests - long.failed,
        long_failed=long.failed,
        utilization_mean_ratio=mean,
        utilization_at_peak_ratio=peak,
        windows=count,
        useful_work_ratio=useful_work_ratio(
            run.costs,
            prompt_tokens=recording.read_tokens,
            output_tokens=recording.written_tokens,
            workers=len(run.totals),
            seconds=run.seconds,
        ),
        unobserved=f"the run is shorter than {WINDOW_S:g} s",
    )
    return report_of([recording], indicators, judge(indicators, limits), Random(0))  # noqa: S311


def _windows(run: Run) -> list[dict[str, float]]:
    """Ten seconds each: the work that came and the time that was computed, both as shares of the workers' time."""
    every = -(-len(run.windows) // _SHOWN_WINDOWS) or 1
    return [
        {
            "from_s": number * WINDOW_S,
            "offered_ratio": seen.offered_s / (WINDOW_S * len(seen.busy)),
            "busy_ratio": fsum(seen.busy) / len(seen.busy),
            "busy_sd_ratio": pstdev(seen.busy),
        }
        for number, seen in enumerate(run.windows)
        if number % every == 0
    ]


def _notes(run: Run, busy_s: float) -> list[str]:
    notes = []
    if run.beyond_table_ratio > 0.01:
        notes.append(
            f"{run.beyond_table_ratio:.0%} of the engines' time went to batches or contexts beyond the profile's table: "
            "their cost is extrapolated"
        )
    if any(kind.group.budget_by_role for kind in run.kinds):
        notes.append("what-if: engines with a token budget for each role; no engine has that")
    if run.too_long:
        notes.append(
            f"{run.too_long:,} requests are longer than any worker's context or KV, and were rejected: "
            "the bound is for the others"
        )
    if (rejected := run.recording.outcomes.get("rejected", 0) - run.too_long) > 0:
        notes.append(f"{rejected} requests are longer than their workers' context or KV, and were rejected")
    if not any(block.requests for block in (*run.recording.short, *run.recording.long)):
        window = run.recording.window
        notes.append(
            f"no request comes in the counted part of the time, from {window.start_s:g} s to {window.end_s:g} s: "
            "offered, goodput and times are of nothing"
        )
    if not busy_s:
        notes.append("no engine did anything")
    return notes


def compared(scenario: Scenario, found: dict[str, Findings]) -> dict[str, Any]:
    """The whole answer: one arm's keys on top, or every arm's under its name."""
    if not scenario.arms:
        return {"scenario": scenario.name, **next(iter(found.values())).as_json()}
    return {
        "scenario": scenario.name,
        "arms": {name: each.as_json() for name, each in found.items()},
        "claims": claims_beside(scenario.claims, found),
    }
