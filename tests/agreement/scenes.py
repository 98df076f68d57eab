"""What both are given: small fleets of a 70B model's workers, short answers so that hundreds of requests are soon served."""

import msgspec

from twinpool.config import Balance, BalanceMode, Routing, RoutingPolicy
from twinpool.core.model import Role
from twinpool.sim.scenario import Gateway, Scenario, TrafficSpec, WorkerGroup
from twinpool.workload.arrivals import Poisson
from twinpool.workload.lengths import Uniform
from twinpool.workload.mixes import short_and_long

_LAW = Routing(policy=RoutingPolicy.LEAST_COST)


def _group(count: int, role: Role) -> WorkerGroup:
    return WorkerGroup(count=count, role=role, profile="llama-3.1-70b-h100-tp8", budget_tokens=2048)


_POOLS = (_group(2, Role.PREFILL), _group(1, Role.DECODE))
_WRONG_SPLIT = (_group(1, Role.PREFILL), _group(3, Role.DECODE))


def _scene(
    name: str,
    workers: tuple[WorkerGroup, ...],
    rate: float,
    routing: Routing,
    balance: BalanceMode,
    *,
    dispatch_s: float = 0.001,
) -> Scenario:
    """At no distance at all, what follows from the end of an engine's step is there when its next step begins."""
    mix = short_and_long(0.4, output=Uniform(10, 50))
    return Scenario(
        name=name,
        traffic=TrafficSpec(mix=msgspec.to_builtins(mix), arrivals=Poisson(rate=rate)),
        duration_s=20.0,
        routing=routing,
        balance=Balance(mode=balance),
        knows_costs=False,
        gateway=Gateway(dispatch_s=dispatch_s),
        workers=workers,
    )


SCENES = {
    scene.name: scene
    for scene in (
        _scene("colocated", (_group(2, Role.COLOCATED),), 20.0, Routing(), BalanceMode.OFF),
        _scene("two pools", _POOLS, 20.0, Routing(), BalanceMode.OFF),
        _scene("the law", _POOLS, 20.0, _LAW, BalanceMode.OFF),
        _scene("balance", _WRONG_SPLIT, 50.0, _LAW, BalanceMode.AUTO),
        _scene("no distance", _WRONG_SPLIT, 50.0, _LAW, BalanceMode.AUTO, dispatch_s=0.0),
    )
}


def with_seed(scene: Scenario, seed: int) -> Scenario:
    return msgspec.structs.replace(scene, seed=seed)


def slower(scene: Scenario, factor: float) -> Scenario:
    """The same fleet with engines that take so much longer for every step."""
    workers = tuple(msgspec.structs.replace(group, slowness=factor) for group in scene.workers)
    return msgspec.structs.replace(scene, workers=workers)
