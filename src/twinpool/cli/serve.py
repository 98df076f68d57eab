"""``twinpool serve``: what can be asked for, and what is shown when it runs."""

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from twinpool.cli.help import Option, Sections
from twinpool.cli.numbers import SECONDS, Number
from twinpool.cli.prepare import Asked, dry_run, prepare
from twinpool.cli.printing import json_text
from twinpool.cli.started import Local, LocalVllm

if TYPE_CHECKING:
    from twinpool.cli.prepare import Service

PORT = click.IntRange(0, 65535)
FILE = click.Path(path_type=Path)
FLOOR = Number(0)  # 0 is none
ENGINES = ("embedded", "vllm")
BALANCE = ("auto", "advise", "off")
BACKENDS = ("auto", "libfabric", "ucx")


class ServeCommand(Sections):
    """Takes ``--prefill URL URL`` as well as ``--prefill URL --prefill URL``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread: list[str] = []
        option = ""
        for position, arg in enumerate(args):
            if arg.startswith("-"):
                option = arg if arg in ("--prefill", "--decode", "--colocated") else ""
            elif option and args[position - 1] != option:
                spread.append(option)
            spread.append(arg)
        return super().parse_args(ctx, spread)


ATTACH = partial(click.option, cls=Option, section="Engines that run already", metavar="URL...", multiple=True)
START = partial(click.option, cls=Option, section="Engines started here")
VLLM = partial(click.option, cls=Option, section="Started here with --engine vllm")
LISTEN = partial(click.option, cls=Option, section="Who may ask, and where")
SHARE = partial(click.option, cls=Option, section="How work is shared")
WATCH = partial(click.option, cls=Option, section="Objectives and records")
OTHER = partial(click.option, cls=Option)


@click.command(cls=ServeCommand, short_help="Serve a model")
@START("--engine", type=click.Choice(ENGINES), help="Ours, for the CPU, or stock vLLM.  [default: embedded]")
@START("--model", metavar="MODEL", help="GGUF file, or repo/name[:file] on the hub.  [default: SmolLM2-135M-Instruct]")
@START("--prefill-workers", type=click.IntRange(0), metavar="N", help="Workers that read prompts.  [default: 1]")
@START("--decode-workers", type=click.IntRange(0), metavar="N", help="Workers that write tokens.  [default: 1]")
@START("--colocated-workers", type=click.IntRange(0), metavar="N", help="Workers that do both.  [default: 0]")
@START("--handoff-secret-file", type=FILE, metavar="FILE", help="What signs their KV handles.  [default: a fresh one]")
@START("--log", metavar="FILE", help="Their messages, - for standard error.  [default: in the cache folder]")
@VLLM("--vllm", metavar="PROGRAM", help="vLLM's command.  [default: vllm]")
@VLLM("--model-name", metavar="NAME", help="What clients call the model.  [default: its folder's or its hub's name]")
@VLLM("--tensor-parallel", type=click.IntRange(1), metavar="N", help="GPUs an engine.  [default: 1]")
@VLLM("--decode-tensor-parallel", type=click.IntRange(1), metavar="N", help="For --decode-workers, a multiple of it.")
@VLLM("--max-num-batched-tokens", type=click.IntRange(16), metavar="N", help="Of a step.  [default: 2048, on a CPU 256]")
@VLLM("--max-num-seqs", type=click.IntRange(1), metavar="N", help="Sequences at once.  [default: 256, on a CPU 16]")
@VLLM("--nixl-backend", type=click.Choice(BACKENDS), help="What hands KV over.  [default: by the machine's devices]")
@VLLM("--engine-host", metavar="HOST", help="This machine's address, for engines and gateways elsewhere.")
@VLLM("--engine-args", metavar="TEXT", help="More for vllm serve: '--max-model-len 8192 --dtype bfloat16'.")
@VLLM("--device-root", type=FILE, metavar="FOLDER", hidden=True)
@ATTACH("--prefill", help="They read prompts.")
@ATTACH("--decode", help="They write tokens.")
@ATTACH("--colocated", help="They do both.")
@ATTACH("--engine-api-key-file", type=FILE, metavar="FILE", multiple=False, help="Send them the key in this file.")
@LISTEN("--host", metavar="HOST", help="[default: 127.0.0.1]")
@LISTEN("--port", type=PORT, metavar="PORT", help="OpenAI's routes.  [default: 8000]")
@LISTEN("--api-key-file", type=FILE, metavar="FILE", help="Ask clients for one of these keys, one a line.")
@LISTEN("--admin-port", type=PORT, metavar="PORT", help="State and control, on loopback.  [default: 8001]")
@LISTEN("--admin-token-file", type=FILE, metavar="FILE", help="Ask for this token there.")
@LISTEN("--expose-route", is_flag=True, default=None, help="Tell clients which workers served them: x-twinpool-*.")
@SHARE("--balance", type=click.Choice(BALANCE), help="Move workers between pools as traffic shifts.  [default: off]")
@SHARE("--refuse-late", is_flag=True, default=None, help="Refuse what would miss --slo-ttft by its wait. With --balance auto.")
@SHARE("--learnt", metavar="FILE", help="Keep what engines take over restarts, - for not.  [default: in the cache folder]")
@WATCH("--slo-ttft", "slo_ttft_s", type=SECONDS, metavar="S", help="Time to the first token.  [default: 1.3]")
@WATCH("--slo-itl", "slo_itl_s", type=SECONDS, metavar="S", help="Gap between two tokens.  [default: 0.05]")
@WATCH("--handoff-floor-gb-s", type=FLOOR, metavar="G", help="A slower handoff is said to be.  [default: by the link]")
@WATCH("--journal", type=FILE, metavar="FILE", help="Record events and commands, for twinpool replay.")
@WATCH("--access-log", type=FILE, metavar="FILE", help="A JSON line a request, without its content.")
@OTHER("--config", type=FILE, metavar="FILE", help="All this and more in TOML; options here win over it.")
@OTHER("--dry-run", "is_dry_run", is_flag=True, help="Show what would run where, and end.")
@OTHER("--json", "as_json", is_flag=True, help="One JSON object when ready (or planned), nothing else.")
@click.option("--exit-with-fd", type=click.IntRange(0), hidden=True)
def command(*, is_dry_run: bool, as_json: bool, exit_with_fd: int | None, **options: Any) -> None:
    """Serve a language model behind OpenAI's HTTP API.

    Without options: a small real model, one worker that reads prompts and one that writes tokens, on this machine.
    With --prefill, --decode or --colocated: engines that run already, such as `twinpool worker` on other machines.
    """
    began = time.monotonic()
    asked = Asked(**options)
    if is_dry_run:
        _show_dry_run(asked, as_json=as_json)
        return
    service = prepare(asked)
    from uvloop import run

    from twinpool.cli.running import Running
    from twinpool.cli.terminal import open_screen

    news = open_screen(stderr=True)

    def say(text: str) -> None:
        news.print(f"twinpool: {text}", markup=False, soft_wrap=True)

    def show(admin_url: str, state: Mapping[str, Any]) -> None:
        _show_ready(service, admin_url, state, ready_s=time.monotonic() - began, as_json=as_json)

    try:
        run(Running(service, say, show, exit_with_fd).run())
    finally:
        if not isinstance(service.fleet, tuple):
            service.fleet.log.close()


def _show_dry_run(asked: Asked, *, as_json: bool) -> None:
    planned = dry_run(asked)
    if as_json:
        click.echo(json_text(planned))
        return
    from twinpool.cli.screen import show_plan
    from twinpool.cli.terminal import open_screen

    show_plan(open_screen(), planned)


def _show_ready(service: "Service", admin_url: str, state: Mapping[str, Any], *, ready_s: float, as_json: bool) -> None:
    if as_json:
        ready = {"event": "ready", "ready_s": round(ready_s, 3), "admin_url": admin_url, **state}
        if isinstance(service.fleet, LocalVllm):
            ready["fabric"] = msgspec.to_builtins(service.fleet.plan.fabric)
            ready["handoff_floor_gb_s"] = service.config.routing.handoff_floor_gb_s
        click.echo(json_text(ready))
        return
    from twinpool.cli.screen import FirstScreen, core_list, gpus_or_cores, show_first_screen
    from twinpool.cli.terminal import open_screen

    fleet, screen = service.fleet, FirstScreen(ready_s, admin_url, needs_key=bool(service.api_keys))
    if isinstance(fleet, Local):
        cores = {worker.id: core_list(worker.cores) for worker in fleet.plan.workers}
        screen = replace(screen, places=cores, notes=fleet.plan.notes, log=fleet.log.path)
    elif isinstance(fleet, LocalVllm):
        plan, places = fleet.plan, {engine.id: gpus_or_cores(engine) for engine in fleet.plan.engines}
        floor = service.config.routing.handoff_floor_gb_s
        screen = replace(screen, places=places, notes=plan.notes, log=fleet.log.path, warnings=plan.warnings)
        screen = replace(screen, places_title="Where", fabric=plan.fabric, handoff_floor_gb_s=floor)
    show_first_screen(open_screen(), state, screen)
