"""The one place where policies meet the core. The gateway, the simulator and a replay all build their controller here."""

from collections.abc import Callable, Iterable, Mapping

import msgspec

from twinpool.config import Routing, RoutingPolicy
from twinpool.core.commands import Command
from twinpool.core.controller import Controller
from twinpool.core.journal import Cut, decode_header, decode_steps
from twinpool.core.law import CostPrior, Law
from twinpool.core.policies import Policies
from twinpool.core.snapshot import decode_snapshot
from twinpool.errors import UserError
from twinpool.policy.admission import bounded_queue, predicted_miss
from twinpool.policy.balancing import least_pressure
from twinpool.policy.estimates import PromptLengths
from twinpool.policy.learning import Learning
from twinpool.policy.least_loaded import disaggregate_when_possible, least_loaded_decode
from twinpool.policy.priors import prior_of
from twinpool.policy.routing import least_cost
from twinpool.profile import Profile

Change = Callable[[Policies], Policies]
"""Puts other policies in the place of the project's: what is compared with them runs behind the same core."""


def build_controller(
    rules: Routing,
    snapshot: msgspec.Raw | None = None,
    law: Law = Law(),  # noqa: B008  frozen
    *,
    change: Change | None = None,
) -> Controller:
    """A controller with the project's policies: a fresh one, or one that goes on where `Controller.remember` was asked.

    Raises `UserError` for a snapshot that is none.
    """
    learning = Learning(law)
    simple = disaggregate_when_possible(rules)
    is_least_cost = rules.policy is RoutingPolicy.LEAST_COST
    policies = Policies(
        admit=bounded_queue(rules),
        late=predicted_miss(law, learning),
        route=least_cost(rules, learning, simple) if is_least_cost else simple,
        pick_decode=least_loaded_decode,
        prompt_lengths=PromptLengths(law.prompt_lengths),
        learner=learning,
        balance=least_pressure(law, learning, can_be_one_pool=is_least_cost),
    )
    if change is not None:
        policies = change(policies)
    try:
        return Controller(policies, rules, decode_snapshot(snapshot) if snapshot is not None else None, law)
    except KeyError as missing:
        raise UserError(f"the journal's snapshot is broken: it has no {missing}") from missing


def priors_of(profiles: Mapping[str, tuple[Profile, int | None]]) -> dict[str, CostPrior]:
    """What the estimates start from, by kind of worker: from its profile and its engine's budget of tokens a step."""
    return {kind: prior_of(profile, budget_tokens) for kind, (profile, budget_tokens) in profiles.items()}


class Difference(msgspec.Struct, frozen=True):
    """Where a replay left the journal: what line `line` says was commanded, and what was now."""

    line: int
    expected: tuple[Command, ...]
    got: tuple[Command, ...]


class Replay(msgspec.Struct, frozen=True):
    """What came of a replay: the events fed, the first difference, and whether the journal's last line is cut short."""

    events: int
    difference: Difference | None = None
    is_cut: bool = False


def replay(lines: Iterable[bytes]) -> Replay:
    """Feed a journal's events to a fresh controller, or to one built from its snapshot, up to the first command that differs.

    The lines come with their ends, as a file gives them. Raises `UserError` for what is not a journal of this version.
    """
    rest = iter(lines)
    header = next(rest, None)
    if header is None:
        raise UserError("the journal is empty")
    began = decode_header(header)
    controller = build_controller(began.rules, None if began.snapshot is msgspec.UNSET else began.snapshot, began.law)
    events = 0
    for line, step in decode_steps(rest):
        if isinstance(step, Cut):
            return Replay(events, is_cut=True)
        events += 1
        got = tuple(controller.handle(step.event))
        if got != step.commands:
            return Replay(events, Difference(line, step.commands, got))
    return Replay(events)
