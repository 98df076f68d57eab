"""Who gets in: everyone, until the router's queue is full or the gateway is ending; and, where that was asked for, nobody who
would be late.

Whose turn it is among those that wait, and who yields where the queue is full, says `core.line`."""

from twinpool.config import Routing
from twinpool.core.decisions import Decision, Why
from twinpool.core.law import Law
from twinpool.core.model import RequestFacts
from twinpool.core.policies import Admit, Entrance, Late
from twinpool.policy.learning import Learning


def bounded_queue(rules: Routing) -> Admit:
    """Refuse at `rules.max_waiting`: a waiting request holds its body in memory, and its client would rather know."""

    def admit(facts: RequestFacts, entrance: Entrance) -> Why | None:
        if entrance.is_draining:
            return Why.DRAINING
        if entrance.waiting >= rules.max_waiting:
            return Why.QUEUE_FULL
        return None

    return admit


def predicted_miss(law: Law, learning: Learning) -> Late:
    """Late is what waits behind others for too long. A prompt that takes longer than the objective to read is late however idle
    the workers are: to refuse it would help nobody, and would never end."""
    objective_s = law.objectives.slo_ttft_s

    def late(facts: RequestFacts, prompt_tokens: int, waited_s: float, decision: Decision) -> float | None:
        ttft_s = decision.predicted_ttft_s
        if ttft_s is None or waited_s + ttft_s <= objective_s:
            return None
        alone_s = learning.costs.quickest_read(prompt_tokens)
        return waited_s + ttft_s - objective_s if alone_s is not None and alone_s <= objective_s else None

    return late
