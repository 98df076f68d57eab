"""A page out of parts: text, figures, tables, charts.

A chart is a configuration of Chart.js as it documents them. The page forbids itself every connection (its own content policy),
so that a report which somebody mails around tells nobody that it was opened.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from itertools import count
from typing import Any

PALETTE = ("#2563eb", "#d9480f", "#2b8a3e", "#7048e8", "#868e96", "#c2255c")
"""Told apart by people who do not see red and green, too."""


@dataclass(frozen=True, slots=True)
class Text:
    """Paragraphs."""

    lines: Sequence[str]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure that everybody looks at first. `tone`: good, bad, or neither."""

    name: str
    value: str
    note: str = ""
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Side by side."""

    tiles: Sequence[Tile]


@dataclass(frozen=True, slots=True)
class Table:
    """The first column names the row."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """`config` is Chart.js's."""

    title: str
    config: Mapping[str, Any]
    note: str = ""


Part = Text | Tiles | Table | Chart


def render(title: str, subtitle: str, parts: Sequence[Part]) -> str:
    """The whole page."""
    charts = [part for part in parts if isinstance(part, Chart)]
    number = count()
    body = "\n".join(_part(part, next(number) if isinstance(part, Chart) else 0) for part in parts)
    configs = json.dumps([chart.config for chart in charts], allow_nan=False).replace("<", "\\u003c")
    return _PAGE.format(
        title=escape(title),
        subtitle=escape(subtitle),
        body=body,
        style=_STYLE,
        library=_library(),
        configs=configs,
        script=_SCRIPT,
    )


def time_axis(until: float, title: str = "seconds from the beginning") -> dict[str, Any]:
    return {"type": "linear", "title": {"display": True, "text": title}, "min": 0, "max": until}


def value_axis(title: str, *, is_log: bool = False, **more: Any) -> dict[str, Any]:
    kind = "logarithmic" if is_log else "linear"
    return {"type": kind, "title": {"display": True, "text": title}, **({} if is_log else {"beginAtZero": True}), **more}


def points(label: str, values: Sequence[tuple[float, float]], color: str) -> dict[str, Any]:
    """A data set of single points."""
    data = [{"x": x, "y": y} for x, y in values]
    look = {"backgroundColor": f"{color}aa", "borderColor": color, "pointRadius": 2.5, "borderWidth": 0}
    return {"type": "scatter", "label": label, "data": data, **look}


def line(label: str, at: Sequence[float], values: Sequence[float | None], color: str, **more: Any) -> dict[str, Any]:
    """A data set joined by a line; None is a hole in it."""
    data = [{"x": x, "y": y} for x, y in zip(at, values, strict=True)]
    look = {"borderColor": color, "backgroundColor": f"{color}22", "pointRadius": 0, "borderWidth": 1.5, "tension": 0}
    return {"type": "line", "label": label, "data": data, **look, **more}


def limit(label: str, value: float, until: float) -> dict[str, Any]:
    """A dashed level, such as an objective."""
    return line(label, [0.0, until], [value, value], "#495057", borderDash=[6, 4], borderWidth=1)


def chart_config(datasets: Sequence[Mapping[str, Any]], scales: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "data": {"datasets": list(datasets)},
        "options": {
            "animation": False,
            "maintainAspectRatio": False,
            "interaction": {"mode": "nearest", "intersect": False},
            "plugins": {"legend": {"position": "bottom", "labels": {"boxWidth": 12}}},
            "scales": dict(scales),
        },
    }


def bar_config(labels: Sequence[str], datasets: Mapping[str, Sequence[float | None]], title: str) -> dict[str, Any]:
    """Groups of bars, one group a label."""
    drawn = [
        {"label": name, "data": list(values), "backgroundColor": color}
        for (name, values), color in zip(datasets.items(), PALETTE, strict=False)
    ]
    return {
        "type": "bar",
        "data": {"labels": list(labels), "datasets": drawn},
        "options": {
            "animation": False,
            "maintainAspectRatio": False,
            "plugins": {"legend": {"position": "bottom", "labels": {"boxWidth": 12}}},
            "scales": {"y": value_axis(title)},
        },
    }


def _part(part: Part, number: int) -> str:
    """`number` is the chart's, in their order."""
    if isinstance(part, Chart):
        note = f"<figcaption>{escape(part.note)}</figcaption>" if part.note else ""
        canvas = f'<div class="chart"><canvas id="chart-{number}"></canvas></div>'
        return f"<figure><h2>{escape(part.title)}</h2>{canvas}{note}</figure>"
    if isinstance(part, Tiles):
        return f'<div class="tiles">{"".join(_tile(tile) for tile in part.tiles)}</div>'
    if isinstance(part, Table):
        head = "".join(f"<th>{escape(cell)}</th>" for cell in part.head)
        rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in part.rows)
        return f"<section>{_title(part.title)}<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></section>"
    return f"<section>{_title(part.title)}{''.join(f'<p>{escape(line)}</p>' for line in part.lines)}</section>"


def _tile(tile: Tile) -> str:
    tone = f" {tile.tone}" if tile.tone in ("good", "bad") else ""
    return (
        f'<div class="tile{tone}"><span>{escape(tile.name)}</span><b>{escape(tile.value)}</b><i>{escape(tile.note)}</i></div>'
    )


def _title(title: str) -> str:
    return f"<h2>{escape(title)}</h2>" if title else ""


@cache
def _library() -> str:
    return (files("twinpool.page") / "chartjs" / "chart.umd.min.js").read_text(encoding="utf-8")


_STYLE = """
:root{color-scheme:light;font:15px/1.5 system-ui,sans-serif;color:#212529;background:#f8f9fa}
body{max-width:1080px;margin:0 auto;padding:2rem 1.25rem 4rem}
h1{margin:0;font-size:1.7rem}h2{font-size:1.05rem;margin:0 0 .6rem}header p{margin:.2rem 0 1.5rem;color:#495057}
section,figure{background:#fff;border:1px solid #dee2e6;border-radius:8px;padding:1rem 1.2rem;margin:0 0 1rem}
figcaption,section p{color:#495057;margin:.35rem 0 0;font-size:.92rem}.chart{height:300px;position:relative}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(125px,1fr));gap:.8rem;margin:0 0 1rem}
.tile{background:#fff;border:1px solid #dee2e6;border-radius:8px;padding:.7rem .9rem;display:flex;flex-direction:column}
.tile span{color:#495057;font-size:.85rem}.tile b{font-size:1.45rem}.tile i{font-style:normal;color:#868e96;font-size:.8rem}
.tile.good b{color:#2b8a3e}.tile.bad b{color:#c92a2a}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}section{overflow-x:auto}
th,td{text-align:right;padding:.3rem .6rem;border-bottom:1px solid #e9ecef}th:first-child,td:first-child{text-align:left}
th{font-size:.85rem;color:#495057}
"""

_SCRIPT = """
const configs = JSON.parse(document.getElementById("configs").textContent);
configs.forEach((config, number) => new Chart(document.getElementById("chart-" + number), config));
document.documentElement.dataset.drawn = configs.length;
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{title}</h1><p>{subtitle}</p></header>
{body}
<script>{library}</script>
<script type="application/json" id="configs">{configs}</script>
<script>{script}</script>
</body>
</html>
"""
