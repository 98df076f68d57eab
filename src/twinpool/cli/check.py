"""``twinpool check``: a verdict on any service, with nothing installed there."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from twinpool.cli.files import read_key
from twinpool.cli.help import Option, Sections
from twinpool.cli.numbers import SECONDS, Number
from twinpool.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

FILE = click.Path(path_type=Path)

LIMITS = partial(click.option, cls=Option, section="What is fit")
SERVICE = partial(click.option, cls=Option, section="The service")
OTHER = partial(click.option, cls=Option)


@click.command(cls=Sections, short_help="Judge any service by two indicators")
@click.argument("urls", nargs=-1, metavar="URL [URL]")
@LIMITS("--ttft-limit", "ttft_limit_s", type=SECONDS, default=1.3, metavar="S", help="TTFT of long requests.  [default: 1.3]")
@LIMITS("--utilization-floor", type=Number(0, 1), default=0.85, metavar="SHARE", help="At the peak.  [default: 0.85]")
@LIMITS("--long-prompt-tokens", type=click.IntRange(16), default=1500, metavar="N", help="Longer is long.  [default: 1500]")
@LIMITS("--slo-itl", "slo_itl_s", type=SECONDS, default=0.05, metavar="S", help="Gap between two tokens.  [default: 0.05]")
@SERVICE("--metrics", metavar="URL...", multiple=True, help="Twinpool, vLLM, SGLang, DCGM exporter.  [default: its own]")
@SERVICE("--model", metavar="NAME", help="Where it serves several.")
@SERVICE("--api-key-file", type=FILE, metavar="FILE", help="Its key.  [default: $TWINPOOL_API_KEY]")
@SERVICE("--completions", "is_plain", is_flag=True, help="Ask /v1/completions.  [default: /v1/chat/completions]")
@SERVICE("--duration", "duration_s", type=SECONDS, default=420.0, metavar="S", help="At most.  [default: 420]")
@SERVICE("--timeout", "timeout_s", type=SECONDS, default=120.0, metavar="S", help="For a whole answer.  [default: 120]")
@OTHER("--json", "as_json", is_flag=True, help="One JSON object, nothing else.")
@click.pass_context
def command(context: click.Context, /, **options: Any) -> None:
    """Probe the service at URL with a small load (three short streams, one long prompt at a time, half of the time) and say
    whether it is fit: TTFT of long requests, use of its workers at the peak. Says also whether running streams stand still
    while long prompts are read. With two URLs: how the second compares with the first.

    Exit code 0: pass, 1: fail, 2: could not tell.
    """
    asked = Options(**options)
    if not 1 <= len(asked.urls) <= 2:
        raise UserError("give the URL of one service to check, or of two to compare")
    if len(asked.urls) == 2 and asked.metrics:
        raise UserError("--metrics is for one service: with two, each one's own page is read")
    from twinpool.cli.outputs import STDOUT
    from twinpool.cli.reports import people, write_json

    console = people(as_json=asked.as_json)
    results, comparison = _check(asked, console)
    from twinpool.bench.check import exit_code

    code = exit_code([result["verdict"] for result in results])
    if asked.as_json:
        one = results[0] if comparison is None else {"services": results, "change": comparison, "verdict": _overall(code)}
        write_json({**one, "exit_code": code}, STDOUT)
    context.exit(code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was given."""

    urls: tuple[str, ...]
    ttft_limit_s: float
    utilization_floor: float
    long_prompt_tokens: int
    slo_itl_s: float
    metrics: tuple[str, ...]
    model: str | None
    api_key_file: Path | None
    is_plain: bool
    duration_s: float
    timeout_s: float
    as_json: bool


def _check(options: Options, console: "Console") -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    import uvloop

    from twinpool.bench.check import Asked
    from twinpool.bench.target import target_of
    from twinpool.config import Objectives
    from twinpool.measure.indicators import Limits

    asked = Asked(
        limits=Limits(ttft_long_s=options.ttft_limit_s, utilization_floor_ratio=options.utilization_floor),
        objectives=Objectives(
            slo_ttft_s=options.ttft_limit_s, slo_itl_s=options.slo_itl_s, long_prompt_tokens=options.long_prompt_tokens
        ),
        duration_s=options.duration_s,
        timeout_s=options.timeout_s,
        model=options.model,
        metrics=options.metrics,
    )
    key = read_key(options.api_key_file)
    targets = [target_of(url, api_key=key, is_chat=not options.is_plain) for url in options.urls]
    return uvloop.run(_run(asked, targets, console))


async def _run(asked: Any, targets: list[Any], console: "Console") -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    from twinpool.bench.check import check_one, compare_two, compared_lines, merge, result_of, turns
    from twinpool.http1 import Pool

    pool = Pool()
    try:
        parts: list[list[Any]] = [[] for _ in targets]
        for index, enough in turns(len(targets)):
            with _showing(console, targets[index].url) as show:
                parts[index].append(await check_one(pool, targets[index], asked, enough_long=enough, show=show))
    finally:
        await pool.close()
    checked = [merge(of_one) for of_one in parts]
    results = [result_of(one, asked) for one in checked]
    for result in results:
        _show(console, result)
    if len(checked) == 1:
        return results, None
    from rich.markup import escape

    from twinpool.cli.terminal import tell

    comparison = compare_two(checked[0], checked[1], asked)
    console.print()
    for line in compared_lines(comparison, targets[0].url, targets[1].url):
        tell(console, escape(line))
    return results, comparison


def _show(console: "Console", result: dict[str, Any]) -> None:
    from rich.markup import escape

    from twinpool.bench.words import STALL_HEAD, failures_line, seconds, stall_rows
    from twinpool.cli.reports import show_figures, show_verdict
    from twinpool.cli.terminal import tell

    service = result["service"]
    tell(console, f"\n[bold]{escape(service['model'])}[/] at {escape(service['url'])}")
    show_verdict(console, result)
    tell(console, f"  {escape(result['advice'])}")
    tell(console, f"\n{failures_line(result)}, in {seconds(result['probed_s'])}.")
    if result["use_source"]:
        tell(console, f"Use is read from {escape(result['use_source'])}.")
    show_figures(console, STALL_HEAD, stall_rows(result))
    for kind, message in result["messages"].items():
        tell(console, f"[yellow]{kind.replace('_', ' ')}:[/] {escape(message)}")
    for note in result["notes"]:
        tell(console, f"[yellow]Note:[/] {escape(note)}")


def _showing(console: "Console", url: str) -> Any:
    from contextlib import nullcontext

    if not console.is_terminal:
        return nullcontext(None)
    return _Line(console, url)


class _Line:
    """Tells how far a probe is."""

    def __init__(self, console: "Console", url: str) -> None:
        self._url = url
        from rich.markup import escape

        self._status = console.status(f"asking {escape(url)}")

    def __enter__(self) -> Any:
        from rich.markup import escape

        from twinpool.bench.words import seconds

        self._status.start()
        return lambda seen: self._status.update(
            f"{escape(self._url)}: {seen.long_answered} long requests answered in {seen.elapsed_s:.0f} s"
            f"{f', last TTFT {seconds(seen.last_ttft_s)}' if seen.last_ttft_s else ''}"
        )

    def __exit__(self, *_: object) -> None:
        self._status.stop()


def _overall(code: int) -> str:
    return {0: "pass", 1: "fail"}.get(code, "unknown")
