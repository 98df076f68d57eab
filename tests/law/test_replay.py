"""Same events, same commands: also for what the law has learnt, and from any moment on."""

import msgspec
from tests.law.fleet import PROFILE

from twinpool import __version__
from twinpool.assemble import build_controller, replay
from twinpool.config import Balance, Objectives, Routing, RoutingPolicy
from twinpool.core import commands as do
from twinpool.core import events as on
from twinpool.core.journal import Header, encode_header, encode_step
from twinpool.core.model import Role
from twinpool.sim.run import kind_of, law_of, simulate
from twinpool.sim.scenario import Arm, Fault, FaultKind, Scenario, TrafficSpec, WorkerGroup
from twinpool.workload.arrivals import Poisson

GROUPS = (
    WorkerGroup(count=1, role=Role.PREFILL, profile=PROFILE, budget_tokens=2048),
    WorkerGroup(count=3, role=Role.DECODE, profile=PROFILE, budget_tokens=2048),
)
SCENARIO = Scenario(
    name="replay",
    traffic=TrafficSpec(mix="mixed-60-40", arrivals=Poisson(rate=50.0)),
    duration_s=20.0,
    objectives=Objectives(),
    routing=Routing(policy=RoutingPolicy.LEAST_COST, max_waiting=1000),
    balance=Balance(),
    workers=GROUPS,
    faults=(Fault(at_s=12.0, worker="w001", kind=FaultKind.CRASH, lasts_s=3.0),),
)
LAW = law_of(SCENARIO, [kind_of(group) for group in GROUPS])
Steps = list[tuple[on.Event, list[do.Command]]]


def steps() -> Steps:
    told: Steps = []
    simulate(SCENARIO, Arm(name="replay", workers=GROUPS), on_step=lambda event, commands: told.append((event, commands)))
    return told


def test_a_simulation_replays_and_goes_on_from_any_moment() -> None:
    told = steps()
    assert any(isinstance(command, do.RecordRole) for _, commands in told for command in commands)
    lines = [encode_header(Header(version=__version__, rules=SCENARIO.routing, law=LAW))]
    lines += [encode_step(event, commands) for event, commands in told]
    assert replay(lines).difference is None
    for moment in range(len(told) // 5, len(told), len(told) // 4):
        before = build_controller(SCENARIO.routing, law=LAW)
        for event, _ in told[:moment]:
            before.handle(event)
        header = Header(version=__version__, rules=SCENARIO.routing, law=LAW, snapshot=before.remember())
        rest = [encode_header(header)] + [encode_step(event, commands) for event, commands in told[moment : moment + 400]]
        assert replay(rest).difference is None


def test_the_books_balance_at_every_step() -> None:
    controller = build_controller(SCENARIO.routing, law=LAW)
    for n, (event, _) in enumerate(steps()):
        controller.handle(event)
        if n % 7 == 0:
            controller.validate()
    assert controller.live_requests == 0


def test_the_law_is_part_of_the_journal() -> None:
    header = encode_header(Header(version=__version__, rules=SCENARIO.routing, law=LAW))
    assert msgspec.json.decode(header)["law"]["priors"]
