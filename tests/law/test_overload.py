"""More is asked for than the workers can do: who is served, on a virtual clock."""

from collections.abc import Iterable

import msgspec
from tests.law.fleet import PROFILE

from twinpool.config import Balance, BalanceMode, Routing, RoutingPolicy
from twinpool.core import commands as do
from twinpool.core import events as on
from twinpool.core.model import RequestFacts, Role
from twinpool.sim.run import Run, simulate
from twinpool.sim.scenario import Scenario, TrafficSpec, WorkerGroup
from twinpool.workload.offered import Offered

_SECONDS = 20.0
_PREFILL = WorkerGroup(count=1, role=Role.PREFILL, profile=PROFILE)
_FLEET = (_PREFILL, msgspec.structs.replace(_PREFILL, role=Role.DECODE))
_SLO_TTFT_S = 1.3


class Seen:
    """Seconds to the first token of those that got one, by who asked."""

    def __init__(self) -> None:
        self._arrived: dict[str, tuple[float, RequestFacts]] = {}
        self.ttft_s: dict[tuple[str, int], list[float]] = {}

    def __call__(self, event: on.Event, commands: list[do.Command]) -> None:
        if isinstance(event, on.RequestArrived):
            self._arrived[event.request] = (event.at, event.facts)
        if isinstance(event, on.FirstTokenArrived):
            at, facts = self._arrived[event.request]
            self.ttft_s.setdefault((facts.tenant, facts.priority), []).append(event.at - at)

    def in_time(self, tenant: str = "", priority: int = 0) -> int:
        return sum(ttft_s <= _SLO_TTFT_S for ttft_s in self.ttft_s.get((tenant, priority), ()))


def every(seconds: float, *, tenant: str = "", priority: int = 0) -> list[Offered]:
    count = round(_SECONDS / seconds)
    return [Offered(seconds * n, 3000, 50, is_long=True, tenant=tenant, priority=priority) for n in range(count)]


def play(*requests: Iterable[Offered], **rules: float) -> tuple[Run, Seen]:
    """One worker that prefills and one that decodes: the first reads some 7 prompts of 3,000 tokens a second."""
    scenario = Scenario(
        name="overload",
        traffic=TrafficSpec(trace="given"),
        duration_s=_SECONDS,
        routing=Routing(policy=RoutingPolicy.LEAST_COST, max_waiting=2000, queue_timeout_s=120.0, **rules),  # type: ignore[arg-type]
        balance=Balance(mode=BalanceMode.OFF),
        workers=_FLEET,
    )
    seen = Seen()
    merged = sorted((request for each in requests for request in each), key=lambda request: request.at_s)
    return simulate(scenario, scenario.all_arms()[0], requests=iter(merged), on_step=seen), seen


def test_a_tenant_that_floods_does_not_starve_another() -> None:
    run, seen = play(every(0.05, tenant="flood"), every(0.4, tenant="calm"))
    assert seen.in_time("calm") == 50
    assert len(seen.ttft_s["flood", 0]) == 400, "all of it is served in the end"
    assert seen.in_time("flood") < 100
    assert max(seen.ttft_s["calm", 0]) < 1.0
    alone, _ = play([*every(0.05), *every(0.4)])
    assert run.seconds < 1.02 * alone.seconds, "turns cost no work"


def test_what_is_urgent_is_in_time_and_the_rest_is_served_after_it() -> None:
    _, seen = play(every(0.1), every(0.4, priority=10))
    assert seen.in_time(priority=10) == 50
    assert len(seen.ttft_s["", 0]) == 200


def test_a_flood_of_urgent_ones_does_not_hold_the_others_up_for_ever() -> None:
    """A step of priority is worth 2 s here: whoever has waited longer goes first."""
    _, seen = play(every(0.1, priority=1), every(0.5), priority_lead_s=2.0)
    lag = max(seen.ttft_s["", 0]) - max(seen.ttft_s["", 1])
    assert 1.0 < lag < 3.0


def test_who_would_be_late_is_refused_and_the_others_are_in_time() -> None:
    _, late = play(every(0.1))
    run, seen = play(every(0.1), refuse_late=True)
    assert run.decisions["refuse", "late"] == run.recording.outcomes["refused"] > 0
    assert seen.in_time() > 0.95 * run.recording.outcomes["ok"]
    assert seen.in_time() > 2 * late.in_time()


def test_nobody_is_refused_who_would_be_in_time() -> None:
    run, seen = play(every(0.2), refuse_late=True)
    assert run.recording.outcomes["ok"] == seen.in_time() == 100
