"""What `twinpool status` shows, once or again and again; for consoles without highlighting."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape

from twinpool.cli.screen import by_role, engines_of, role
from twinpool.cli.terminal import show_table, tell

_PAIRS_SHOWN = 10
_STATE_STYLE = {"ready": "green", "draining": "yellow", "lost": "red", "joining": "yellow"}
_TONE_STYLE = {"good": "bold green", "warn": "bold yellow", "bad": "bold red"}
_VERDICTS = {"pass": "[green]pass[/]", "fail": "[red]fail[/]", "unknown": "[yellow]cannot tell yet[/]"}


class Rows(NamedTuple):
    """A table. Cells are markup."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def show_status(console: Console, state: Mapping[str, Any]) -> None:
    for part in _parts(state):
        if isinstance(part, str):
            tell(console, part)
        else:
            show_table(console, part.head, part.rows, whole={"URL"})


def _parts(state: Mapping[str, Any]) -> Iterator[str | Rows]:
    yield from _health(state.get("health"))
    yield from _service(state)
    yield from _indicators(state.get("indicators"))
    yield from _workers(state["workers"])
    yield from _pairs(state)
    yield from _balance(state)
    yield _decisions(state["decisions"]) if state["decisions"] else "No decision yet: send a request."


def _health(health: Mapping[str, Any] | None) -> Iterator[str]:
    if health is None:
        return
    yield f"[{_TONE_STYLE[health['tone']]}]{escape(health['words'])}.[/]"
    for place, finding in enumerate(health["findings"]):
        if place:
            yield f"  {escape(finding['words'])}"
        if finding["do"]:
            yield f"  [dim]What to do:[/] {escape(finding['do'])}"


def _service(state: Mapping[str, Any]) -> Iterator[str]:
    gateway, requests = state["gateway"], state["requests"]
    mood = "[yellow]draining[/]" if gateway["draining"] else "[green]serving[/]"
    models = escape(", ".join(gateway["models"]) or "no model")
    up = f"[dim]Twinpool {escape(state['version'])}, up {age(state['uptime_s'])}[/]"
    yield f"[bold]{escape(gateway['url'])}[/]  {mood} {models}  {up}"
    handles = ", ".join(f"{count} {name}" for name, count in state["handles"].items() if count) or "none"
    yield f"Requests: {requests['live']} live, {requests['waiting']} waiting.  KV handles: {escape(handles)}."
    yield f"Engine: {escape(engines_of(state['workers']))}"


def _indicators(indicators: Mapping[str, Any] | None) -> Iterator[str]:
    if not indicators:
        return
    yield f"Indicators, last hour: {_VERDICTS[indicators['verdict']]}"
    for reason in indicators["reasons"]:
        yield f"  {escape(reason)}"
    if indicators["useful_work_ratio"] is not None:
        yield f"  useful work {indicators['useful_work_ratio']:.0%} of what the workers have shown they can do"


def _workers(workers: list[dict[str, Any]]) -> Iterator[str | Rows]:
    yield _pools(workers)
    attached = [worker for worker in by_role(workers) if worker.get("kind") not in (None, "embedded")]
    if attached:
        yield _attached(attached)
    for worker in by_role(workers):
        name = f"[yellow]{escape(worker['id'])}[/]"
        if worker.get("obstacle"):
            yield f"{name} hands nothing over: {escape(worker['obstacle'])}"
        if worker["reason"]:
            yield f"{name} is not up: {escape(worker['reason'])}"
        elif worker.get("warning"):
            yield f"{name}: {escape(worker['warning'])}"
    for line, names in _advice(attached).items():
        yield f"[dim]{escape(', '.join(names))}: {escape(line)}[/]"


def _pools(workers: list[dict[str, Any]]) -> Rows:
    head, rows = ("Worker", "Role", "State", "Busy", "Running", "To read", "KV", "URL"), []
    for worker in by_role(workers):
        state = worker["state"]
        room = f"{worker['sequences']} of {worker['slots']}" if worker["slots"] else str(worker["sequences"])
        busy = worker.get("busy_ratio")
        rows.append(
            (
                escape(worker["id"]),
                role(worker["role"]) + (" [dim](by hand)[/]" if worker.get("held") else ""),
                f"[{_STATE_STYLE.get(state, 'white')}]{escape(state)}[/]",
                "-" if busy is None else f"{busy:.0%}",
                room,
                _tokens(worker["prefill_tokens"]),
                _tokens(worker["kv_tokens"]),
                escape(worker["url"]),
            )
        )
    return Rows(head, rows)


def _attached(workers: list[dict[str, Any]]) -> Rows:
    """What is known of engines that are not ours: asked, declared or assumed."""
    head, rows = ("Worker", "Engine", "Connector", "Lease", "Tokens a step", "KV tokens"), []
    for worker in workers:
        connector = ", ".join(filter(None, (worker["connector"], worker["kv_role"]))) or "-"
        lease, budget = worker["lease_s"], worker["budget_tokens"]
        rows.append(
            (
                escape(worker["id"]),
                escape(worker["engine"] or "-"),
                escape(connector),
                ("assumed" if worker["hands_off"] else "-") if lease is None else f"{lease:g} s",
                "not known" if budget is None else f"{budget:,}",
                f"{worker['kv_capacity_tokens']:,}" if worker["kv_capacity_tokens"] else "-",
            )
        )
    return Rows(head, rows)


def _advice(workers: list[dict[str, Any]]) -> dict[str, list[str]]:
    """What to do, and for which workers."""
    found: dict[str, list[str]] = {}
    for worker in workers:
        for line in worker.get("advice", ()):
            found.setdefault(line, []).append(worker["id"])
    return found


def _pairs(state: Mapping[str, Any]) -> Iterator[str]:
    pairs = state.get("pairs", {})
    troubled, slow, incompatible = pairs.get("troubled", ()), pairs.get("slow", ()), state.get("incompatible", ())
    if troubled or slow or incompatible:
        yield f"Pairs: {pairs.get('proved', 0)} proved, {pairs.get('unproved', 0)} not yet, {pairs.get('aside', 0)} aside."
    lines = [f"{_pair(pair)} is {pair['state']}: {pair['why']}" for pair in troubled]
    lines += [f"{_pair(pair)} is slow: {pair['gb_s']:g} GB/s" for pair in slow]
    lines += [f"{_pair(pair)} cannot be: {pair['why']}" for pair in incompatible]
    for line in lines[:_PAIRS_SHOWN]:
        yield f"[yellow]{escape(line)}[/]"
    if len(lines) > _PAIRS_SHOWN:
        yield f"... and {len(lines) - _PAIRS_SHOWN} more: --json has them"


def _pair(pair: Mapping[str, Any]) -> str:
    return f"{pair['prefill']} > {pair['decode']}"


def _balance(state: Mapping[str, Any]) -> Iterator[str]:
    """What balance found, nothing where it is off; and what people did by hand."""
    if balance := state.get("balance"):
        yield f"Balance ({escape(balance['mode'])}): {escape(balance['words'])}"
        for found in reversed(balance["recent"]):
            yield f"[dim]  {age(found['age_s'])} ago: {escape(found['words'])}[/]"
    by_hand = [change for change in state.get("role_changes", ()) if change["why"] == "manual"]
    if by_hand:
        yield "Roles given by hand:"
    for change in reversed(by_hand):
        yield f"[dim]  {age(change['age_s'])} ago: {escape(change['words'])}[/]"


def _decisions(decisions: list[dict[str, Any]]) -> Rows:
    head, rows = ("Last decisions", "Which way, and why", "First token"), []
    for decision in reversed(decisions):
        words = decision.get("words") or f"{decision['choice']}: {decision['why'].replace('_', ' ')}"
        rows.append((f"{age(decision['age_s'])} ago", escape(words), _first_token(decision)))
    return Rows(head, rows)


def _first_token(decision: Mapping[str, Any]) -> str:
    """What came and what was expected, as far as either is known."""
    came, expected = decision.get("ttft_s"), decision.get("predicted_ttft_s")
    if came is None:
        return "" if expected is None else f"expected after {expected:.2f} s"
    return f"after {came:.2f} s" if expected is None else f"after {came:.2f} s, expected {expected:.2f} s"


def _tokens(count: int) -> str:
    return f"{count:,} tokens" if count else "-"


def age(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds) // 60
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
