"""How the peers route: at once, to whoever has least, and the engines' queues hold what waits.

None of them keeps a request back to see which worker frees first. Roles are what the pools say now.
"""

from collections.abc import Callable, Sequence

from twinpool.core.cluster import WorkerView
from twinpool.core.decisions import Choice, Decision, Why
from twinpool.core.lifecycle import PairState
from twinpool.core.model import Role
from twinpool.core.policies import Pending, Policies, Route

Disaggregates = Callable[[Pending], bool]
"""Whether this request is handed over at all; one that is not is served whole by a decode worker."""


def pushing(disaggregates: Disaggregates) -> Route:
    def route(pending: Pending, workers: Sequence[WorkerView]) -> Decision:
        if not workers:
            return Decision(Choice.WAIT, Why.NO_WORKER)
        prefills = [worker for worker in workers if worker.role is Role.PREFILL]
        decodes = [worker for worker in workers if worker.role is not Role.PREFILL]
        if pending.must_continue or pending.failed_handoffs or not prefills or not decodes or not disaggregates(pending):
            whole = min(decodes or prefills, key=_load)
            return Decision(Choice.COLOCATED, Why.NO_PREFILL_WORKER, decode=whole.facts.worker)
        prefill = min(prefills, key=lambda worker: (worker.prefill_tokens, worker.facts.worker))
        partners = [worker for worker in decodes if prefill.partners.get(worker.facts.worker) is PairState.PROVED]
        if not partners:
            return Decision(Choice.COLOCATED, Why.NO_PAIR, decode=min(decodes, key=_load).facts.worker)
        decode = min(partners, key=_load).facts.worker
        return Decision(Choice.DISAGGREGATED, Why.PAIR_READY, prefill=prefill.facts.worker, decode=decode)

    return route


def _load(worker: WorkerView) -> tuple[int, int, str]:
    return worker.sequences, worker.kv_tokens + worker.prefill_tokens, worker.facts.worker


def in_place(route: Route) -> Callable[[Policies], Policies]:
    """The project's policies with this route, and no balancing of their own: a peer's planner asks from outside."""
    return lambda policies: policies._replace(route=route)


def always(pending: Pending) -> bool:
    """Every prompt is handed over: what Dynamo, Arrow and DOPD do once they run two pools."""
    return True


def longer_than(tokens: int) -> Disaggregates:
    """A fixed threshold on the prompt: 4,096 tokens in AWS's guide for HyperPod."""
    return lambda pending: pending.prompt_tokens > tokens


def uncached_over(tokens: int) -> Disaggregates:
    """llm-d's decider: prompt tokens that the decode worker does not hold already. Where the router knows nothing of caches,
    none are."""
    return lambda pending: pending.prompt_tokens > tokens
