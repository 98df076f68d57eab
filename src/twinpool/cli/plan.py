"""``twinpool plan``: which split of N workers serves a trace, or whether none should."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from twinpool.cli.numbers import POSITIVE, Number
from twinpool.cli.outputs import check_writable, write_file
from twinpool.cli.printing import json_text
from twinpool.cli.processes import working_processes
from twinpool.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from twinpool.sim.planned import Planned
    from twinpool.sim.planner import Plan

NOT_FEASIBLE = 1


@click.command(short_help="Choose a split of workers for a trace")
@click.argument("trace")
@click.option(
    "--profile",
    metavar="NAME|FILE",
    help="What a worker's steps cost: llama-3.1-70b-h100-tp8, another name of the package, or what `twinpool profile` wrote.",
)
@click.option("--workers", type=click.IntRange(min=2, max=512), default=8, show_default=True, help="How many there are.")
@click.option(
    "--slo-ttft",
    type=POSITIVE,
    default=1.3,
    show_default=True,
    help="Objective for the first token, seconds.",
)
@click.option(
    "--slo-itl",
    type=POSITIVE,
    default=0.05,
    show_default=True,
    help="Objective for every later token, seconds.",
)
@click.option(
    "--rate-scale",
    type=Number(1e-6, 1e6),
    default=1.0,
    show_default=True,
    help="Play the trace so many times as fast.",
)
@click.option(
    "--sample",
    "sample_s",
    type=Number(1),
    metavar="SECONDS",
    help="How much of the trace is played, at the highest rate: 60, but 5,000 requests at most, unless you say more.",
)
@click.option(
    "--price",
    type=Number(0),
    metavar="MONEY",
    help="Of one worker and hour: shows what a million tokens of answers cost.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, and nothing else.")
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a page with bars and all figures too.",
)
@click.pass_context
def command(
    ctx: click.Context,
    trace: str,
    profile: str | None,
    workers: int,
    slo_ttft: float,
    slo_itl: float,
    rate_scale: float,
    sample_s: float | None,
    price: float | None,
    as_json: bool,
    html: Path | None,
) -> None:
    """Say how so many workers should serve the traffic of TRACE: all of them colocated, with which token budget a step; as two
    pools, with how many of each; or as pools that change by themselves (balanced). Every way is played in virtual time against
    the same requests.

    TRACE is a file (CSV with the columns TIMESTAMP,ContextTokens,GeneratedTokens, as Azure publishes them, or JSON lines with
    timestamp, input_length and output_length, as Mooncake does), or the name of an extract in the package. Its first request
    begins it, and --rate-scale 2 plays it twice as fast.

    \b
    twinpool plan azure-conv --profile llama-3.1-70b-h100-tp8 --workers 8 --rate-scale 15 --html plan.html

    Exit code 0: there is a plan. 1: the workers do not carry this traffic. 2: it cannot be planned.
    """
    from twinpool.config import Objectives
    from twinpool.sim.options import Fleet
    from twinpool.sim.plan_page import page_of
    from twinpool.sim.planner import FEWEST_REQUESTS, SAMPLE_S, plan
    from twinpool.sim.shelf import load_profile, names, open_trace
    from twinpool.workload.offered import scaled

    if profile is None:
        known = ", ".join(names("profiles", ".json"))
        raise UserError(f"say what a worker's steps cost, --profile NAME or FILE: {known}, or what `twinpool profile` wrote")
    check_writable(html=html)
    objectives = Objectives(slo_ttft_s=slo_ttft, slo_itl_s=slo_itl)
    fleet = Fleet(load_profile(profile), workers, objectives, price)
    requests = scaled(open_trace(trace), rate=rate_scale)
    with working_processes(min(2, os.cpu_count() or 1)) as executor:
        if sample_s is None:
            found = plan(requests, fleet, executor=executor)
        else:
            fewest = max(100, round(FEWEST_REQUESTS * sample_s / SAMPLE_S))
            most = sys.maxsize
            found = plan(requests, fleet, sample_s=sample_s, fewest_requests=fewest, most_requests=most, executor=executor)
    if html is not None:
        write_file(html, page_of(found, trace), "--html")
    if as_json:
        click.echo(json_text(found.as_json()))
    else:
        _show(found)
    if found.choice == "none":
        ctx.exit(NOT_FEASIBLE)


def _show(plan: "Plan") -> None:
    from rich.markup import escape

    from twinpool.cli.terminal import open_screen, tell

    screen, objectives = open_screen(), plan.objectives
    for line in (
        plan.recommendation,
        "",
        f"{plan.workers} workers of {plan.profile}; TTFT {objectives.slo_ttft_s:g} s, ITL {objectives.slo_itl_s * 1e3:g} ms",
        f"sample: {plan.sample}; asked for: {plan.asked_req_s:.1f} requests a second; no policy could exceed "
        f"{plan.bound_req_s:.1f}",
    ):
        tell(screen, escape(line))
    if not plan.options:
        tell(screen, "nothing was simulated")
        return
    tell(
        screen,
        "carried: the highest rate at which nine in ten requests meet the objectives; behind the bound: at the rate "
        "asked for, in seconds",
    )
    tell(screen, "the rate asked for is the mean of all the time; goodput is of its counted part, in which more may come")
    _show_options(screen, [each for each in plan.options if each.has_a_rate()])
    others = [each for each in plan.options if not each.has_a_rate()]
    if others:
        tell(screen, "the others:")
    for way, why in dict.fromkeys((each.way(), each.why_no_figures()) for each in others):
        names = [each.short_name() for each in others if (each.way(), each.why_no_figures()) == (way, why)]
        tell(screen, escape(f"  {way}: {', '.join(names)} ({why})"))
    for note in plan.notes:
        tell(screen, escape(f"note: {note}"))


def _show_options(screen: "Console", options: "list[Planned]") -> None:
    from rich.markup import escape

    from twinpool.cli.terminal import show_table, tell

    played = [each for each in options if each.ttft_s is not None]
    has_price = any(each.cost_per_million_output_tokens is not None for each in played)
    head = ["", "carried", "bound", "goodput", "TTFT", "short", "long", "worst gap", "useful", "flips"]
    head += ["cost of 1M tokens"] * has_price
    rows = [_row(each)[: len(head)] for each in played]
    if rows:
        show_table(screen, head, rows, is_figures=True)
    for each in options:
        if each.ttft_s is None:
            tell(screen, escape(f"{each.name()}: bound {each.bound_req_s:.1f}, {each.why_no_figures()}"))


def _row(each: "Planned") -> list[str]:
    flips, cost = each.role_changes if each.balance else None, each.cost_per_million_output_tokens
    rates = (each.capacity_req_s or 0.0, each.bound_req_s, each.goodput_req_s or 0.0)
    mean_s = each.ttft_s["mean"] if each.ttft_s else None
    return [
        each.name(),
        *(f"{rate:.1f}" for rate in rates),
        *map(_number, (mean_s, each.ttft_short_mean_s, each.ttft_long_mean_s, each.itl_worst_p99_s)),
        f"{each.useful_work_ratio or 0:.0%}",
        "-" if flips is None else str(flips),
        "-" if cost is None else f"{cost:.2f}",
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
