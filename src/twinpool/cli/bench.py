"""``twinpool bench``: open-loop load on any OpenAI-compatible service."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from twinpool.cli.files import KEY_VARIABLE, read_key
from twinpool.cli.help import Option, Sections
from twinpool.cli.numbers import POSITIVE, SECONDS
from twinpool.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from twinpool.bench.load import Progress
    from twinpool.bench.target import Target
    from twinpool.cli.traffic import Chosen

FILE = click.Path(path_type=Path)
COUNT = click.IntRange(1)

TRAFFIC = partial(click.option, cls=Option, section="Traffic")
SERVICE = partial(click.option, cls=Option, section="The service")
JUDGE = partial(click.option, cls=Option, section="Objectives")
OUTPUT = partial(click.option, cls=Option, section="Output")


def not_a_url(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """Before a URL is missed that was taken for a file's name."""
    if value is not None and "://" in value:
        raise UserError(
            f"--json {value} would write to a file of that name: write --json=- for standard output, or --json last"
        )
    return value


@click.command(cls=Sections, short_help="Measure a service under load")
@click.argument("url")
@TRAFFIC("--mix", default="mixed-60-40", metavar="MIX", help="A name, a file or a trace (below).  [default: mixed-60-40]")
@TRAFFIC("--rate", type=POSITIVE, metavar="R", help="Requests a second.  [default: 1, or as recorded]")
@TRAFFIC("--duration", "duration_s", type=SECONDS, metavar="S", help="[default: 60, or all of the trace]")
@TRAFFIC("--arrivals", default="poisson", metavar="SHAPE", help="poisson, constant, burst, ramp.  [default: poisson]")
@TRAFFIC("--seed", type=int, default=1, metavar="N", help="Same times and lengths again, never the same prompts.  [default: 1]")
@TRAFFIC("--scale-lengths", type=POSITIVE, default=1.0, metavar="F", help="Divide lengths, and the class limit.  [default: 1]")
@SERVICE("--model", metavar="NAME", help="Where it serves several.")
@SERVICE("--api-key-file", type=FILE, metavar="FILE", help=f"Its key.  [default: ${KEY_VARIABLE}]")
@SERVICE("--completions", "is_plain", is_flag=True, help="Ask /v1/completions.  [default: /v1/chat/completions]")
@SERVICE("--timeout", "timeout_s", type=SECONDS, default=300.0, metavar="S", help="For a whole answer.  [default: 300]")
@SERVICE("--metrics", metavar="URL...", multiple=True, help="Where it says how busy its workers are.  [default: its own]")
@JUDGE("--slo-ttft", "slo_ttft_s", type=SECONDS, default=1.3, metavar="S", help="Time to the first token.  [default: 1.3]")
@JUDGE("--slo-itl", "slo_itl_s", type=SECONDS, default=0.05, metavar="S", help="Gap between two tokens.  [default: 0.05]")
@JUDGE("--long-prompt-tokens", type=COUNT, default=1500, metavar="N", help="A longer prompt is long.  [default: 1500]")
@OUTPUT(
    "--json",
    "json_to",
    is_flag=False,
    flag_value="-",
    metavar="FILE",
    callback=not_a_url,
    help="The figures; --json=-, or --json last: standard output.",
)
@OUTPUT("--html", "html_to", metavar="FILE", help="A page with charts.")
@click.pass_context
def command(context: click.Context, /, **options: Any) -> None:
    """Send requests to the service at URL when they are meant to be sent, whatever becomes of those before; measure what a
    client feels.

    \b
    MIX is the name of a mix:  mixed-60-40 (the default: 60 % short prompts, 40 % long), mixed-90-10, short, long,
                               decode-heavy, drift, swing
        or a file:             a mix in .json or .toml, an Azure trace (CSV) or a Mooncake trace (JSON lines)

    Exit code 0, and 1 where every counted request failed.
    """
    asked = Asked(**options)
    from twinpool.cli.outputs import write_file
    from twinpool.cli.reports import people, write_json

    console = people(as_json=asked.json_to == "-")
    result, series = _measure(asked, console)
    from twinpool.cli.reports import show_report

    is_lost = 0 < result["requests"] == result["failed"]
    if is_lost:
        console.print("[bold red]EVERY COUNTED REQUEST FAILED: there are no times to be shown[/]")
    show_report(console, result)
    write_json(result, asked.json_to)
    if asked.html_to is not None:
        from twinpool.bench.pages import bench_page

        write_file(asked.html_to, bench_page(result, series), "--html")
        console.print(f"Charts: {asked.html_to}", markup=False, soft_wrap=True)
    if is_lost:
        context.exit(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options."""

    url: str
    mix: str
    rate: float | None
    duration_s: float | None
    arrivals: str
    seed: int
    scale_lengths: float
    model: str | None
    api_key_file: Path | None
    is_plain: bool
    timeout_s: float
    metrics: tuple[str, ...]
    slo_ttft_s: float
    slo_itl_s: float
    long_prompt_tokens: int
    json_to: str | None
    html_to: str | None


def _measure(asked: Asked, console: "Console") -> tuple[dict[str, Any], dict[str, Any]]:
    """The report as a dictionary, and its course over time. All that can be wrong with the options is found before any load."""
    import uvloop

    from twinpool.bench.target import target_of
    from twinpool.cli.outputs import check_writable
    from twinpool.cli.traffic import ARRIVALS, Wanted, choose_traffic

    if asked.arrivals not in ARRIVALS:
        raise UserError(f"--arrivals is one of {', '.join(ARRIVALS)}")
    check_writable(json=asked.json_to, html=asked.html_to)
    target = target_of(asked.url, api_key=read_key(asked.api_key_file), is_chat=not asked.is_plain)
    chosen = choose_traffic(
        Wanted(
            mix=asked.mix,
            arrivals=asked.arrivals,
            rate=asked.rate,
            duration_s=asked.duration_s,
            seed=asked.seed,
            scale_lengths=asked.scale_lengths,
            long_prompt_tokens=asked.long_prompt_tokens,
        )
    )
    return uvloop.run(_run(asked, target, chosen, console))


async def _run(asked: Asked, target: "Target", chosen: "Chosen", console: "Console") -> tuple[dict[str, Any], dict[str, Any]]:
    from rich.markup import escape

    from twinpool.bench.prepare import prepare
    from twinpool.bench.run import offer, report, warnings_of
    from twinpool.bench.use import Watch, pages_of
    from twinpool.cli.terminal import tell
    from twinpool.config import Objectives
    from twinpool.http1 import Pool
    from twinpool.measure.indicators import Limits

    objectives = Objectives(slo_ttft_s=asked.slo_ttft_s, slo_itl_s=asked.slo_itl_s, long_prompt_tokens=asked.long_prompt_tokens)
    pool, traffic = Pool(), chosen.told
    try:
        pages, _, unobserved = await pages_of(pool, target, asked.metrics)
        prepared = await prepare(pool, target, asked.model, timeout_s=asked.timeout_s, length_divisor=asked.scale_lengths)
        offered = f"{traffic.shape}; {traffic.mix}: {traffic.lengths}"
        tell(console, escape(f"{prepared.target.model} at {target.url}: {offered}"))
        if traffic.scale_lengths != 1:
            limit = traffic.long_prompt_tokens / traffic.scale_lengths
            tell(console, f"Lengths divided by {traffic.scale_lengths:g}; prompts over {limit:g} tokens are long.")
        with progress_on(console) as show:
            tested = await offer(
                pool,
                prepared,
                chosen.requests(),
                duration_s=traffic.duration_s,
                timeout_s=asked.timeout_s,
                objectives=objectives,
                watch=(lambda offered: Watch(pool, pages, None, offered)) if pages else None,
                show=show,
                long_tokens=asked.long_prompt_tokens / asked.scale_lengths,
            )
    finally:
        await pool.close()
    found = report([tested], Limits(ttft_long_s=asked.slo_ttft_s), unobserved=unobserved, seed=asked.seed)
    return as_result(
        found,
        tested.generator,
        traffic=traffic,
        service={"url": target.url, "model": prepared.target.model},
        warnings=warnings_of(found, tested.generator, shares_prefixes=chosen.shares_prefixes),
        notes=list(prepared.notes),
    ), tested.series.drawn()


def as_result(report: Any, generator: Any, **beside: Any) -> dict[str, Any]:
    """The report's keys, and beside them what belongs to a load."""
    import msgspec

    built: dict[str, Any] = msgspec.to_builtins(report)
    return {**built, "generator": msgspec.to_builtins(generator), **msgspec.to_builtins(beside)}


def progress_on(console: "Console") -> "AbstractContextManager[Callable[[Progress], None] | None]":
    """A line that tells how the load goes, on a terminal; nothing where there is none."""
    if not console.is_terminal:
        return nullcontext(None)
    return _Line(console)


class _Line:
    """The line, while the load runs."""

    def __init__(self, console: "Console") -> None:
        self._status = console.status("waiting for the first answer")

    def __enter__(self) -> "Callable[[Progress], None]":
        from twinpool.cli.reports import progress_line

        self._status.start()
        return lambda progress: self._status.update(progress_line(progress))

    def __exit__(self, *_: object) -> None:
        self._status.stop()
