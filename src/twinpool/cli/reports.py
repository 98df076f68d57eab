"""What bench, compare and check have in common on the terminal and in files."""

from collections.abc import Iterable, Mapping
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from twinpool.bench.load import Progress
from twinpool.bench.words import LATENCY_HEAD, STALL_HEAD, failures_line, latency_rows, lengths_line, rate, seconds, stall_rows
from twinpool.cli.outputs import STDOUT, write_file
from twinpool.cli.printing import json_text
from twinpool.cli.terminal import open_screen, show_table, tell

_VERDICTS = {"pass": "green", "fail": "red", "unknown": "yellow"}


def people(*, as_json: bool) -> Console:
    """Where text for people goes: standard error, where standard output is for one JSON object."""
    return open_screen(stderr=as_json)


def write_json(result: Mapping[str, Any], where: str | None) -> None:
    """To a file, to standard output (``-``), or nowhere."""
    if where is None:
        return
    text = json_text(result)
    if where == STDOUT:
        click.echo(text)
    else:
        write_file(where, text + "\n", "--json")


def show_figures(console: Console, head: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """A table of plain text whose first column names the row; nothing where there is none."""
    escaped = [[*map(escape, row)] for row in rows]
    if escaped:
        show_table(console, [*head], escaped, is_figures=True)


def show_report(console: Console, result: Mapping[str, Any]) -> None:
    """Of one load."""
    if not result["generator"]["kept_lengths"]:
        tell(console, "[bold red]THE PROMPTS WERE NOT AS LONG AS ASKED FOR: see the notes[/]")
    tell(console, f"\n{failures_line(dict(result))}.")
    for kind, message in result["generator"]["messages"].items():
        if message:
            tell(console, f"  [yellow]{kind.replace('_', ' ')}[/]: {escape(message)}")
    show_figures(console, LATENCY_HEAD, latency_rows(dict(result)))
    show_figures(console, STALL_HEAD, stall_rows(dict(result)))
    if (lengths := lengths_line(dict(result))) is not None:
        tell(console, lengths)
    objectives = result["objectives"]
    limits = f"TTFT {seconds(objectives['slo_ttft_s'])} and ITL {seconds(objectives['slo_itl_s'])}"
    finished = f"{rate(result['throughput_req_s'], 'requests/s')} and {rate(result['throughput_output_tok_s'], 'tokens/s')}"
    tell(console, f"In the counted {seconds(result['measured_s'])} {finished} finished.")
    tell(console, f"Of those meant to be sent then, {rate(result['goodput_req_s'], 'requests/s')} kept {limits} (goodput).")
    show_verdict(console, result)
    for warning in (*result["warnings"], *result["notes"]):
        tell(console, f"[yellow]Note:[/] {escape(warning)}")
    rules = f"{result['warm_up_rule'].capitalize()}. {result['interval_rule'].capitalize()}."
    tell(console, f"[dim]{escape(rules)}[/]")


def show_verdict(console: Console, result: Mapping[str, Any]) -> None:
    verdict = result["verdict"]
    console.print(f"Verdict: [bold {_VERDICTS[verdict]}]{verdict}[/]")
    for reason in result["reasons"]:
        tell(console, f"  {escape(reason)}")


def show_comparison(console: Console, result: Mapping[str, Any]) -> None:
    """The arms side by side, in words, and by which rules."""
    tell(console, f"\n[bold]{escape(result['title'])}[/], on {escape(result['hardware'])}")
    for shown in (result["table"], result["change_table"]):
        show_figures(console, shown["head"], shown["rows"])
    for line in result["words"]:
        tell(console, escape(line))
    console.print("\n[bold]Fairness[/]")
    for line in result["fairness"]:
        tell(console, f"  {escape(line)}")
    for warning in result["warnings"]:
        tell(console, f"[yellow]Note:[/] {escape(warning)}")
    console.print(f"[dim]It took {result['took_s'] / 60:.1f} minutes.[/]")


def progress_line(progress: Progress) -> str:
    last = progress.last_ttft_s
    ttft = ", ".join(f"{'long' if is_long else 'short'} {seconds(last[is_long])}" for is_long in sorted(last))
    return (
        f"{min(progress.elapsed_s, progress.duration_s):.0f} of {progress.duration_s:.0f} s: {progress.sent} sent, "
        f"{progress.finished} finished, {progress.failed} failed, {progress.in_flight} under way"
        f"{f'; last TTFT {ttft}' if ttft else ''}"
    )
