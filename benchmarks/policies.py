"""What the law carries, beside every policy it should beat: the tables of `docs/policies.md`.

A cell is a model on eight workers, a traffic and an ITL objective. For each way of serving (an arm) the highest rate is
searched at which nine in ten requests meet the objectives, on one sample of the traffic, and confirmed on others; beside it
stands the bound, which no policy can exceed on engines of any budget. What was found is kept (`--cache`) under a digest of the
code that it hangs on, so the command goes on where it was interrupted, and `--only` runs a part.

    python benchmarks/policies.py [--only tp8,200,0.05] [--arms law,colocated] [--seeds 5] [--jobs 2]
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any, NamedTuple

import msgspec

import twinpool
from twinpool.assemble import build_controller
from twinpool.config import Balance, BalanceMode, Objectives, Routing, RoutingPolicy
from twinpool.core.controller import Controller
from twinpool.core.law import Law
from twinpool.core.model import Role
from twinpool.sim.bound import capacity_req_s, configurations, demand_of
from twinpool.sim.cost import StepCost
from twinpool.sim.findings import findings_of
from twinpool.sim.goodput import ATTAINMENT_RATIO, highest_scale
from twinpool.sim.run import Run, simulate
from twinpool.sim.scenario import Scenario, TrafficSpec, WorkerGroup
from twinpool.sim.shelf import load_profile, open_trace
from twinpool.workload.arrivals import Arrivals, Burst, Poisson
from twinpool.workload.lengths import Exactly, Uniform
from twinpool.workload.mixes import Drift, Swing, Traffic, short_and_long
from twinpool.workload.offered import Offered, offered, scaled

WORKERS = 8
PROFILES = {
    "tp8": "llama-3.1-70b-h100-tp8",
    "tp4": "llama-3.1-70b-h100-tp4",
    "8b": "llama-3.1-8b-h100-tp1",
}
BUDGETS = (192, 256, 320, 384, 512, 640, 768, 1024, 1536, 2048, 8192)
"""Tokens a step that the colocated baseline is tuned over."""

LAW_BUDGETS = (512, 640, 768, 1024, 8192)
"""One for both roles; which of them is the deployment's choice, as it is for the baseline."""

_CACHED = Path(__file__).parent.parent / ".cache" / "policies.jsonl"


class Kind(NamedTuple):
    """A traffic at about one request a second; `seconds` of it are played at the searched rate."""

    make: Callable[[int, float, float], Iterator[Offered]]
    seconds: float
    ttft_s: float = 1.3


def _of(arrivals: Callable[[float], Arrivals], traffic: Traffic) -> Callable[[int, float, float], Iterator[Offered]]:
    def make(seed: int, rate: float, seconds: float) -> Iterator[Offered]:
        return offered(arrivals(rate), traffic, Random(seed), duration_s=seconds)

    return make


def _trace(name: str, own_rate: float) -> Callable[[int, float, float], Iterator[Offered]]:
    def make(seed: int, rate: float, seconds: float) -> Iterator[Offered]:
        """Begun elsewhere for another seed, a fifth of it further on; after its end comes its beginning."""
        rows = list(open_trace(name, long_prompt_tokens=1500))
        lasts_s = rows[-1].at_s + rows[-1].at_s / len(rows)
        start = (seed - 1) * len(rows) // 5 % len(rows)
        around = [msgspec.structs.replace(row, at_s=row.at_s + lasts_s) for row in rows[:start]]
        rows = (rows[start:] + around)[: round(rate * seconds)]
        began = rows[0].at_s
        span = rows[-1].at_s - began
        speed = span / seconds
        for row in rows:
            yield Offered((row.at_s - began) / speed, row.prompt_tokens, row.output_tokens, row.is_long, row.prefix)

    return make


def _poisson(rate: float) -> Arrivals:
    return Poisson(rate=rate)


def _burst(rate: float) -> Arrivals:
    return Burst(rate=rate / 3, factor=3.0, starts_s=30.0, lasts_s=60.0)


_DRIFT = Drift(start=short_and_long(0.0), to=short_and_long(1.0), points=((0, 0.1), (150, 0.7), (300, 0.1)))
_SWING = Swing(one=short_and_long(0.6, output=Exactly(60)), other=short_and_long(0.1, output=Exactly(500)), every_s=120.0)
TRAFFICS = {
    "50": Kind(_of(_poisson, short_and_long(0.4, output=Uniform(25, 75))), 100.0),
    "200": Kind(_of(_poisson, short_and_long(0.4)), 100.0),
    "500": Kind(_of(_poisson, short_and_long(0.4, output=Uniform(250, 750))), 100.0),
    "drift": Kind(_of(_poisson, _DRIFT), 300.0),
    "burst": Kind(_of(_burst, short_and_long(0.4)), 120.0),
    "swing": Kind(_of(_poisson, _SWING), 240.0),
    "conv": Kind(_trace("azure-conv", 5.0), 60.0),
    "mooncake": Kind(_trace("mooncake-conv", 3.0), 120.0, ttft_s=5.0),
}
GUESS = {"tp8": 106.0, "tp4": 66.0, "8b": 160.0}
"""Requests a second around which the search begins, for the 60/40 mix with answers of 200; scaled by the bound elsewhere."""


class Cell(NamedTuple):
    profile: str
    traffic: str
    itl_s: float

    def __str__(self) -> str:
        return f"{self.profile} {self.traffic} at {self.itl_s * 1e3:.0f} ms"


class Way(NamedTuple):
    """An arm: `policy` on so many prefill, decode and colocated workers with this budget."""

    policy: str
    prefill: int
    decode: int
    colocated: int
    budget_tokens: int

    def __str__(self) -> str:
        workers = f"{self.colocated}" if self.colocated else f"{self.prefill}:{self.decode}"
        return f"{self.policy} {workers} budget {self.budget_tokens}"


class Figure(NamedTuple):
    """`rate_req_s` is carried; `confirmed` are the shares that met the objectives there on other samples."""

    rate_req_s: float
    confirmed: tuple[float, ...]
    ttft_mean_s: float | None
    itl_p99_s: float | None
    flips: int
    runs: int
    took_s: float


def cells() -> list[Cell]:
    return [Cell(profile, traffic, itl_s) for profile in PROFILES for itl_s in (0.05, 0.025) for traffic in TRAFFICS]


def ways(arms: set[str]) -> list[Way]:
    found = []
    if "law" in arms:
        found += [Way("law", 5, 3, 0, budget) for budget in LAW_BUDGETS]
    if "colocated" in arms:
        found += [Way("colocated", 0, 0, WORKERS, budget) for budget in BUDGETS]
    if "static" in arms:
        found += [Way("static", n, WORKERS - n, 0, 8192) for n in range(1, WORKERS)]
    if "routed" in arms:
        found += [Way("routed", n, WORKERS - n, 0, 8192) for n in range(1, WORKERS)]
    return found


def sample(cell: Cell, seed: int, rate: float) -> tuple[list[Offered], float]:
    kind = TRAFFICS[cell.traffic]
    return list(kind.make(seed, rate, kind.seconds)), kind.seconds


@cache
def bound_req_s(cell: Cell) -> float:
    """Of any policy at any budget, for the lengths of the first sample."""
    profile = load_profile(PROFILES[cell.profile])
    requests, _ = sample(cell, 1, GUESS[cell.profile])
    demand = demand_of(requests)
    steps = configurations(profile, StepCost(profile), demand, cell.itl_s, budget_tokens=8192)
    return capacity_req_s(demand, [(WORKERS, steps)])


def play(cell: Cell, way: Way, requests: list[Offered], seconds: float, *, may_give_up: bool = False) -> Run:
    objectives = Objectives(slo_ttft_s=TRAFFICS[cell.traffic].ttft_s, slo_itl_s=cell.itl_s)
    groups = [
        WorkerGroup(count=count, role=role, profile=PROFILES[cell.profile], budget_tokens=way.budget_tokens)
        for count, role in ((way.prefill, Role.PREFILL), (way.decode, Role.DECODE), (way.colocated, Role.COLOCATED))
        if count
    ]
    mode = BalanceMode.AUTO if way.policy == "law" else BalanceMode.OFF
    scenario = Scenario(
        name=str(cell),
        traffic=TrafficSpec(trace="the benchmark's"),
        duration_s=seconds,
        objectives=objectives,
        routing=Routing(
            policy=RoutingPolicy.LEAST_COST, max_waiting=100_000, prefill_window_tokens=4096, queue_timeout_s=600.0
        ),
        balance=Balance(mode=mode),
        workers=tuple(groups),
    )
    arm = scenario.all_arms()[0]
    allowed = (1 - ATTAINMENT_RATIO) * 0.85 * len(requests) if may_give_up else float("inf")
    build = _simple if way.policy in ("static", "colocated") else None
    return simulate(scenario, arm, build=build, requests=iter(requests), misses_allowed=allowed)


def _simple(rules: Routing) -> Controller:
    """The least loaded worker is chosen: by tokens to read, or by sequences."""
    simple = msgspec.structs.replace(rules, policy=RoutingPolicy.LEAST_LOADED)
    return build_controller(simple, law=Law(balance=Balance(mode=BalanceMode.OFF), learns=False))


def figure(cell: Cell, way: Way, seeds: int) -> Figure:
    began = perf_counter()
    ceiling = bound_req_s(cell)
    requests, seconds = sample(cell, 1, ceiling)
    played = len(requests) / seconds if cell.traffic != "burst" else ceiling

    def at(scale: float) -> Run:
        return play(cell, way, list(scaled(requests, rate=scale)), seconds / scale, may_give_up=True)

    found = highest_scale(at, 0.8, 1.0, resolution=0.01)
    rate = found.scale * played
    if found.run is None:
        return Figure(0.0, (), None, None, 0, found.runs, perf_counter() - began)
    confirmed = []
    for seed in range(2, seeds + 1):
        others, _ = sample(cell, seed, ceiling)
        run = play(cell, way, list(scaled(others, rate=found.scale)), seconds / found.scale)
        confirmed.append(round(run.attainment_ratio, 3))
    seen = findings_of(found.run).report
    return Figure(
        round(rate, 2),
        tuple(confirmed),
        seen.ttft_s.mean if seen.ttft_s else None,
        seen.itl_s.p99 if seen.itl_s else None,
        len(found.run.role_changes),
        found.runs,
        round(perf_counter() - began, 1),
    )


def digest() -> str:
    """Of all the code that decides or simulates."""
    root = Path(twinpool.__file__).parent
    found = hashlib.sha256(Path(__file__).read_bytes())
    for room in ("core", "policy", "sim", "workload"):
        for path in sorted((root / room).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()[:12]


class Kept:
    """What was found before, by cell, arm, seeds and code."""

    def __init__(self, path: Path, code: str) -> None:
        self._path = path
        self._code = code
        self._found: dict[str, Figure] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                row = json.loads(line)
                if row["code"] == code:
                    self._found[row["key"]] = Figure(**{**row["figure"], "confirmed": tuple(row["figure"]["confirmed"])})

    def get(self, key: str) -> Figure | None:
        return self._found.get(key)

    def add(self, key: str, found: Figure) -> None:
        self._found[key] = found
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps({"code": self._code, "key": key, "figure": found._asdict()}) + "\n")


def _key(cell: Cell, way: Way, seeds: int) -> str:
    return f"{cell} | {way} | {seeds}"


def table(kept: Kept, chosen: list[Cell], arms: list[str], seeds: int) -> Iterator[str]:
    """Markdown: a row a cell; for each arm its best way, and what it is of the bound."""
    yield "| cell | bound | " + " | ".join(arms) + " |"
    yield "|---|---|" + "---|" * len(arms)
    for cell in chosen:
        ceiling = bound_req_s(cell)
        texts = []
        for arm in arms:
            figures = {way: kept.get(_key(cell, way, seeds)) for way in ways({arm})}
            done = {way: found for way, found in figures.items() if found is not None}
            if not done:
                texts.append("–")
                continue
            way, best = max(done.items(), key=lambda pair: pair[1].rate_req_s)
            split = way.budget_tokens if way.colocated or arm == "law" else f"{way.prefill}:{way.decode}"
            least = f", ≥ {min(best.confirmed):.0%} on others" if best.confirmed else ""
            texts.append(f"{best.rate_req_s:.1f} ({best.rate_req_s / ceiling:.0%}; {split}{least})")
        yield f"| {cell} | {ceiling:.1f} | " + " | ".join(texts) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="profile,traffic,itl_s; * for any; may be repeated")
    parser.add_argument("--arms", default="law,colocated,static")
    parser.add_argument("--budgets", type=lambda text: [int(each) for each in text.split(",")], help="only these")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=_CACHED)
    options = parser.parse_args()
    arms = options.arms.split(",")
    chosen = [cell for cell in cells() if not options.only or any(_matches(cell, each) for each in options.only)]
    kept = Kept(options.cache, digest())
    todo = [
        (cell, way)
        for cell in chosen
        for way in ways(set(arms))
        if _is_asked(way, options.budgets) and kept.get(_key(cell, way, options.seeds)) is None
    ]
    with ProcessPoolExecutor(options.jobs) as pool:
        asked = {pool.submit(figure, cell, way, options.seeds): (cell, way) for cell, way in todo}
        for n, done in enumerate(as_completed(asked), 1):
            cell, way = asked[done]
            found = done.result()
            kept.add(_key(cell, way, options.seeds), found)
            print(f"{n}/{len(todo)} {cell}: {way}: {found.rate_req_s:.1f} req/s, {found.took_s:.0f} s", file=sys.stderr)
    print("\n".join(table(kept, chosen, arms, options.seeds)))


def _is_asked(way: Way, budgets: list[int] | None) -> bool:
    return not budgets or way.budget_tokens in budgets


def _matches(cell: Cell, asked: str) -> bool:
    wanted: list[Any] = asked.split(",")
    return all(want in ("*", "") or want == str(have) for want, have in zip(wanted, cell, strict=False))


if __name__ == "__main__":
    main()
