"""What `policies.py` and `article.py` play: a cell is a model on eight workers, a traffic and an ITL objective; a way is how it
is served."""

import hashlib
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec

import twinpool
from twinpool.assemble import build_controller
from twinpool.config import Balance, BalanceMode, Objectives, Routing, RoutingPolicy
from twinpool.core.controller import Controller
from twinpool.core.law import Law
from twinpool.core.model import Role
from twinpool.sim.bound import demand_of
from twinpool.sim.goodput import ATTAINMENT_RATIO
from twinpool.sim.options import Bounds, Fleet
from twinpool.sim.planners import Planner
from twinpool.sim.run import Run, simulate
from twinpool.sim.scenario import Scenario, TrafficSpec, WorkerGroup
from twinpool.sim.shelf import load_profile, open_trace
from twinpool.workload.arrivals import Arrivals, Burst, Poisson
from twinpool.workload.lengths import Exactly, Uniform
from twinpool.workload.mixes import Drift, Swing, Traffic, short_and_long
from twinpool.workload.offered import Offered, offered, scaled

sys.path.append(str(Path(__file__).parent / "peers"))

from compare import Peer, peers_for

WORKERS = 8
PROFILES = {
    "tp8": "llama-3.1-70b-h100-tp8",
    "tp4": "llama-3.1-70b-h100-tp4",
    "8b": "llama-3.1-8b-h100-tp1",
}
PEERS = {
    "always": "all handed over",
    "aws": "threshold 4,096 (AWS)",
    "llm-d": "uncached over 512 (llm-d)",
    "arrow": "role flips (Arrow)",
    "dynamo": "load planner (Dynamo)",
    "dopd": "ratio (DOPD)",
}
"""By the name of their arm."""


class Kind(NamedTuple):
    """A traffic; `seconds` of it are made at about the bound, and played faster or slower."""

    make: Callable[[int, float, float], Iterator[Offered]]
    seconds: float
    ttft_s: float = 1.3


def _of(arrivals: Callable[[float], Arrivals], traffic: Traffic) -> Callable[[int, float, float], Iterator[Offered]]:
    def make(seed: int, rate: float, seconds: float) -> Iterator[Offered]:
        return offered(arrivals(rate), traffic, Random(seed), duration_s=seconds)

    return make


_published: list[Path] = []


def traces_from(folder: Path) -> None:
    """Where the published traces lie whole; the package has the first few thousand requests of them."""
    _published[:] = [folder]


def _trace(name: str, published: str | None = None) -> Callable[[int, float, float], Iterator[Offered]]:
    def make(seed: int, rate: float, seconds: float) -> Iterator[Offered]:
        """Begun elsewhere for another seed, a fifth of it further on; after its end comes its beginning."""
        where = str(_published[0] / published) if published else name
        rows = list(open_trace(where, long_prompt_tokens=1500))
        lasts_s = rows[-1].at_s + rows[-1].at_s / len(rows)
        start = (seed - 1) * len(rows) // 5 % len(rows)
        around = [msgspec.structs.replace(row, at_s=row.at_s + lasts_s) for row in rows[:start]]
        rows = (rows[start:] + around)[: round(rate * seconds)]
        began = rows[0].at_s
        span = rows[-1].at_s - began
        speed = span / seconds
        for row in rows:
            yield msgspec.structs.replace(row, at_s=(row.at_s - began) / speed)

    return make


def _burst(rate: float) -> Arrivals:
    return Burst(rate=rate / 3, factor=3.0, starts_s=30.0, lasts_s=60.0)


def _poisson(rate: float) -> Arrivals:
    return Poisson(rate=rate)


_DRIFT = Drift(start=short_and_long(0.0), to=short_and_long(1.0), points=((0, 0.1), (150, 0.7), (300, 0.1)))
_SWING = Swing(one=short_and_long(0.6, output=Exactly(60)), other=short_and_long(0.1, output=Exactly(500)), every_s=120.0)
TRAFFICS = {
    "50": Kind(_of(_poisson, short_and_long(0.4, output=Uniform(25, 75))), 100.0),
    "200": Kind(_of(_poisson, short_and_long(0.4)), 100.0),
    "500": Kind(_of(_poisson, short_and_long(0.4, output=Uniform(250, 750))), 100.0),
    "drift": Kind(_of(_poisson, _DRIFT), 300.0),
    "burst": Kind(_of(_burst, short_and_long(0.4)), 120.0),
    "swing": Kind(_of(_poisson, _SWING), 240.0),
    "slice": Kind(_of(_poisson, short_and_long(0.4)), 30.0),
    "conv": Kind(_trace("azure-conv"), 60.0),
    "mooncake": Kind(_trace("mooncake-conv"), 120.0, ttft_s=5.0),
    "conv-whole": Kind(_trace("azure-conv", "azure-2023-conv.csv"), 60.0),
    "mooncake-whole": Kind(_trace("mooncake-conv", "mooncake-conversation.jsonl"), 120.0, ttft_s=5.0),
}
_GUESS = {"tp8": 106.0, "tp4": 66.0, "8b": 160.0}
"""Requests a second at which the sample is made from which the bound is computed."""


class Cell(NamedTuple):
    profile: str
    traffic: str
    itl_s: float

    def __str__(self) -> str:
        return f"{self.profile} {self.traffic} at {self.itl_s * 1e3:.0f} ms"


class Way(NamedTuple):
    """`policy` (law, fixed, or a peer's of `PEERS`) on so many prefill, decode and colocated workers with this budget. `fixed`:
    the least loaded worker is chosen, and nobody moves."""

    policy: str
    prefill: int
    decode: int
    colocated: int
    budget_tokens: int

    def __str__(self) -> str:
        workers = f"{self.colocated}" if self.colocated else f"{self.prefill}:{self.decode}"
        return f"{self.policy} {workers} budget {self.budget_tokens}"


def cells() -> list[Cell]:
    """All but the slice that a test plays. Of traces the whole ones, where they are."""
    left_out = {"slice", *(("conv", "mooncake") if _published else ("conv-whole", "mooncake-whole"))}
    named = [traffic for traffic in TRAFFICS if traffic not in left_out]
    return [Cell(profile, traffic, itl_s) for profile in PROFILES for itl_s in (0.05, 0.025) for traffic in named]


class Sample(NamedTuple):
    """Requests of so many seconds. `rate` is what they are called: the mean, or in a burst its height."""

    requests: list[Offered]
    seconds: float
    rate: float


@cache
def sample(cell: Cell, seed: int) -> Sample:
    """At about the bound."""
    kind = TRAFFICS[cell.traffic]
    ceiling = bound_req_s(cell)
    requests = list(kind.make(seed, ceiling, kind.seconds))
    return Sample(requests, kind.seconds, ceiling if cell.traffic == "burst" else len(requests) / kind.seconds)


@cache
def bounds_of(cell: Cell) -> Bounds:
    """What no policy exceeds, for the lengths of the first sample."""
    kind = TRAFFICS[cell.traffic]
    objectives = Objectives(slo_ttft_s=kind.ttft_s, slo_itl_s=cell.itl_s)
    demand = demand_of(kind.make(1, _GUESS[cell.profile], kind.seconds))
    return Bounds(Fleet(load_profile(PROFILES[cell.profile]), WORKERS, objectives), demand)


@cache
def bound_req_s(cell: Cell) -> float:
    """Of any policy at any budget."""
    return bounds_of(cell).any_policy()


def scenario_of(cell: Cell, way: Way, seconds: float, mode: BalanceMode) -> Scenario:
    groups = [
        WorkerGroup(count=count, role=role, profile=PROFILES[cell.profile], budget_tokens=way.budget_tokens)
        for count, role in ((way.prefill, Role.PREFILL), (way.decode, Role.DECODE), (way.colocated, Role.COLOCATED))
        if count
    ]
    return Scenario(
        name=str(cell),
        traffic=TrafficSpec(trace="the benchmark's"),
        duration_s=seconds,
        objectives=Objectives(slo_ttft_s=TRAFFICS[cell.traffic].ttft_s, slo_itl_s=cell.itl_s),
        routing=Routing(
            policy=RoutingPolicy.LEAST_COST, max_waiting=100_000, prefill_window_tokens=4096, queue_timeout_s=600.0
        ),
        balance=Balance(mode=mode),
        workers=tuple(groups),
    )


def play(
    cell: Cell,
    way: Way,
    of: Sample,
    rate: float,
    *,
    mode: BalanceMode = BalanceMode.AUTO,
    attainment: float | None = None,
    watch: Planner | None = None,
) -> Run:
    """The sample at this rate. With `attainment` the run is given up where it cannot be reached any more. `mode` is the law's;
    `watch` is told of all that ends."""
    scale = rate / of.rate
    scenario = scenario_of(cell, way, of.seconds / scale, mode if way.policy == "law" else BalanceMode.OFF)
    arm = scenario.all_arms()[0]
    allowed = float("inf") if attainment is None else (1 - attainment) * 0.85 * len(of.requests)
    requests = scaled(of.requests, rate=scale)
    if way.policy == "law":
        return simulate(scenario, arm, planner=watch, requests=requests, misses_allowed=allowed)
    if way.policy == "fixed":
        return simulate(scenario, arm, build=simple, planner=watch, requests=requests, misses_allowed=allowed)
    peer: Peer = peers_for(scenario, arm)[PEERS[way.policy]]
    planner = peer.planner() if peer.planner is not None else None
    return simulate(scenario, arm, build=peer.build, planner=planner, requests=requests, misses_allowed=allowed)


def carries(cell: Cell, way: Way, of: Sample, rate: float) -> Run:
    return play(cell, way, of, rate, attainment=ATTAINMENT_RATIO)


def simple(rules: Routing) -> Controller:
    """The least loaded worker is chosen: by tokens to read, or by sequences."""
    least = msgspec.structs.replace(rules, policy=RoutingPolicy.LEAST_LOADED)
    return build_controller(least, law=Law(balance=Balance(mode=BalanceMode.OFF), learns=False))


_OF_THE_LAW = ("balancing", "capacity", "costs", "demand", "fits", "learning", "prefix", "priors", "routing")


def digest(policy: str) -> str:
    """Of all the code that decides or simulates under this policy."""
    root = Path(twinpool.__file__).parent
    found = hashlib.sha256(Path(__file__).read_bytes())
    rooms = [path for room in ("core", "policy", "sim", "workload") for path in sorted((root / room).rglob("*.py"))]
    if policy in PEERS:
        rooms += sorted((Path(__file__).parent / "peers").glob("*.py"))
    for path in rooms:
        if policy == "law" or path.parent.name != "policy" or path.stem not in _OF_THE_LAW:
            found.update(path.read_bytes())
    return found.hexdigest()[:12]
