"""What the controller costs: CPU microseconds a request, for all its events.

The events are those of a simulated service near its limit, where requests wait for their turn: three workers in four prefill
(or all are colocated). They are recorded once, and fed to fresh controllers; the beginning, while the service fills, is not
timed. The design's budget is 40 µs at 8 workers and 150 µs at 64, under either
policy. Then what a snapshot costs the event loop, with the last recorded controller's requests.

    python benchmarks/controller.py [--workers 8,64] [--seconds 60] [--rounds 5] [--load 0.85] [--profile]
"""

import argparse
import cProfile
import pstats
import statistics
from time import perf_counter, process_time
from typing import NamedTuple

from twinpool import __version__
from twinpool.assemble import build_controller
from twinpool.config import Balance, BalanceMode, Routing, RoutingPolicy
from twinpool.core.controller import Controller
from twinpool.core.events import Event, RequestArrived
from twinpool.core.journal import Header, encode_header
from twinpool.core.law import Law
from twinpool.core.model import Role
from twinpool.sim.bound import demand_of, fleet_bound_req_s
from twinpool.sim.run import kind_of, law_of, simulate, traffic
from twinpool.sim.scenario import Scenario, TrafficSpec, WorkerGroup
from twinpool.workload.arrivals import Poisson

BUDGET_US = {8: 40.0, 64: 150.0}
PROFILE = "llama-3.1-70b-h100-tp8"
PATHS = ("least_cost", "least_loaded", "colocated")
"""The law, which weighs every way by its costs and moves workers; the simple rule on two pools; and on one."""


class Recorded(NamedTuple):
    """A service's events. Those before `warm` are of the time in which it filled; `waiting` requests stood in the queue in the
    mean."""

    rules: Routing
    law: Law
    events: list[Event]
    warm: int
    waiting: float


def scenario(path: str, size: int, seconds: float, load: float) -> Scenario:
    decode = max(1, size // 4)
    pools = {Role.COLOCATED: size} if path == "colocated" else {Role.PREFILL: size - decode, Role.DECODE: decode}
    budget = 1024 if path == "colocated" else 4096
    workers = tuple(WorkerGroup(count=count, role=role, profile=PROFILE, budget_tokens=budget) for role, count in pools.items())
    spec = TrafficSpec(mix="mixed-60-40", arrivals=Poisson(rate=100))
    sample = demand_of(traffic(spec, seed=1, duration_s=50, long_prompt_tokens=1500))
    rate = load * fleet_bound_req_s(sample, [kind_of(group) for group in workers], 0.05)
    is_law = path == "least_cost"
    return Scenario(
        name=path,
        traffic=TrafficSpec(mix="mixed-60-40", arrivals=Poisson(rate=rate)),
        duration_s=seconds,
        routing=Routing(
            policy=RoutingPolicy.LEAST_COST if is_law else RoutingPolicy.LEAST_LOADED,
            prefill_window_tokens=4096,
            max_waiting=100_000,
        ),
        balance=Balance(mode=BalanceMode.AUTO if is_law else BalanceMode.OFF),
        workers=workers,
    )


def record(path: str, size: int, seconds: float, load: float) -> Recorded:
    played = scenario(path, size, seconds, load)
    (arm,) = played.all_arms()
    events: list[Event] = []
    warm = 0
    waiting: list[int] = []
    law = law_of(played, [kind_of(group) for group in arm.workers])
    controller = build_controller(played.routing, law=law)

    def note(event: Event, commands: object) -> None:
        nonlocal warm
        if event.at > seconds:
            return
        events.append(event)
        if event.at < seconds / 3:
            warm = len(events)
        else:
            waiting.append(controller.waiting_requests())

    simulate(played, arm, build=lambda rules: controller, on_step=note)
    return Recorded(played.routing, law, events, warm, statistics.fmean(waiting))


def fed(recorded: Recorded) -> Controller:
    """A controller that has seen the service fill."""
    controller = build_controller(recorded.rules, law=recorded.law)
    for event in recorded.events[: recorded.warm]:
        controller.handle(event)
    return controller


def round_us(recorded: Recorded, profiler: cProfile.Profile | None) -> float:
    """CPU microseconds a request that arrives."""
    controller = fed(recorded)
    timed = recorded.events[recorded.warm :]
    if profiler is not None:
        profiler.enable()
    begun = process_time()
    for event in timed:
        controller.handle(event)
    spent_s = process_time() - begun
    if profiler is not None:
        profiler.disable()
    return spent_s / sum(type(event) is RequestArrived for event in timed) * 1e6


def snapshot_ms(recorded: Recorded, rounds: int) -> tuple[list[float], int, int]:
    """Milliseconds to encode the header of a journal's next file, its bytes, and the requests that live."""
    controller = fed(recorded)
    spent = []
    for _ in range(rounds):
        begun = perf_counter()
        header = encode_header(Header(version=__version__, rules=recorded.rules, snapshot=controller.remember()))
        spent.append((perf_counter() - begun) * 1e3)
    return spent, len(header), controller.live_requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="8,64")
    parser.add_argument("--paths", default=",".join(PATHS))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--load", type=float, default=0.85, help="of the bound")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    print(f"{'workers':>7}  {'policy':13}  {'median µs':>9}  {'best':>6}  {'worst':>6}  {'budget':>6}  {'events':>7}  waiting")
    for size in (int(text) for text in options.workers.split(",")):
        for path in options.paths.split(","):
            recorded = record(path, size, options.seconds, options.load)
            profiler = cProfile.Profile(process_time) if options.profile else None
            rounds = [round_us(recorded, profiler) for _ in range(options.rounds)]
            budget = BUDGET_US.get(size)
            print(
                f"{size:>7}  {path:13}  {statistics.median(rounds):>9.1f}  {min(rounds):>6.1f}  {max(rounds):>6.1f}  "
                f"{'' if budget is None else f'{budget:.0f}':>6}  {len(recorded.events):>7,}  {recorded.waiting:.1f}"
            )
            if profiler is not None:
                pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    spent, size, live = snapshot_ms(recorded, 4 * options.rounds)
    print(
        f"snapshot of {live:,} live requests: median {statistics.median(spent):.2f} ms, best {min(spent):.2f}, {size:,} bytes"
    )


if __name__ == "__main__":
    main()
