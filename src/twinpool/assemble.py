"""The one place where policies meet the core. The gateway, the simulator and a replay all build their controller here."""

from twinpool.config import Routing
from twinpool.core.controller import Controller
from twinpool.core.policies import Policies
from twinpool.policy.admission import bounded_queue
from twinpool.policy.estimates import PromptLengths
from twinpool.policy.routing import disaggregate_when_possible, least_loaded_decode


def build_controller(rules: Routing) -> Controller:
    """A fresh controller with the project's policies."""
    policies = Policies(
        admit=bounded_queue(rules),
        route=disaggregate_when_possible(rules),
        pick_decode=least_loaded_decode,
        prompt_lengths=PromptLengths(),
    )
    return Controller(policies, rules)
