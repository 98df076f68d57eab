"""Who gets in: everyone, until the router's queue is full or the gateway is ending."""

from twinpool.config import Routing
from twinpool.core.decisions import Why
from twinpool.core.model import RequestFacts
from twinpool.core.policies import Admit, Entrance


def bounded_queue(rules: Routing) -> Admit:
    """Refuse at `rules.max_waiting`: a waiting request holds its body in memory, and its client would rather know."""

    def admit(facts: RequestFacts, entrance: Entrance) -> Why | None:
        if entrance.is_draining:
            return Why.DRAINING
        if entrance.waiting >= rules.max_waiting:
            return Why.QUEUE_FULL
        return None

    return admit
