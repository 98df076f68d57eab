"""What engines say of their load, and how old that is when it is known."""

import pytest
from tests.sim.plain import profile
from tests.sim.scenes import group, play, scene

from twinpool.config import Routing, RoutingPolicy
from twinpool.core import commands as do
from twinpool.core import events as on
from twinpool.core.model import Role
from twinpool.sim.scenario import Gateway
from twinpool.workload.offered import Offered

KV_TOKENS = 2000
STEPS = ((1, 100, 10.0), (1, 200, 10.0), (8, 100, 17.0), (8, 200, 17.0))


def filling(gateway: Gateway) -> tuple[list[on.LoadReported], list[str]]:
    """One answer fills w000, two shorter ones run on w001, where steps take longer for that, and a last request comes when w000
    is full: what was told of w000, and where the four went."""
    requests = [
        Offered(at_s, *tokens, False) for at_s, *tokens in ((0, 1100, 890), (0.05, 10, 900), (0.1, 10, 900), (8.85, 20, 3))
    ]
    told: list[on.LoadReported] = []
    went: list[str] = []

    def look(event: on.Event, commands: list[do.Command]) -> None:
        if isinstance(event, on.LoadReported) and event.worker == "w000":
            told.append(event)
        went.extend(command.worker for command in commands if isinstance(command, do.SendWhole))

    law = Routing(policy=RoutingPolicy.LEAST_COST)
    scenario = scene(workers=(group(2, Role.COLOCATED),), routing=law, knows_costs=True, gateway=gateway)
    play(scenario, profile=profile(kv_tokens=KV_TOKENS, decode_step_ms=STEPS), requests=iter(requests), on_step=look)
    return told, went


@pytest.mark.parametrize(
    ("gateway", "last"),
    [
        (Gateway(), "w000"),
        (Gateway(load_reports_s=0.1), "w001"),
        (Gateway(load_reports_s=0.1, load_age_s=2.0), "w000"),
    ],
    ids=["nothing is told", "fresh", "told too late"],
)
def test_a_full_engine_is_avoided_as_soon_as_that_is_known(gateway: Gateway, last: str) -> None:
    _, went = filling(gateway)
    assert went == ["w000", "w001", "w001", last]


def test_a_report_is_as_old_as_the_scenario_says() -> None:
    told, _ = filling(Gateway(load_reports_s=0.5, load_age_s=2.0))
    assert [report.at for report in told[:2]] == pytest.approx([2.5, 3.0])
    assert {report.age_s for report in told} == {2.0}
    for report in told[:12]:
        written = (report.at - report.age_s - 0.110) / 0.010  # after 110 ms for its prompt a token every 10
        assert report.kv_used_ratio == pytest.approx(
            (1100 + written) / KV_TOKENS, abs=0.035
        )  # the engine counts by leaps of 64
        assert (report.running, report.waiting) == (1, 0)
