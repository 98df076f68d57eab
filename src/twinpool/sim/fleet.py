"""The workers of a simulation: what the probes would say of each, and the engine that it really is.

Engines verify their handles here, so their pairs are proved from the start: canaries are not what is simulated.
"""

from typing import NamedTuple

import msgspec

from twinpool.core.model import Dialect, Role, WorkerFacts, kind_of
from twinpool.profile import Profile
from twinpool.sim.cost import StepCost
from twinpool.sim.engine import Engine, EngineLimits, Listener, Meter
from twinpool.sim.link import Ports
from twinpool.sim.loop import Loop
from twinpool.sim.scenario import WorkerGroup
from twinpool.sim.stream_gaps import GapLimits

MODEL = "simulated"


class Kind(NamedTuple):
    """What the workers of one group share."""

    group: WorkerGroup
    profile: Profile
    cost: StepCost

    def budget_for(self, role: Role) -> int:
        """Tokens a step. Engines have one budget for every role; another one for each is a what-if that a scenario names."""
        return self.group.budget_by_role.get(role.value, self.group.budget_tokens)


def name_of(kind: Kind) -> str:
    """By which the estimates know these workers."""
    return kind_of(_facts(kind, "w000", 30.0, continues=False))


class SimulatedWorker:
    """`incarnation` counts its engine's lives; it `is_up` when something answers at its address."""

    __slots__ = ("engine", "facts", "incarnation", "is_up", "kind", "ports")

    def __init__(self, facts: WorkerFacts, kind: Kind, engine: Engine, ports: Ports) -> None:
        self.facts = facts
        self.kind = kind
        self.engine = engine
        self.ports = ports
        self.incarnation = 1
        self.is_up = True

    def restart(self) -> None:
        self.incarnation += 1
        self.is_up = True
        self.engine.slowness = self.kind.group.slowness
        self.facts = msgspec.structs.replace(self.facts, incarnation=str(self.incarnation))


def build_fleet(
    kinds: list[Kind], loop: Loop, listener: Listener, meter: Meter, *, gap_limits: GapLimits, lease_s: float, continues: bool
) -> dict[str, SimulatedWorker]:
    """By id, `w000` on, in the order of the groups."""
    fleet: dict[str, SimulatedWorker] = {}
    for kind in kinds:
        group, profile = kind.group, kind.profile
        limits = EngineLimits(
            kv_tokens=profile.kv_tokens,
            context_tokens=profile.context_tokens,
            sequences=group.sequences or profile.max_sequences,
            budget_tokens=kind.budget_for(group.role),
            scheduling=group.scheduling,
            caches_prefixes=group.caches_prefixes,
        )
        for _ in range(group.count):
            name = f"w{len(fleet):03}"
            facts = _facts(kind, name, lease_s, continues=continues)
            engine = Engine(loop, kind.cost, limits, listener, meter, gap_limits)
            engine.slowness = group.slowness
            fleet[name] = SimulatedWorker(
                facts, kind, engine, Ports.of(group.handoff_bytes_per_s or profile.handoff_bytes_per_s)
            )
    return fleet


def _facts(kind: Kind, name: str, lease_s: float, *, continues: bool) -> WorkerFacts:
    group, profile = kind.group, kind.profile
    return WorkerFacts(
        worker=name,
        url=f"http://{name}.example",
        incarnation="1",
        engine=profile.engine,
        models=(MODEL,),
        role=group.role,
        allowed_roles=group.allowed_roles or tuple(Role),
        dialect=Dialect.NIXL,
        slots=group.sequences or profile.max_sequences,
        context_tokens=profile.context_tokens,
        lease_s=lease_s,
        continues=continues,
        tensor_parallel=profile.tensor_parallel,
        vouches=True,
        kv_capacity_tokens=profile.kv_tokens,
        budget_tokens=kind.budget_for(group.role),
    )
