"""Is the service well? One sentence, what is wrong, and what to do about it: the first thing that the page and `twinpool
status` say. Read off the state that they show, so that it never says anything else than what stands below it."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import msgspec

from twinpool.core.decisions import WhyBalance

_MOST_LOST_SHARE = 0.05
"""Of the requests of the last minutes: what is more than a few is no accident."""
_FEWEST_LOST = 3
_FEWEST_LATE = 5
_FAR_OVER = 2.0
"""Times the objective: what the mean TTFT of a class may be for some minutes."""
_FEWEST_WORKERS = 2
_MOST_WAITING = 2
"""Requests that wait, for each worker: so many are read and written soon."""
_SHOWN = 8


class Finding(msgspec.Struct, frozen=True):
    """Something that is wrong. `bad`: clients feel it; `warn`: they do not yet, or a person wanted it."""

    tone: Literal["bad", "warn"]
    words: str
    do: str | None


def judge_health(state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` is that of `/admin/state`, all but for this. JSON-ready: tone (good, warn, bad), one sentence, and the
    findings, the worst first."""
    crowded = [*_capacity(state), *_lost(state), *_late(state)]
    found = [
        *crowded,
        *_hopeless(state),
        *_workers(state["workers"]),
        *_handoffs(state),
        *_idle(state, is_crowded=bool(crowded)),
    ]
    found.sort(key=lambda finding: finding.tone)  # "bad" comes before "warn", and else the order stays
    tone = found[0].tone if found else "good"
    return {"tone": tone, "words": _sentence(state, found), "findings": msgspec.to_builtins(found[:_SHOWN])}


def _sentence(state: Mapping[str, Any], found: list[Finding]) -> str:
    if found:
        start = "The service is not well" if found[0].tone == "bad" else "The service works, but needs a look"
        return f"{start}: {found[0].words}"
    if state["indicators"]["verdict"] == "unknown":
        return "The service is well, as far as can be told yet: too little traffic so far to judge it by its indicators"
    return "The service is well"


def _capacity(state: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether anybody can take a request, and soon."""
    if state["gateway"]["draining"]:
        yield Finding("warn", "the gateway is ending and takes nothing new", "wait for what runs, or start it again")
    ready = [worker for worker in state["workers"] if worker["state"] == "ready"]
    if not ready:
        troubles = [f"{worker['id']}: {worker['reason']}" for worker in state["workers"] if worker["reason"]]
        do = f"see what keeps them from it ({troubles[0]})" if troubles else "attach a worker, or start one"
        yield Finding("bad", "no worker is up, so nothing can be answered", do)
    elif (waiting := state["requests"]["waiting"]) > _MOST_WAITING * len(ready):
        yield Finding("warn", f"{waiting} requests wait for a worker", _more_workers(state))


def _lost(state: Mapping[str, Any]) -> Iterator[Finding]:
    ended = state["ended_lately"]
    told = sum(ended.get(outcome, 0) for outcome in ("ok", "failed", "refused"))
    for outcome, do in (
        ("failed", "the last lines of the engines' log say why, and twinpool_leg_failures_total which legs"),
        ("refused", _more_workers(state)),
    ):
        count = ended.get(outcome, 0)
        if count >= _FEWEST_LOST and count > _MOST_LOST_SHARE * told:
            yield Finding("bad", f"{count} of {told} requests of the last five minutes {_were(outcome)}", do)


def _were(outcome: str) -> str:
    return "failed" if outcome == "failed" else "were refused"


def _late(state: Mapping[str, Any]) -> Iterator[Finding]:
    """By the indicator, over an hour and of long requests; and far over the objective in the last minutes, of any."""
    indicators, objective_s = state["indicators"], state["indicators"]["limits"]["ttft_long_s"]
    is_long_told = indicators["verdicts"][0] == "fail"
    if is_long_told:
        yield Finding("bad", indicators["reasons"][0], _more_workers(state))
    for length_class, seen in state["ttft_lately"].items():
        if length_class == "long" and is_long_told:
            continue
        if seen["requests"] >= _FEWEST_LATE and seen["mean_s"] > _FAR_OVER * objective_s:
            words = (
                f"TTFT of {seen['requests']} {length_class} requests of the last five minutes: mean {seen['mean_s']:.2f} s, "
                f"far over --slo-ttft ({objective_s:g} s)"
            )
            yield Finding("bad", words, _more_workers(state))


def _hopeless(state: Mapping[str, Any]) -> Iterator[Finding]:
    balance = state["balance"]
    if balance and balance.get("why") == WhyBalance.HOPELESS:
        yield Finding(
            "warn",
            "a step of the engine alone takes longer than --slo-itl",
            "a faster engine, fewer sequences on each, or an objective that this model can keep",
        )


def _more_workers(state: Mapping[str, Any]) -> str:
    if not state["balance"]:
        return "add workers, or let them change pool by themselves with --balance auto"
    if state["balance"].get("why") == WhyBalance.GOOD:
        return "add workers: the pools are balanced already"
    return f"add workers; balance says: {state['balance']['words']}"


def _workers(workers: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    for worker in workers:
        name = worker["id"]
        if worker["state"] == "draining":
            yield Finding("warn", f"{name} drains and takes nothing new", "remove it once it has ended, or restart it")
        elif worker["state"] != "ready":
            why = worker["reason"] or "it has not answered yet"
            do = "what serve started it starts again; an engine of yours must be looked at"
            yield Finding("warn", f"{name} is not up ({why})", do)
        elif worker["warning"]:
            yield Finding("warn", f"{name}: {worker['warning']}", None)


def _handoffs(state: Mapping[str, Any]) -> Iterator[Finding]:
    roles = {worker["role"] for worker in state["workers"] if worker["state"] == "ready"}
    pairs = state["pairs"]
    if {"prefill", "decode"} <= roles and not pairs["proved"]:
        words = "no handoff between the pools is proved, so each request goes whole to one worker"
        yield Finding("warn", words, _why_no_pair(state))
    for pair in pairs["troubled"]:
        if pair["state"] == "aside" and pairs["proved"]:
            words = f"handoffs from {pair['prefill']} to {pair['decode']} go wrong, so nothing goes that way"
            yield Finding("warn", words, f"mend what its canary met: {pair['why']}")
    for pair in pairs["slow"]:
        words = f"handoffs from {pair['prefill']} to {pair['decode']} are slow, at {pair['gb_s']:g} GB/s"
        yield Finding("warn", words, "see over which network they go: TCP, most likely, where RDMA was meant")


def _why_no_pair(state: Mapping[str, Any]) -> str:
    for pair in (*state["pairs"]["troubled"], *state["incompatible"]):
        return f"from {pair['prefill']} to {pair['decode']}: {pair['why']}"
    obstacles = [f"{worker['id']}: {worker['obstacle']}" for worker in state["workers"] if worker["obstacle"]]
    return obstacles[0] if obstacles else "see the pairs in twinpool status"


def _idle(state: Mapping[str, Any], *, is_crowded: bool) -> Iterator[Finding]:
    """Fewer workers are no help where somebody waits, was refused or late, and one of each pool is the least."""
    indicators = state["indicators"]
    if indicators["verdicts"][1] == "fail":
        is_crowded = is_crowded or bool(state["requests"]["waiting"] or state["ended_lately"].get("refused"))
        ready = sum(worker["state"] == "ready" for worker in state["workers"])
        is_more_than_enough = ready > _FEWEST_WORKERS and not is_crowded
        yield Finding(
            "warn", indicators["reasons"][1], "fewer workers would carry this traffic" if is_more_than_enough else None
        )
