"""``twinpool simulate``: a scenario in virtual time, with the decisions that the gateway would take."""

from typing import TYPE_CHECKING, Any

import click

from twinpool.cli.numbers import POSITIVE, Number
from twinpool.cli.printing import echo, json_text

if TYPE_CHECKING:
    from twinpool.sim.findings import Findings
    from twinpool.sim.scenario import Scenario


_LEGEND = (
    "offered, goodput, bound: requests a second that came, that met both objectives, and that no policy could exceed",
    "offered and goodput are of the counted time: without its first tenth and its last twentieth",
    "worst: each stream's longest gap; busy: share of the workers' time in steps; useful: the same if all steps were full",
    "flips: workers that changed their role",
)


@click.command(short_help="Run a scenario in virtual time")
@click.argument("scenario", required=False)
@click.option("--slo-ttft", type=POSITIVE, help="Objective for the first token, seconds.")
@click.option("--slo-itl", type=POSITIVE, help="Objective for every later token, seconds.")
@click.option("--seed", type=int, help="Of the traffic; the scenario's own by default.")
@click.option("--rate-scale", type=Number(min=1e-6, max=1e6), help="Play the traffic so many times as fast.")
@click.option("--list", "is_list", is_flag=True, help="List the gallery.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, and nothing else.")
def command(
    scenario: str | None,
    slo_ttft: float | None,
    slo_itl: float | None,
    seed: int | None,
    rate_scale: float | None,
    is_list: bool,
    as_json: bool,
) -> None:
    """Run SCENARIO, the name of one in the gallery or a TOML file, in virtual time: the controller that the gateway runs,
    against a model of the engines that it does not know. Without SCENARIO, list the gallery.

    \b
    twinpool simulate article

    A scenario of your own: copy one from src/twinpool/sim/gallery. How true this is: docs/simulator.md.
    """
    from twinpool.sim.findings import compared, findings_of
    from twinpool.sim.run import simulate
    from twinpool.sim.shelf import load_scenario

    if scenario is None or is_list:
        _list_gallery(as_json=as_json)
        return
    asked = _changed(load_scenario(scenario), slo_ttft, slo_itl, seed, rate_scale)
    found = {}
    for arm in asked.all_arms():
        if not as_json:
            echo(f"simulating {asked.duration_s:,.0f} s of {asked.name}: {arm.name}", err=True)
        found[arm.name] = findings_of(simulate(asked, arm))
    answer = compared(asked, found)
    if as_json:
        click.echo(json_text(answer))
        return
    _show(asked, found, answer.get("claims", []))


def _changed(
    scenario: "Scenario", slo_ttft: float | None, slo_itl: float | None, seed: int | None, rate_scale: float | None
) -> "Scenario":
    import msgspec

    replace = msgspec.structs.replace
    objectives = scenario.objectives
    if slo_ttft is not None:
        objectives = replace(objectives, slo_ttft_s=slo_ttft)
    if slo_itl is not None:
        objectives = replace(objectives, slo_itl_s=slo_itl)
    traffic = scenario.traffic
    if rate_scale is not None:
        traffic = replace(traffic, rate_scale=traffic.rate_scale * rate_scale)
    return replace(scenario, objectives=objectives, traffic=traffic, seed=scenario.seed if seed is None else seed)


def _list_gallery(*, as_json: bool) -> None:
    from twinpool.sim.shelf import load_scenario, names

    gallery = {name: load_scenario(name).about for name in names("gallery", ".toml")}
    if as_json:
        click.echo(json_text({"gallery": gallery}))
        return
    echo("`twinpool simulate NAME` runs one of these, `twinpool simulate FILE` one of your own:")
    for name, about in gallery.items():
        echo(f"  {name:<20} {about}")


def _show(scenario: "Scenario", found: "dict[str, Findings]", claims: list[dict[str, Any]]) -> None:
    from rich.markup import escape

    from twinpool.cli.terminal import open_screen, show_table, tell

    screen, objectives = open_screen(), scenario.objectives
    tell(screen, escape(f"{scenario.name}: {scenario.about or 'a scenario'}"))
    tell(screen, f"objectives: TTFT {objectives.slo_ttft_s:g} s, ITL {objectives.slo_itl_s * 1e3:g} ms; all times in seconds")
    head = ("", "offered", "goodput", "bound", "TTFT mean", "p99", "long", "ITL p99", "worst p99", "busy", "useful", "flips")
    show_table(screen, head, [[escape(name), *_figures(each)] for name, each in found.items()], is_figures=True)
    for line in _LEGEND:
        tell(screen, line)
    for name, each in found.items():
        for note in each.notes:
            tell(screen, escape(f"{name}: {note}"))
    if claims:
        rows = [(escape(row["what"]), f"{row['claimed']:.2f}", _number(row["found"], 2)) for row in claims]
        show_table(screen, ("what the article claims", "claimed", "found"), rows, is_figures=True)
        if any(row["found"] is None for row in claims):
            tell(screen, "-: no ratio, what it would be compared with is zero here")


def _figures(found: "Findings") -> list[str]:
    report = found.report
    ttft, itl, worst, long = report.ttft_s, report.itl_s, report.itl_worst_s, report.long.ttft_s
    times = (
        ttft.mean if ttft else None,
        ttft.p99 if ttft else None,
        long.mean if long else None,
        itl.p99 if itl else None,
        worst.p99 if worst else None,
    )
    return [
        *(f"{rate:.1f}" for rate in (found.offered_req_s, report.goodput_req_s, found.bound_req_s)),
        *map(_number, times),
        *map(_share, (report.utilization_mean_ratio, report.useful_work_ratio)),
        str(len(found.role_changes)),
    ]


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
