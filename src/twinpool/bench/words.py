"""Figures as people read them; shared by the terminal and the page."""

from typing import Any


def seconds(value: float | None) -> str:
    """``45 ms``, ``1.26 s``, ``-``."""
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 0.9995 else f"{value:.2f} s" if value < 100 else f"{value:.0f} s"


def ratio(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if 0 < value < 0.1 else f"{value:.0%}"


def rate(value: float | None, unit: str) -> str:
    """Three digits, and no more of a nought than that."""
    if value is None:
        return "-"
    return f"{value:,.0f} {unit}" if value >= 999.5 else f"{value:.3g} {unit}"


def spread(values: "tuple[float, float] | list[float] | None", show: Any = seconds) -> str:
    """An interval, as what stands behind a figure; empty without one."""
    return f"{show(values[0])} to {show(values[1])}" if values else ""


def change(value: float | None) -> str:
    """A ratio to a base, as a change of it: ``+12 %``."""
    if value is None:
        return "-"
    return "no change" if abs(value - 1) < 0.0005 else f"{(value - 1) * 100:+.0f} %"


def latency_rows(report: dict[str, Any]) -> list[list[str]]:
    """A row for each time and class: mean, p50, p90, p99, and the 95 % interval of the mean."""
    rows = []
    for name, key in (("TTFT", "ttft_s"), ("ITL", "itl_s"), ("whole answer", "e2e_s")):
        for label, figures in (("all", report), ("short", report["short"]), ("long", report["long"])):
            found = figures[key]
            if found is None:
                continue
            interval = figures["intervals"].get(key, {}).get("mean")
            rows.append(
                [f"{name}, {label}", *(seconds(found[part]) for part in ("mean", "p50", "p90", "p99")), spread(interval)]
            )
    return rows


def stall_rows(report: dict[str, Any]) -> list[list[str]]:
    """A row for each class: the longest gap of each stream, and the share of time that streams stood still."""
    rows = []
    for label, figures in (("all", report), ("short", report["short"]), ("long", report["long"])):
        worst = figures["itl_worst_s"]
        if worst is not None:
            parts = [seconds(worst[part]) for part in ("p50", "p90", "p99", "max")]
            rows.append([label, *parts, ratio(figures["stalled_time_ratio"])])
    return rows


def lengths_line(report: dict[str, Any]) -> str | None:
    """What was really sent; None where nothing was answered."""
    means = [(report[name]["prompt_tokens_mean"], name) for name in ("short", "long")]
    told = " and ".join(f"{mean:,.0f} tokens ({name})" for mean, name in means if mean is not None)
    return f"Prompts had {told} in the mean, answers {report['output_tokens_mean']:,.0f}." if told else None


LATENCY_HEAD = ("Time", "mean", "p50", "p90", "p99", "95 % of the mean")
STALL_HEAD = ("Worst gap of each stream", "p50", "p90", "p99", "worst", "stood still")


def failures_line(report: dict[str, Any]) -> str:
    """Never left out: what did not come is a result, too."""
    kinds = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(report["failures"].items()))
    beside = report.get("generator", {}).get("failed", 0) - report["failed"]
    uncounted = f", and {beside} that {'is' if beside == 1 else 'are'} not counted" if beside > 0 else ""
    return f"{report['requests']} requests counted, {report['failed']} failed{f' ({kinds})' if kinds else ''}{uncounted}"
