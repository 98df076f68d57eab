"""Run a scenario: builds its fleet, its traffic and the controller, plays them to the end, and says what was seen."""

from collections import Counter
from collections.abc import Callable, Iterator
from math import fsum, inf
from random import Random
from typing import NamedTuple

import msgspec

from twinpool.assemble import build_controller, priors_of
from twinpool.config import Routing
from twinpool.core import commands as do
from twinpool.core import events as on
from twinpool.core.controller import Controller
from twinpool.core.decisions import Balanced
from twinpool.core.law import Law
from twinpool.core.model import Role
from twinpool.errors import UserError
from twinpool.measure.blocks import Window
from twinpool.measure.indicators import WINDOW_S, UnitCosts
from twinpool.profile import Profile
from twinpool.sim.bound import DemandSum
from twinpool.sim.client import Ended
from twinpool.sim.cost import StepCost
from twinpool.sim.driver import Driver
from twinpool.sim.engine import EngineTotals
from twinpool.sim.faults import Faults
from twinpool.sim.fleet import Kind, SimulatedWorker, build_fleet, name_of
from twinpool.sim.loop import Loop, Rank
from twinpool.sim.planners import Planner, call_planner
from twinpool.sim.recording import Recording
from twinpool.sim.scenario import Arm, Scenario, TrafficSpec, WorkerGroup
from twinpool.sim.shelf import load_profile, open_trace
from twinpool.workload.arrivals import Shape
from twinpool.workload.mixes import MIXES, traffic_of
from twinpool.workload.offered import Offered, offered, scaled

Build = Callable[[Routing], Controller]
"""Builds the controller: the gateway's own, or one with a policy to compare with."""


class UseWindow(NamedTuple):
    """Ten seconds: the work that came (seconds of one worker at full batches), and the share of time each worker computed."""

    offered_s: float
    busy: tuple[float, ...]


class Run(NamedTuple):
    """One arm's."""

    arm: Arm
    recording: Recording
    decisions: Counter[tuple[str, str]]
    role_changes: list[tuple[float, str, Role, str]]
    balanced: list[tuple[float, Balanced]]
    totals: dict[str, EngineTotals]
    windows: list[UseWindow]
    costs: UnitCosts
    seconds: float
    lost_leases: int
    demand: DemandSum
    too_long: int
    """Requests that no worker could ever hold; they are not in the demand."""
    kinds: list[Kind]
    is_whole: bool
    """False where it was given up because it could not reach the wanted attainment any more."""

    @property
    def attainment_ratio(self) -> float:
        """Of the requests that arrived in the counted window, those that met the objectives."""
        return self.recording.attainment_ratio if self.is_whole else 0.0

    @property
    def beyond_table_ratio(self) -> float:
        """The share of the engines' time in steps whose cost is extrapolated."""
        busy_s = fsum(totals.busy_s for totals in self.totals.values())
        return fsum(totals.beyond_table_s for totals in self.totals.values()) / busy_s if busy_s else 0.0


class _Use:
    """Looks every ten seconds at how long each worker computed."""

    def __init__(self, loop: Loop, workers: dict[str, SimulatedWorker], costs: UnitCosts, until_s: float) -> None:
        self.windows: list[UseWindow] = []
        self.demand = DemandSum()
        self.too_long = 0
        self._loop = loop
        self._workers = list(workers.values())
        self._longest_tokens = max(worker.engine.longest_tokens for worker in self._workers)
        self._costs = costs
        self._until_s = until_s
        self._offered_s = 0.0
        self._busy_s = [0.0] * len(self._workers)
        loop.call_at(WINDOW_S, Rank.TIMER, self._look)

    def offer(self, request: Offered) -> None:
        tokens = request.prompt_tokens + request.output_tokens
        if tokens > self._longest_tokens:
            self.too_long += 1
            return
        self.demand.add(request)
        costs = self._costs
        self._offered_s += costs.prefill_s_per_token * request.prompt_tokens + costs.decode_s_per_token * request.output_tokens

    def _look(self, at: float, _: object) -> None:
        now = [worker.engine.busy_s(at) for worker in self._workers]
        shares = tuple((new - old) / WINDOW_S for new, old in zip(now, self._busy_s, strict=True))
        self.windows.append(UseWindow(self._offered_s, shares))
        self._busy_s, self._offered_s = now, 0.0
        if at + WINDOW_S <= self._until_s:
            self._loop.call_at(at + WINDOW_S, Rank.TIMER, self._look)


def traffic(spec: TrafficSpec, *, seed: int, duration_s: float, long_prompt_tokens: int) -> Iterator[Offered]:
    """The requests to come, in order, none kept."""
    if spec.trace is not None:
        rows = open_trace(spec.trace, long_prompt_tokens=long_prompt_tokens)
        return scaled(rows, rate=spec.rate_scale, lengths=spec.length_divisor, duration_s=duration_s)
    if spec.mix is None or spec.arrivals is None:
        raise UserError("the traffic has no mix")
    if isinstance(spec.mix, str):
        if spec.mix not in MIXES:
            raise UserError(f"no mix {spec.mix}: there are {', '.join(MIXES)}")
        mix = MIXES[spec.mix]
    else:
        mix = traffic_of(spec.mix, "the mix")
    arrivals = _faster(spec.arrivals, spec.rate_scale)
    rows = offered(arrivals, mix, Random(seed), duration_s=duration_s, long_prompt_tokens=long_prompt_tokens)  # noqa: S311
    return rows if spec.length_divisor == 1.0 else scaled(rows, lengths=spec.length_divisor)


def _faster(arrivals: Shape, scale: float) -> Shape:
    """The same shape over the same time, with so many times the requests."""
    rates = {field: getattr(arrivals, field) * scale for field in ("rate", "to_rate") if hasattr(arrivals, field)}
    return msgspec.structs.replace(arrivals, **rates)


def kind_of(group: WorkerGroup, load: Callable[[str], Profile] = load_profile) -> Kind:
    """Its profile, checked against what the group expects; what the group says about extra costs goes before."""
    profile = load(group.profile)
    profile.require(
        model=group.model,
        engine=group.engine,
        kv_tokens=group.kv_tokens,
        tensor_parallel=group.tensor_parallel,
        flags=group.flags,
    )
    if group.mixed_step_extra_ms is not None:
        profile = msgspec.structs.replace(profile, mixed_step_extra_ms=group.mixed_step_extra_ms)
    return Kind(group, profile, StepCost(profile))


def law_of(scenario: Scenario, kinds: list[Kind]) -> Law:
    """As a gateway's that serves these objectives, and has these workers' profiles (or, `knows_costs` false, none)."""
    known = {name_of(kind): (kind.profile, kind.group.budget_tokens) for kind in kinds} if scenario.knows_costs else {}
    return Law(objectives=scenario.objectives, balance=scenario.balance, priors=priors_of(known))


def simulate(
    scenario: Scenario,
    arm: Arm,
    *,
    build: Build | None = None,
    requests: Iterator[Offered] | None = None,
    load: Callable[[str], Profile] = load_profile,
    misses_allowed: float = inf,
    planner: Planner | None = None,
    on_step: Callable[[on.Event, list[do.Command]], None] | None = None,
) -> Run:
    """Play `arm` to the end of its last request. `requests` stand in for the scenario's traffic where they are given. It is
    given up when more than `misses_allowed` requests of the counted window have missed the objectives."""
    objectives = scenario.objectives
    kinds = [kind_of(group, load) for group in arm.workers]
    loop = Loop()
    recording = Recording(Window.of(scenario.duration_s), objectives)
    controller = build(scenario.routing) if build else build_controller(scenario.routing, law=law_of(scenario, kinds))
    ended = recording.ended if planner is None else _both(recording.ended, planner.ended)
    if misses_allowed < inf:
        ended = _both(ended, lambda end: loop.stop() if recording.misses > misses_allowed else None)
    driver = Driver(loop, controller, scenario.clients, scenario.gateway, ended, on_step)
    workers = build_fleet(
        kinds,
        loop,
        driver,
        recording.tokens,
        gap_limits=recording.gap_limits,
        lease_s=scenario.gateway.lease_s,
        continues=scenario.gateway.continues,
    )
    costs = kinds[0].cost.at_full_batches(kinds[0].profile, objectives.slo_itl_s)
    use = _Use(loop, workers, costs, scenario.duration_s)
    if requests is None:
        requests = traffic(
            scenario.traffic,
            seed=scenario.seed,
            duration_s=scenario.duration_s,
            long_prompt_tokens=objectives.long_prompt_tokens,
        )
    driver.start(workers, _told(requests, use.offer))
    if planner is not None:
        call_planner(planner, loop, driver, controller)
    Faults(loop, driver, scenario.gateway.probe_interval_s).expect(scenario.faults)
    loop.run()
    return Run(
        arm,
        recording,
        driver.decisions,
        driver.role_changes,
        driver.balanced,
        {name: worker.engine.totals for name, worker in workers.items()},
        use.windows,
        costs,
        max(loop.at, scenario.duration_s),
        driver.lost_leases,
        use.demand,
        use.too_long,
        kinds,
        recording.misses <= misses_allowed,
    )


def _both(one: Callable[[Ended], None], other: Callable[[Ended], None]) -> Callable[[Ended], None]:
    def tell(end: Ended) -> None:
        one(end)
        other(end)

    return tell


def _told(requests: Iterator[Offered], tell: Callable[[Offered], None]) -> Iterator[Offered]:
    for request in requests:
        tell(request)
        yield request
