"""What people see: the plan, the first screen of `serve`, the tables of `status`; for consoles without highlighting."""

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

_PAIRS_SHOWN = 10
_STATE_STYLE = {"ready": "green", "draining": "yellow", "lost": "red", "joining": "yellow"}
_VERDICTS = {"pass": "[green]pass[/]", "fail": "[red]fail[/]", "unknown": "[yellow]cannot tell yet[/]"}
_ROLE_STYLE = {"prefill": "cyan", "decode": "magenta", "colocated": "blue"}


def show_plan(console: Console, planned: DryRun) -> None:
    tell(console, f"Would listen on {escape(planned.url)} (admin: {escape(planned.admin_url)})")
    if planned.vllm is not None:
        _show_vllm(console, planned, planned.vllm)
        return
    if planned.plan is None:
        engines = [(engine.id, _role(engine.role), escape(engine.url)) for engine in planned.engines]
        _table(console, ("Engine", "Role", "URL"), engines)
        return
    tell(console, f"Would start, with the model {escape(planned.model or '')}:")
    rows = []
    for worker in planned.plan.workers:
        cores = core_list(worker.cores) if worker.cores else f"any {worker.threads}"
        rows.append((worker.id, _role(worker.role), cores, str(worker.slots), f"{worker.context_tokens:,} tokens"))
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
    engines = [(engine.id, _role(engine.role), escape(gpus_or_cores(engine)), escape(engine.url)) for engine in plan.engines]
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
    gateway, workers = state["gateway"], _by_role(state["workers"])
    models, waits = gateway["models"], [worker for worker in workers if worker["state"] != "ready"]
    console.print(f"\n[bold]Twinpool {__version__}[/] is [green]ready[/] after {screen.ready_s:.1f} s\n")
    facts = Table.grid(padding=(0, 2))
    facts.add_column()
    facts.add_column(overflow="fold")
    facts.add_row("  API", escape(f"{gateway['url']}/v1"))
    facts.add_row("  Model", escape(", ".join(models) or "-"))
    status = "twinpool status" if admin_url == DEFAULT_ADMIN_URL else f"twinpool status {admin_url}"
    facts.add_row("  Admin", f"{escape(admin_url)}   [dim]({escape(status)})[/]")
    facts.add_row("  Engine", escape(_engines(workers)))
    if screen.fabric is not None:
        facts.add_row("  KV", escape(f"{_fabric(screen.fabric)}; {_floor(screen.fabric, screen.handoff_floor_gb_s)}"))
    if log is not None:
        facts.add_row("  Log", escape(_short(log)))
    console.print(facts)
    rows = []
    for worker in workers:
        where = [escape(places.get(worker["id"]) or "any")] if places else []
        rows.append((escape(worker["id"]), _role(worker["role"]), *where, escape(worker["url"])))
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


def show_status(console: Console, state: Mapping[str, Any]) -> None:
    gateway, requests = state["gateway"], state["requests"]
    mood = "[yellow]draining[/]" if gateway["draining"] else "[green]serving[/]"
    models = escape(", ".join(gateway["models"]) or "no model")
    about = f"[dim]Twinpool {escape(state['version'])}, up {_age(state['uptime_s'])}[/]"
    tell(console, f"[bold]{escape(gateway['url'])}[/]  {mood} {models}  {about}")
    handles = ", ".join(f"{count} {name}" for name, count in state["handles"].items() if count) or "none"
    tell(console, f"Requests: {requests['live']} live, {requests['waiting']} waiting.  KV handles: {escape(handles)}.")
    tell(console, f"Engine: {escape(_engines(state['workers']))}")
    if indicators := state.get("indicators"):
        console.print(f"Indicators, last hour: {_VERDICTS[indicators['verdict']]}")
        for reason in indicators["reasons"]:
            tell(console, f"  {escape(reason)}")
        if indicators["useful_work_ratio"] is not None:
            tell(console, f"  useful work {indicators['useful_work_ratio']:.0%} of what the workers have shown they can do")
    _show_pools(console, state["workers"])
    attached = [worker for worker in _by_role(state["workers"]) if worker.get("kind") not in (None, "embedded")]
    if attached:
        _show_attached(console, attached)
    for worker in _by_role(state["workers"]):
        if worker.get("obstacle"):
            tell(console, f"[yellow]{escape(worker['id'])}[/] hands nothing over: {escape(worker['obstacle'])}")
        if worker["reason"]:
            tell(console, f"[yellow]{escape(worker['id'])}[/] is not up: {escape(worker['reason'])}")
        elif worker.get("warning"):
            tell(console, f"[yellow]{escape(worker['id'])}[/]: {escape(worker['warning'])}")
    for line, workers in _advice(attached).items():
        tell(console, f"[dim]{escape(', '.join(workers))}: {escape(line)}[/]")
    _show_pairs(console, state)
    _show_balance(console, state)
    if state["decisions"]:
        _show_decisions(console, state["decisions"])
    else:
        tell(console, "No decision yet: send a request.")


def _show_pools(console: Console, workers: list[dict[str, Any]]) -> None:
    rows = []
    for worker in _by_role(workers):
        state = worker["state"]
        room = f"{worker['sequences']} of {worker['slots']}" if worker["slots"] else str(worker["sequences"])
        row = (
            escape(worker["id"]),
            _role(worker["role"]),
            f"[{_STATE_STYLE.get(state, 'white')}]{escape(state)}[/]",
            room,
            _tokens(worker["prefill_tokens"]),
            _tokens(worker["kv_tokens"]),
            escape(worker["url"]),
        )
        rows.append(row)
    _table(console, ("Worker", "Role", "State", "Busy", "Prefill", "KV", "URL"), rows)


def _show_attached(console: Console, workers: list[dict[str, Any]]) -> None:
    """What is known of engines that are not ours: asked, declared or assumed."""
    rows = []
    for worker in workers:
        connector = ", ".join(filter(None, (worker["connector"], worker["kv_role"]))) or "-"
        lease, budget = worker["lease_s"], worker["budget_tokens"]
        row = (
            escape(worker["id"]),
            escape(worker["engine"] or "-"),
            escape(connector),
            ("assumed" if worker["hands_off"] else "-") if lease is None else f"{lease:g} s",
            "not known" if budget is None else f"{budget:,}",
            f"{worker['kv_capacity_tokens']:,}" if worker["kv_capacity_tokens"] else "-",
        )
        rows.append(row)
    _table(console, ("Worker", "Engine", "Connector", "Lease", "Tokens a step", "KV tokens"), rows)


def _advice(workers: list[dict[str, Any]]) -> dict[str, list[str]]:
    """What to do, and for which workers."""
    found: dict[str, list[str]] = {}
    for worker in workers:
        for line in worker.get("advice", ()):
            found.setdefault(line, []).append(worker["id"])
    return found


def _show_pairs(console: Console, state: Mapping[str, Any]) -> None:
    pairs = state.get("pairs", {})
    troubled, slow, incompatible = pairs.get("troubled", ()), pairs.get("slow", ()), state.get("incompatible", ())
    if troubled or slow or incompatible:
        tell(
            console,
            f"Pairs: {pairs.get('proved', 0)} proved, {pairs.get('unproved', 0)} not yet, {pairs.get('aside', 0)} aside.",
        )
    lines = [f"{_pair(pair)} is {pair['state']}: {pair['why']}" for pair in troubled]
    lines += [f"{_pair(pair)} is slow: {pair['gb_s']:g} GB/s" for pair in slow]
    lines += [f"{_pair(pair)} cannot be: {pair['why']}" for pair in incompatible]
    for line in lines[:_PAIRS_SHOWN]:
        tell(console, f"[yellow]{escape(line)}[/]")
    if len(lines) > _PAIRS_SHOWN:
        tell(console, f"... and {len(lines) - _PAIRS_SHOWN} more: --json has them")


def _show_balance(console: Console, state: Mapping[str, Any]) -> None:
    """Nothing where it is off."""
    balance = state.get("balance")
    if not balance:
        return
    tell(console, f"Balance ({balance['mode']}): {escape(balance['words'])}")
    for found in reversed(balance["recent"]):
        tell(console, f"[dim]  {_age(found['age_s'])} ago: {escape(found['words'])}[/]")


def _pair(pair: Mapping[str, Any]) -> str:
    return f"{pair['prefill']} > {pair['decode']}"


def _engines(workers: list[dict[str, Any]]) -> str:
    return ", ".join(sorted({worker["engine"] for worker in workers if worker["engine"]})) or "-"


def _by_role(workers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    order = list(_ROLE_STYLE)
    return sorted(workers, key=lambda worker: (order.index(worker["role"]), worker["id"]))


def _show_decisions(console: Console, decisions: list[dict[str, Any]]) -> None:
    rows = []
    for decision in reversed(decisions):
        told = (decision["choice"], decision["why"].replace("_", " "), decision["prefill"] or "-", decision["decode"] or "-")
        rows.append((f"{_age(decision['age_s'])} ago", *map(escape, told)))
    _table(console, ("Last decisions", "Choice", "Why", "Prefill", "Decode"), rows)


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


def _role(role: str) -> str:
    return f"[{_ROLE_STYLE.get(role, 'white')}]{role}[/]"


def _tokens(count: int) -> str:
    return f"{count:,} tokens" if count else "-"


def _age(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds) // 60
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _short(path: Path) -> str:
    """With ~ for the home folder."""
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)
