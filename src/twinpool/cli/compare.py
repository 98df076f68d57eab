"""``twinpool compare``: the same workers colocated, disaggregated and balanced."""

import platform
import secrets
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from twinpool.cli.files import read_key
from twinpool.cli.help import Option, Sections
from twinpool.cli.numbers import POSITIVE, SECONDS
from twinpool.errors import UserError

FILE = click.Path(path_type=Path)

WORKERS = partial(click.option, cls=Option, section="Workers")
TRAFFIC = partial(click.option, cls=Option, section="Traffic")
OUTPUT = partial(click.option, cls=Option, section="Output")


@click.command(cls=Sections, short_help="Compare colocated, disaggregated and balanced")
@WORKERS("--workers", type=click.IntRange(2), metavar="N", help="Embedded engines to start.  [default: 3]")
@WORKERS("--engine", "engines", multiple=True, metavar="URL...", help="Engines that run already, instead; each URL by itself.")
@WORKERS("--model", metavar="MODEL", help="GGUF file, or repo/name[:file]; of engines that run: which.")
@WORKERS("--batch-tokens", type=click.IntRange(16), metavar="N", help="Computed in one step.  [default: colocated's best]")
@WORKERS("--split", metavar="P:D", help="Prefill and decode workers.  [default: the best]")
@WORKERS("--api-key-file", type=FILE, metavar="FILE", help="The engines' key.")
@TRAFFIC("--mix", default="mixed-60-40", metavar="MIX", help="A name, or a mix in .json or .toml.  [default: mixed-60-40]")
@TRAFFIC("--rate", type=POSITIVE, metavar="R", help="Requests a second.  [default: --load]")
@TRAFFIC("--load", type=POSITIVE, default=0.7, metavar="SHARE", help="Of what colocated can finish.  [default: 0.7]")
@TRAFFIC("--rounds", type=click.IntRange(1), default=2, metavar="N", help="[default: 2]")
@TRAFFIC("--duration", "duration_s", type=SECONDS, metavar="S", help="Of a round.  [default: 60 long requests an arm]")
@TRAFFIC(
    "--scale-lengths",
    type=POSITIVE,
    metavar="F",
    help="Divide lengths.  [default: to end in time]",
)
@TRAFFIC("--minutes", type=POSITIVE, default=14.0, metavar="M", help="Divide lengths to end within these.  [default: 14]")
@TRAFFIC("--seed", type=int, default=1, metavar="N", help="[default: 1]")
@TRAFFIC("--slo-ttft", "slo_ttft_s", type=SECONDS, default=1.3, metavar="S", help="Time to the first token.  [default: 1.3]")
@TRAFFIC("--slo-itl", "slo_itl_s", type=SECONDS, default=0.05, metavar="S", help="Gap between two tokens.  [default: 0.05]")
@OUTPUT(
    "--json",
    "json_to",
    is_flag=False,
    flag_value="-",
    metavar="FILE",
    help="The figures; --json=-, or --json last: standard output.",
)
@OUTPUT("--html", "html_to", metavar="FILE", help="A page with charts.")
def command(**options: Any) -> None:
    """Serve the same traffic with the same workers in three ways, in alternating rounds: each worker doing everything
    (colocated), some reading and some writing (disaggregated), and as Twinpool balances them. Says what helped, what it cost
    and which way this traffic wants.
    """
    asked = Asked(**options)
    from twinpool.cli.outputs import check_writable, write_file
    from twinpool.cli.reports import people, show_comparison, write_json

    check_writable(json=asked.json_to, html=asked.html_to)
    console = people(as_json=asked.json_to == "-")
    result = _compare(asked, console)
    show_comparison(console, result)
    write_json(result, asked.json_to)
    if asked.html_to is not None:
        from twinpool.bench.pages import compare_page

        write_file(asked.html_to, compare_page(result), "--html")
        console.print(f"Charts: {asked.html_to}", markup=False, soft_wrap=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options."""

    workers: int | None
    engines: tuple[str, ...]
    model: str | None
    batch_tokens: int | None
    split: str | None
    api_key_file: Path | None
    mix: str
    rate: float | None
    load: float
    rounds: int
    duration_s: float | None
    scale_lengths: float | None
    minutes: float
    seed: int
    slo_ttft_s: float
    slo_itl_s: float
    json_to: str | None
    html_to: str | None


def _compare(asked: Asked, console: Any) -> dict[str, Any]:
    import uvloop
    from rich.markup import escape

    from twinpool.bench.compare import compare
    from twinpool.cli.bench import progress_on
    from twinpool.cli.terminal import tell

    settings = _settings(asked)
    began = time.monotonic()

    def say(text: str) -> None:
        tell(console, f"[dim]{time.monotonic() - began:4.0f} s[/]  {escape(text)}")

    with tempfile.NamedTemporaryFile("w", suffix=".secret") as secret, progress_on(console) as show:
        secret.write(secrets.token_hex(32))
        secret.flush()
        result: dict[str, Any] = uvloop.run(compare(settings, Path(secret.name), say, show))
    result["took_s"] = round(time.monotonic() - began, 1)
    result["hardware"] = _hardware()
    return result


def _settings(asked: Asked) -> Any:
    """All that can be wrong with the options is found here."""
    from twinpool.bench.arms import ARMS
    from twinpool.bench.compared import DEFAULT_WORKERS, Settings
    from twinpool.cli.fleet import engine_url
    from twinpool.cli.traffic import check_size, mix_of
    from twinpool.cli.worker import require_engine
    from twinpool.config import Objectives

    if asked.engines:
        if asked.workers or asked.batch_tokens:
            raise UserError("--engine compares engines that run already, --workers and --batch-tokens start some: give one")
    else:
        require_engine()
    traffic = mix_of(asked.mix)
    requests = (asked.rate or 0.0) * (asked.duration_s or 0.0) * asked.rounds * len(ARMS)
    check_size(traffic.most_tokens, requests, scale_lengths=asked.scale_lengths or 1.0)
    count = len(asked.engines) or asked.workers or DEFAULT_WORKERS
    options: list[str] = []
    if asked.batch_tokens:
        options += ["--batch-tokens", str(asked.batch_tokens)]
    if asked.model and not asked.engines:
        options += ["--model", asked.model]
    return Settings(
        mix=asked.mix,
        traffic=traffic,
        engines=tuple(engine_url(url) for url in asked.engines),
        workers=count,
        worker_options=tuple(options),
        rounds=asked.rounds,
        rate=asked.rate,
        load=asked.load,
        duration_s=asked.duration_s,
        scale_lengths=asked.scale_lengths,
        split=_split(asked.split, count),
        seed=asked.seed,
        minutes=asked.minutes,
        api_key=read_key(asked.api_key_file),
        model=asked.model if asked.engines else None,
        objectives=Objectives(slo_ttft_s=asked.slo_ttft_s, slo_itl_s=asked.slo_itl_s),
        arm_options=_arm_options(asked),
    )


def _split(text: str | None, workers: int) -> Any:
    from twinpool.bench.arms import Split

    if text is None:
        return None
    prefill, _, decode = text.partition(":")
    if not (prefill.isdigit() and decode.isdigit()) or int(prefill) < 1 or int(decode) < 1:
        raise UserError(f"--split {text} is no split: write P:D, such as 1:{max(workers - 1, 1)}")
    if int(prefill) + int(decode) != workers:
        raise UserError(f"--split {text} is not of {workers} workers")
    return Split(int(prefill), int(decode))


def _arm_options(asked: Asked) -> dict[str, list[str]]:
    """The objectives for every arm's gateway; one of them has balance."""
    from twinpool.bench.arms import ARMS

    common = ["--slo-ttft", str(asked.slo_ttft_s), "--slo-itl", str(asked.slo_itl_s)]
    return {arm: [*common, "--balance", "auto" if arm == "balanced" else "off"] for arm in ARMS}


def _hardware() -> str:
    """What a reader needs to place the figures."""
    from twinpool.machine import read_machine

    machine = read_machine()
    return f"{len(machine.cores)} cores ({_processor()}), Python {platform.python_version()}, {platform.system()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
