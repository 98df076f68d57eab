"""What bench, compare and check have in common on the terminal and in files."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from twinpool.bench.load import Progress
from twinpool.bench.words import LATENCY_HEAD, STALL_HEAD, failures_line, latency_rows, rate, seconds, stall_rows
from twinpool.cli.outputs import STDOUT, write_file

_VERDICTS = {"pass": "green", "fail": "red", "unknown": "yellow"}


def people(*, as_json: bool) -> Console:
    """Where text for people goes: standard error, where standard output is for one JSON object."""
    return Console(stderr=as_json, highlight=False)


def write_json(result: Mapping[str, Any], where: str | None) -> None:
    """To a file, to standard output (``-``), or nowhere."""
    if where is None:
        return
    text = json.dumps(result, allow_nan=False)
    if where == STDOUT:
        click.echo(text)
    else:
        write_file(where, text + "\n", "--json")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """The first column names the row, figures stand right."""
    drawn = Table(box=box.SIMPLE, header_style="bold", pad_edge=False)
    for number, name in enumerate(head):
        drawn.add_column(name, justify="left" if number == 0 else "right", no_wrap=number == 0)
    for row in rows:
        drawn.add_row(*map(escape, row))
    return drawn


def show_report(console: Console, result: Mapping[str, Any]) -> None:
    """Of one load."""
    console.print(f"\n{failures_line(dict(result))}.")
    for kind, message in result["generator"]["messages"].items():
        if message:
            console.print(f"  [yellow]{kind.replace('_', ' ')}[/]: {escape(message)}")
    console.print(table(LATENCY_HEAD, latency_rows(dict(result))))
    console.print(table(STALL_HEAD, stall_rows(dict(result))))
    console.print(
        f"Finished {rate(result['throughput_req_s'], 'requests/s')} and {rate(result['throughput_output_tok_s'], 'tokens/s')}; "
        f"goodput {rate(result['goodput_req_s'], 'requests/s')} within TTFT {seconds(result['objectives']['slo_ttft_s'])} and "
        f"ITL {seconds(result['objectives']['slo_itl_s'])}.",
        soft_wrap=True,
    )
    show_verdict(console, result)
    for warning in (*result["warnings"], *result["notes"]):
        console.print(f"[yellow]Note:[/] {escape(warning)}", soft_wrap=True)
    rules = f"{result['warm_up_rule'].capitalize()}. {result['interval_rule'].capitalize()}."
    console.print(f"[dim]{escape(rules)}[/]", soft_wrap=True)


def show_verdict(console: Console, result: Mapping[str, Any]) -> None:
    verdict = result["verdict"]
    console.print(f"Verdict: [bold {_VERDICTS[verdict]}]{verdict}[/]")
    for reason in result["reasons"]:
        console.print(f"  {escape(reason)}", soft_wrap=True)


def show_comparison(console: Console, result: Mapping[str, Any]) -> None:
    """The arms side by side, in words, and by which rules."""
    console.print(f"\n[bold]{escape(result['title'])}[/], on {escape(result['hardware'])}")
    for shown in (result["table"], result["change_table"]):
        console.print(table(shown["head"], shown["rows"]))
    for line in result["words"]:
        console.print(escape(line), soft_wrap=True)
    console.print("\n[bold]Fairness[/]")
    for line in result["fairness"]:
        console.print(f"  {escape(line)}", soft_wrap=True)
    for warning in result["warnings"]:
        console.print(f"[yellow]Note:[/] {escape(warning)}", soft_wrap=True)
    console.print(f"[dim]It took {result['took_s'] / 60:.1f} minutes.[/]")


def progress_line(progress: Progress) -> str:
    last = progress.last_ttft_s
    ttft = ", ".join(f"{'long' if is_long else 'short'} {seconds(last[is_long])}" for is_long in sorted(last))
    return (
        f"{min(progress.elapsed_s, progress.duration_s):.0f} of {progress.duration_s:.0f} s: {progress.sent} sent, "
        f"{progress.finished} finished, {progress.failed} failed, {progress.in_flight} under way"
        f"{f'; last TTFT {ttft}' if ttft else ''}"
    )
