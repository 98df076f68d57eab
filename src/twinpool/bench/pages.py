"""The pages of bench and compare: what a person would show their team."""

from collections.abc import Mapping
from typing import Any

from twinpool.bench.words import (
    LATENCY_HEAD,
    STALL_HEAD,
    change,
    failures_line,
    latency_rows,
    rate,
    ratio,
    seconds,
    spread,
    stall_rows,
)
from twinpool.page.document import (
    PALETTE,
    Chart,
    Part,
    Table,
    Text,
    Tile,
    Tiles,
    bar_config,
    chart_config,
    limit,
    line,
    points,
    render,
    time_axis,
    value_axis,
)

_TONES = {"pass": "good", "fail": "bad"}


def bench_page(result: Mapping[str, Any], series: Mapping[str, Any]) -> str:
    """Of one load."""
    traffic, objectives = result["traffic"], result["objectives"]
    warnings = [*result["warnings"], *result["notes"]]
    parts: list[Part] = [_tiles(result)]
    if warnings:
        parts.append(Text(warnings, "Before you believe it"))
    parts += [
        Chart(
            "TTFT by length class",
            chart_config(
                [
                    points("short prompts", series["ttft_short"], PALETTE[0]),
                    points("long prompts", series["ttft_long"], PALETTE[1]),
                    limit(f"objective, {seconds(objectives['slo_ttft_s'])}", objectives["slo_ttft_s"], traffic["duration_s"]),
                ],
                {"x": time_axis(traffic["duration_s"]), "y": value_axis("seconds to the first token", is_log=True)},
            ),
            "Each point is a request, where it was meant to be sent; its time counts from there.",
        ),
        Chart(
            "Gaps in the streams",
            chart_config(
                [
                    line("worst gap of any stream", series["at_s"], series["worst_gap_s"], PALETTE[5], stepped="middle"),
                    limit(f"objective, {seconds(objectives['slo_itl_s'])}", objectives["slo_itl_s"], traffic["duration_s"]),
                ],
                {"x": time_axis(traffic["duration_s"]), "y": value_axis("seconds without a token", is_log=True)},
            ),
            "A pooled percentile hides a stall; the worst gap in each stretch of time does not.",
        ),
        Chart(
            "The load",
            chart_config(
                [
                    line("offered, short", series["at_s"], series["offered_short_req_s"], PALETTE[0], stepped="middle"),
                    line("offered, long", series["at_s"], series["offered_long_req_s"], PALETTE[1], stepped="middle"),
                    line("under way", series["at_s"], series["in_flight"], PALETTE[4], yAxisID="y1"),
                    line("failed", series["at_s"], series["failed"], PALETTE[5], yAxisID="y1"),
                ],
                {
                    "x": time_axis(traffic["duration_s"]),
                    "y": value_axis("requests a second"),
                    "y1": value_axis("requests", position="right", grid={"drawOnChartArea": False}),
                },
            ),
            "Open loop: requests are sent when they are meant to be, whatever has become of those before.",
        ),
        Table(LATENCY_HEAD, latency_rows(dict(result)), "Times"),
        Table(STALL_HEAD, stall_rows(dict(result)), "Stalls"),
        Text(_how(result), "How it was measured"),
    ]
    service = result["service"]
    return render("Twinpool bench", f"{service['model']} at {service['url']}", parts)


def _tiles(result: Mapping[str, Any]) -> Tiles:
    long, intervals = result["long"], result["intervals"]
    ttft = long["ttft_s"]
    worst = result["itl_worst_s"]
    return Tiles(
        [
            Tile("Verdict", result["verdict"], "by the two indicators", _TONES.get(result["verdict"], "")),
            Tile(
                "TTFT, long prompts",
                seconds(ttft["mean"] if ttft else None),
                spread(long["intervals"].get("ttft_s", {}).get("mean")),
            ),
            Tile("Worst gap, p99", seconds(worst["p99"] if worst else None), f"worst {seconds(worst['max'])}" if worst else ""),
            Tile("Stood still", ratio(result["stalled_time_ratio"]), "of the streams' time"),
            Tile(
                "Goodput",
                rate(result["goodput_req_s"], "req/s"),
                f"of {rate(result['throughput_req_s'], 'req/s')} finished",
            ),
            Tile(
                "Output",
                rate(result["throughput_output_tok_s"], "tok/s"),
                spread(intervals.get("throughput_output_tok_s"), lambda value: f"{value:.3g}"),
            ),
            Tile("Failed", str(result["failed"]), f"of {result['requests']}", "bad" if result["failed"] else ""),
        ]
    )


def _how(result: Mapping[str, Any]) -> list[str]:
    traffic, generator = result["traffic"], result["generator"]
    scale = traffic["scale_lengths"]
    scaled = (
        f"Lengths and the border of {traffic['long_prompt_tokens']:,} tokens are divided by {scale:g}."
        if scale != 1
        else f"Prompts over {traffic['long_prompt_tokens']:,} tokens are long."
    )
    return [
        f"{traffic['shape']}; {traffic['mix']}: {traffic['lengths']}. Seed {traffic['seed']}. {scaled}",
        f"{failures_line(dict(result))}. {result['warm_up_rule'].capitalize()}. {result['interval_rule'].capitalize()}.",
        f"The load client sent its requests {seconds(generator['lag_p50_s'])} late in the median, "
        f"{seconds(generator['lag_p99_s'])} at p99, and took {ratio(generator['cpu_share'])} of a core. "
        "Tokens are those that the engine counted; prompts begin with fresh words, so that no cache knows them.",
        *result["reasons"],
    ]


def compare_page(result: Mapping[str, Any]) -> str:
    """Of the arms of a comparison."""
    arms: Mapping[str, Any] = result["arms"]
    names = list(arms)

    def of(pick: Any) -> list[float | None]:
        return [pick(arms[name]) for name in names]

    parts: list[Part] = [
        Tiles(
            [
                Tile(
                    "This traffic wants",
                    "cannot tell" if result["recommendation"] == "unknown" else result["recommendation"],
                    result["recommendation_why"],
                ),
                Tile("Throughput", change(result["change"]["throughput_ratio"]), _interval(result, "throughput_ratio")),
                Tile("Goodput", change(result["change"]["goodput_ratio"]), _interval(result, "goodput_ratio")),
                Tile("Mean TTFT", change(result["change"]["ttft_mean_ratio"]), _interval(result, "ttft_mean_ratio")),
                Tile("Worst gaps", change(result["change"]["itl_worst_p99_ratio"]), _interval(result, "itl_worst_p99_ratio")),
            ]
        ),
        Text(result["words"], "In words"),
        Table(result["table"]["head"], result["table"]["rows"], "The arms"),
        Table(result["change_table"]["head"], result["change_table"]["rows"], "What changed"),
        Chart(
            "TTFT",
            bar_config(
                names,
                {
                    "short, mean": of(lambda arm: (arm["short"]["ttft_s"] or {}).get("mean")),
                    "long, mean": of(lambda arm: (arm["long"]["ttft_s"] or {}).get("mean")),
                    "long, p99": of(lambda arm: (arm["long"]["ttft_s"] or {}).get("p99")),
                },
                "seconds",
            ),
        ),
        Chart(
            "Gaps",
            bar_config(
                names,
                {
                    "ITL, p99": of(lambda arm: (arm["itl_s"] or {}).get("p99")),
                    "worst gap of a stream, p50": of(lambda arm: (arm["itl_worst_s"] or {}).get("p50")),
                    "worst gap of a stream, p99": of(lambda arm: (arm["itl_worst_s"] or {}).get("p99")),
                },
                "seconds",
            ),
        ),
        Chart(
            "Requests a second",
            bar_config(
                names,
                {
                    "finished": of(lambda arm: arm["throughput_req_s"]),
                    "within the objectives": of(lambda arm: arm["goodput_req_s"]),
                },
                "requests a second",
            ),
        ),
        Text([*result["fairness"], *result["warnings"]], "Fairness"),
    ]
    return render("Twinpool compare", result["title"], parts)


def _interval(result: Mapping[str, Any], key: str) -> str:
    interval = result["change"]["intervals"].get(key)
    return f"{change(interval[0])} to {change(interval[1])}" if interval else ""
