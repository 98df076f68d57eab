"""What the gateway is doing now, as one JSON-ready object: the answer of `GET /admin/state`, which `twinpool status` draws."""

from collections.abc import Iterable
from time import monotonic
from typing import Any

from twinpool import __version__
from twinpool.core.cluster import Worker
from twinpool.core.compatibility import why_not_compatible
from twinpool.core.model import Role, WorkerFacts
from twinpool.engines.advice import advice
from twinpool.gateway.driver import Driver
from twinpool.gateway.health import judge_health
from twinpool.gateway.membership import Member, Membership
from twinpool.gateway.pair_state import describe_pairs

_BALANCES_SHOWN = 5
_DECISIONS_SHOWN = 10
_PAIRS_SHOWN = 50


def describe(driver: Driver, membership: Membership, *, url: str, started_at: float) -> dict[str, Any]:
    """The state now. `started_at` is on `time.monotonic`; ages come out in seconds."""
    controller = driver.controller
    indicators = driver.metrics.indicators
    busy = indicators.busy_ratios()
    state = {
        "version": __version__,
        "uptime_s": round(monotonic() - started_at, 3),
        "gateway": {"url": url, "models": membership.models(), "draining": controller.is_draining},
        "workers": [
            describe_worker(member, controller.cluster.get(member.worker)) | {"busy_ratio": busy.get(member.worker)}
            for member in membership
        ],
        "pairs": describe_pairs(controller),
        "incompatible": describe_incompatible(worker.facts for worker in controller.cluster),
        "balance": driver.balances.describe(controller.balanced(), _BALANCES_SHOWN),
        "error_ratio": {"prompt_tokens": controller.prompt_length_error(), "costs": controller.cost_errors()},
        "indicators": indicators.now(),
        "ended_lately": indicators.ended_lately(),
        "ttft_lately": indicators.ttft_lately(),
        "role_changes": driver.role_changes.recent(_BALANCES_SHOWN),
        "requests": {"live": controller.live_requests, "waiting": controller.waiting_requests()},
        "handles": {str(state): count for state, count in controller.handles_by_state().items()},
        "regret_s": round(driver.decisions.regret_s, 3),
        "decisions": driver.decisions.recent(_DECISIONS_SHOWN),
    }
    return state | {"health": judge_health(state)}


def describe_worker(member: Member, worker: Worker | None) -> dict[str, Any]:
    """One worker; where it never was up, only what was asked for and why it is not."""
    facts = worker.facts if worker is not None else None
    state = "joining" if worker is None else str(worker.story.state)
    return {
        "id": member.worker,
        "url": member.url,
        "role": str(worker.role if worker is not None else member.role),
        "held": bool(worker and worker.is_held),
        "allowed_roles": [str(role) for role in member.allowed_roles],
        "state": state,
        "reason": member.trouble,
        "warning": member.warning,
        "reason_kind": None if member.trouble_kind is None else str(member.trouble_kind),
        "incarnation": facts.incarnation if facts else None,
        "engine": facts.engine if facts else None,
        "kind": facts.kind if facts else None,
        "engine_version": facts.version if facts else None,
        "models": list(facts.models) if facts else [],
        "loras": list(facts.loras) if facts else [],
        "hands_off": bool(facts and facts.dialect),
        "obstacle": facts.obstacle if facts else None,
        "connector": facts.connector if facts else None,
        "kv_role": facts.kv_role if facts else None,
        "lease_s": facts.lease_s if facts else None,
        "tensor_parallel": facts.tensor_parallel if facts else None,
        "budget_tokens": facts.budget_tokens if facts else None,
        "kv_capacity_tokens": facts.kv_capacity_tokens if facts else None,
        "fingerprint": dict(facts.fingerprint) if facts else {},
        "has_metrics": bool(facts and facts.has_metrics),
        "advice": list(advice(facts)) if facts else [],
        "slots": facts.slots if facts else None,
        "context_tokens": facts.context_tokens if facts else None,
        "sequences": worker.sequences if worker else 0,
        "prefill_tokens": worker.prefill_tokens if worker else 0,
        "kv_tokens": worker.kv_tokens if worker else 0,
    }


def describe_incompatible(workers: Iterable[WorkerFacts]) -> list[dict[str, Any]]:
    """The pairs that the roles would allow and the engines do not, each with the first difference. Workers that hand nothing
    over at all are no pairs: their `obstacle` says it once."""
    able = [facts for facts in workers if facts.dialect is not None]
    found = []
    for prefill in (facts for facts in able if Role.PREFILL in facts.allowed_roles):
        for decode in (facts for facts in able if Role.DECODE in facts.allowed_roles):
            why = None if prefill is decode or not _shares_model(prefill, decode) else why_not_compatible(prefill, decode)
            if why is not None:
                found.append({"prefill": prefill.worker, "decode": decode.worker, "why": why})
                if len(found) == _PAIRS_SHOWN:
                    return found
    return found


def _shares_model(one: WorkerFacts, other: WorkerFacts) -> bool:
    return not set(one.models).isdisjoint(other.models)
