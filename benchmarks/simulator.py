"""How fast the simulator is: CPU seconds for many requests with the full controller, and the memory at its peak.

The target is one million requests on 16 workers in under 120 s on one core. A loop of plain arithmetic is timed before and
after, so that a machine that does something else meanwhile is seen as one.

    python benchmarks/simulator.py [--requests 1000000] [--workers 16] [--load 0.9] [--path disaggregated|colocated] [--profile]
"""

import argparse
import cProfile
import pstats
import resource
from collections.abc import Iterator
from itertools import islice
from random import Random
from time import perf_counter, process_time

from twinpool.config import Routing
from twinpool.core.model import Role
from twinpool.sim.bound import demand_of, fleet_bound_req_s
from twinpool.sim.run import kind_of, simulate
from twinpool.sim.scenario import Arm, Scenario, TrafficSpec, WorkerGroup
from twinpool.workload.arrivals import Poisson
from twinpool.workload.mixes import MIXES
from twinpool.workload.offered import Offered, offered

PROFILE = "llama-3.1-70b-h100-tp8"


def groups(path: str, workers: int) -> tuple[WorkerGroup, ...]:
    if path == "colocated":
        return (WorkerGroup(count=workers, role=Role.COLOCATED, profile=PROFILE, budget_tokens=1024),)
    decode = max(1, workers // 4)
    return (
        WorkerGroup(count=workers - decode, role=Role.PREFILL, profile=PROFILE, budget_tokens=4096),
        WorkerGroup(count=decode, role=Role.DECODE, profile=PROFILE, budget_tokens=4096),
    )


def requests_at(rate: float) -> Iterator[Offered]:
    return offered(Poisson(rate=rate), MIXES["mixed-60-40"], Random(1), duration_s=1e9)


def loop_ns() -> float:
    begun = process_time()
    total = 0
    for number in range(2_000_000):
        total += number & 7
    return (process_time() - begun) / 2_000_000 * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--load", type=float, default=0.85, help="of the bound")
    parser.add_argument("--path", choices=("disaggregated", "colocated"), default="disaggregated")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    arm = Arm(name=options.path, workers=groups(options.path, options.workers))
    sample = demand_of(islice(requests_at(100.0), 5000))
    rate = options.load * fleet_bound_req_s(sample, [kind_of(group) for group in arm.workers], 0.05)
    scenario = Scenario(
        name="speed",
        traffic=TrafficSpec(mix="mixed-60-40", arrivals=Poisson(rate=rate)),
        duration_s=options.requests / rate,
        routing=Routing(max_waiting=100_000, prefill_window_tokens=4096),
        arms=(arm,),
    )
    before = loop_ns()
    profiler = cProfile.Profile(process_time) if options.profile else None
    wall, begun = perf_counter(), process_time()
    if profiler is not None:
        profiler.enable()
    run = simulate(scenario, arm, requests=islice(requests_at(rate), options.requests))
    if profiler is not None:
        profiler.disable()
    spent, wall = process_time() - begun, perf_counter() - wall
    after = loop_ns()
    steps = sum(totals.steps for totals in run.totals.values())
    print(
        f"{options.requests:,} requests at {rate:.0f} a second on {options.workers} workers, {options.path}: "
        f"{spent:.1f} s of CPU, {wall:.1f} s of wall time, {spent / options.requests * 1e6:.1f} µs a request\n"
        f"{steps:,} engine steps, attained {run.attainment_ratio:.1%}, {dict(run.recording.outcomes)}\n"
        f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB; a loop of arithmetic took "
        f"{before:.0f} ns a round before and {after:.0f} after"
    )
    if profiler is not None:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
