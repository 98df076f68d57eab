"""What people see of `serve`: the plan, and the first screen; for consoles without highlighting."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from twinpool import __version__
from twinpool.cli.prepare import DryRun
from twinpool.cli.state import DEFAULT_ADMIN_URL
from twinpool.cli.terminal import show_table, tell
from twinpool.deploy.fabric import Fabric
from twinpool.deploy.vllm import PlannedEngine, VllmPlan

_ROLE_STYLE = {"prefill": "cyan", "decode": "magenta", "colocated": "blue"}


def show_plan(console: Console, planned: DryRun) -> None:
    tell(console, f"Would listen on {escape(planned.url)} (admin: {escape(planned.admin_url)})")
    if planned.vllm is not None:
        _show_vllm(console, planned, planned.vllm)
        return
    if planned.plan is None:
        engines = [(engine.id, role(engine.role), escape(engine.url)) for engine in planned.engines]
        _table(console, ("Engine", "Role", "URL"), engines)
        return
    tell(console, f"Would start, with the model {escape(planned.model or '')}:")
    rows = []
    for worker in planned.plan.workers:
        cores = core_list(worker.cores) if worker.cores else f"any {worker.threads}"
        rows.append((worker.id, role(worker.role), cores, str(worker.slots), f"{worker.context_tokens:,} tokens"))
    _table(console, ("Worker", "Role", "Cores", "Slots", "Context"), rows)
    if planned.plan.gateway_cores:
        tell(console, f"Left to the gateway: core {core_list(planned.plan.gateway_cores)}")
    if planned.plan.worker_bytes is not None:
        tell(console, f"Memory: {planned.plan.worker_bytes / 1e9:.1f} GB a worker")
    for note in planned.plan.notes:
        tell(console, f"[yellow]Note:[/] {escape(note)}")


def _show_vllm(console: Console, planned: DryRun, plan: VllmPlan) -> None:
    """Ends with the launch lines: each on one line of its own, so that it can be copied as it is."""
    tell(console, f"Would start vLLM, with the model {escape(planned.model or '')}:")
    engines = [(engine.id, role(engine.role), escape(gpus_or_cores(engine)), escape(engine.url)) for engine in plan.engines]
    _table(console, ("Engine", "Role", "Where", "URL"), engines)
    tell(console, f"KV: {escape(_fabric(plan.fabric))}")
    tell(console, f"    {escape(_floor(plan.fabric, planned.handoff_floor_gb_s))}")
    for warning in plan.warnings:
        tell(console, f"[bold red]Warning:[/] {escape(warning)}")
    for note in plan.notes:
        tell(console, f"[yellow]Note:[/] {escape(note)}")
    tell(console, f"[yellow]Note:[/] VLLM_API_KEY is {escape(planned.vllm_key or '')}, in the engines' environment only")
    for engine in plan.engines:
        console.print(f"\n[dim]# {engine.id}[/]")
        console.print(engine.line(), soft_wrap=True, markup=False)


@dataclass(frozen=True, slots=True)
class FirstScreen:
    """What the gateway's state does not tell. `places` are the cores or GPUs of workers that were started here, by id."""

    ready_s: float
    admin_url: str
    places: Mapping[str, str] = field(default_factory=dict)
    places_title: str = "Cores"
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    log: Path | None = None
    needs_key: bool = False
    fabric: Fabric | None = None
    handoff_floor_gb_s: float | None = None


def show_first_screen(console: Console, state: Mapping[str, Any], screen: FirstScreen) -> None:
    admin_url, log, places = screen.admin_url, screen.log, screen.places
    gateway, workers = state["gateway"], by_role(state["workers"])
    models, waits = gateway["models"], [worker for worker in workers if worker["state"] != "ready"]
    console.print(f"\n[bold]Twinpool {__version__}[/] is [green]ready[/] after {screen.ready_s:.1f} s\n")
    facts = Table.grid(padding=(0, 2))
    facts.add_column()
    facts.add_column(overflow="fold")
    facts.add_row("  API", escape(f"{gateway['url']}/v1"))
    facts.add_row("  Model", escape(", ".join(models) or "-"))
    status = "twinpool status" if admin_url == DEFAULT_ADMIN_URL else f"twinpool status {admin_url}"
    facts.add_row("  Admin", f"{escape(admin_url)}   [dim](a page for browsers; {escape(status)})[/]")
    facts.add_row("  Engine", escape(engines_of(workers)))
    if screen.fabric is not None:
        facts.add_row("  KV", escape(f"{_fabric(screen.fabric)}; {_floor(screen.fabric, screen.handoff_floor_gb_s)}"))
    if log is not None:
        facts.add_row("  Log", escape(_short(log)))
    console.print(facts)
    rows = []
    for worker in workers:
        where = [escape(places.get(worker["id"]) or "any")] if places else []
        rows.append((escape(worker["id"]), role(worker["role"]), *where, escape(worker["url"])))
    console.print()
    _table(console, ("Worker", "Role", *([screen.places_title] if places else []), "URL"), rows)
    for warning in screen.warnings:
        tell(console, f"  [bold red]Warning:[/] {escape(warning)}")
    for note in (*screen.notes, *(f"{worker['id']} is not up: {worker['reason']}" for worker in waits)):
        tell(console, f"  [yellow]Note:[/] {escape(note)}")
    if models:
        console.print("\n  [bold]Try it:[/]\n")
        console.print(curl(gateway["url"], models[0], needs_key=screen.needs_key), soft_wrap=True, markup=False)
    tell(console, "\n  [dim]Ctrl-C lets running answers finish, then stops everything.[/]\n")


def curl(url: str, model: str, *, needs_key: bool) -> str:
    """A command that works when pasted into a shell, in lines that fit a terminal."""
    question = {"role": "user", "content": "Why is the sky blue?"}
    body = json.dumps({"model": model, "max_tokens": 64, "messages": [question]})
    key = ' -H "Authorization: Bearer $TWINPOOL_API_KEY"' if needs_key else ""
    return f"curl {url}/v1/chat/completions{key} \\\n  -H 'Content-Type: application/json' \\\n  -d {shlex.quote(body)}"


def engines_of(workers: list[dict[str, Any]]) -> str:
    return ", ".join(sorted({worker["engine"] for worker in workers if worker["engine"]})) or "-"


def by_role(workers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    order = list(_ROLE_STYLE)
    return sorted(workers, key=lambda worker: (order.index(worker["role"]), worker["id"]))


def gpus_or_cores(engine: PlannedEngine) -> str:
    if engine.gpus:
        return f"GPU{'s' * (len(engine.gpus) > 1)} {', '.join(engine.gpus)}"
    return f"core{'s' * (len(engine.cores) > 1)} {core_list(engine.cores)}" if engine.cores else "any core"


def _fabric(fabric: Fabric) -> str:
    return f"NIXL's {fabric.backend} backend over {fabric.over}: {fabric.reason}"


def _floor(fabric: Fabric, floor_gb_s: float | None) -> str:
    """A floor that is not the fabric's own has no reason but that somebody wanted it."""
    what = f"under {floor_gb_s:g} GB/s it counts as slow" if floor_gb_s else "no floor for its speed"
    return f"{what}: {fabric.floor_reason}" if (floor_gb_s or None) == fabric.handoff_floor_gb_s else what


def core_list(cores: tuple[int, ...]) -> str:
    """``0-3,8`` for 0, 1, 2, 3, 8."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _table(console: Console, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    show_table(console, head, rows, whole={"URL"})


def role(name: str) -> str:
    return f"[{_ROLE_STYLE.get(name, 'white')}]{name}[/]"


def _short(path: Path) -> str:
    """With ~ for the home folder."""
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)
