"""A plan as one HTML page that needs nothing else: the recommendation, what each option carries against its bound, and the
figures of all."""

from html import escape

from twinpool.sim.options import Way
from twinpool.sim.planned import Planned
from twinpool.sim.planner import Plan

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.3rem}p.answer{font-size:1.1rem;border-left:4px solid #2a6f97;padding-left:1rem}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}td,th{text-align:right;padding:.2rem
.5rem;border-bottom:1px solid #ddd} td:first-child,th:first-child{text-align:left}svg text{font:12px system-ui,sans-serif}
@media(prefers-color-scheme:dark){body{background:#161616;color:#ddd}td,th{border-color:#444}svg text{fill:#ddd}} """
_LEFT, _WIDTH, _ROW = 330, 560, 22
_COLORS = {Way.COLOCATED: "#888", Way.POOLS: "#2a6f97", Way.BALANCED: "#5b8e3e"}


def page_of(plan: Plan, trace: str) -> str:
    objectives = plan.objectives
    notes = "".join(f"<li>{escape(note)}</li>" for note in plan.notes)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Plan for {escape(trace)}</title><style>{_STYLE}</style>"
        f"<h1>{plan.workers} workers for {escape(trace)}</h1><p class=answer>{escape(plan.recommendation)}</p>"
        f"<p>{escape(plan.profile)}; TTFT {objectives.slo_ttft_s:g} s, ITL {objectives.slo_itl_s * 1e3:g} ms; simulated: "
        f"{escape(plan.sample)}, {plan.asked_req_s:.1f} requests a second asked for.</p>"
        f"{_bars(plan)}{_table(plan)}<ul>{notes}</ul>"
    )


def _bars(plan: Plan) -> str:
    """A bar for what an option carries, a tick for its bound, lines for what is asked for and what no policy exceeds."""
    most = max([plan.bound_req_s, plan.asked_req_s, *(each.bound_req_s for each in plan.options)]) or 1.0
    height = _ROW * len(plan.options) + 40
    parts = [
        f'<svg viewBox="0 0 {_LEFT + _WIDTH + 60} {height}" role="img" aria-label="requests a second carried by each option">'
    ]

    def x(rate: float) -> float:
        return round(_LEFT + _WIDTH * rate / most, 1)

    for number, each in enumerate(plan.options):
        top = number * _ROW + 4
        parts.append(f'<text x="{_LEFT - 8}" y="{top + 13}" text-anchor="end">{escape(each.name())}</text>')
        carried = each.capacity_req_s
        if carried is not None:
            color = _COLORS[each.way()]
            parts.append(f'<rect x="{_LEFT}" y="{top}" width="{x(carried) - _LEFT}" height="{_ROW - 6}" fill="{color}"/>')
            parts.append(f'<text x="{x(carried) + 6}" y="{top + 13}">{carried:.1f}</text>')
        parts.append(f'<rect x="{x(each.bound_req_s) - 1}" y="{top - 2}" width="2" height="{_ROW - 2}" fill="#b5651d"/>')
    bottom = _ROW * len(plan.options) + 6
    for rate, label, color in ((plan.asked_req_s, "asked for", "#111"), (plan.bound_req_s, "no policy exceeds", "#b5651d")):
        parts.append(f'<line x1="{x(rate)}" x2="{x(rate)}" y1="0" y2="{bottom}" stroke="{color}" stroke-dasharray="4 3"/>')
        parts.append(f'<text x="{x(rate)}" y="{bottom + 16}" text-anchor="middle">{label} {rate:.1f}</text>')
    return "".join(parts) + "</svg><p>Requests a second. The tick on each row is the option's own bound.</p>"


def _table(plan: Plan) -> str:
    heads = [
        "option",
        "carried",
        "bound",
        "goodput",
        "TTFT mean s",
        "short s",
        "long s",
        "ITL p99 s",
        "worst gap p99 s",
        "useful work",
        "role changes",
    ]
    has_price = any(each.cost_per_million_output_tokens is not None for each in plan.options)
    if has_price:
        heads.append("cost of 1M tokens")
    rows = "".join(_row(each, len(heads), has_price=has_price) for each in plan.options)
    return (
        f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{rows}</table>"
        "<p>Carried: the highest rate at which nine in ten requests meet the objectives. What stands behind the bound is at "
        "the rate asked for, which is the mean of all the time; goodput is of its counted part, in which more may come.</p>"
    )


def _row(each: Planned, width: int, *, has_price: bool) -> str:
    name, bound = f"<td>{escape(each.name())}</td>", f"<td>{_number(each.bound_req_s, 1)}</td>"
    if each.ttft_s is None:
        return f"<tr>{name}<td>-</td>{bound}<td colspan={width - 3}>{escape(each.why_no_figures())}</td></tr>"
    cells = [
        _number(each.goodput_req_s, 1),
        _number(each.ttft_s["mean"], 3),
        _number(each.ttft_short_mean_s, 3),
        _number(each.ttft_long_mean_s, 3),
        _number(each.itl_p99_s, 3),
        _number(each.itl_worst_p99_s, 3),
        "-" if each.useful_work_ratio is None else f"{each.useful_work_ratio:.0%}",
        f"{each.role_changes}" if each.balance else "-",
    ]
    if has_price:
        cells.append(_number(each.cost_per_million_output_tokens, 2))
    return f"<tr>{name}<td>{_number(each.capacity_req_s, 1)}</td>{bound}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
