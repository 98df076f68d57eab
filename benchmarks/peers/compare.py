"""The peers' policies beside the project's, on one scenario: the same requests, engines, links and core.

Each starts from the split of the scenario's arm with two pools (or the one that --split names). Goodput is at the scenario's
rate; with --highest it is the highest rate at which nine in ten requests meet the objectives.

    python benchmarks/peers/compare.py article [--split 5:3] [--rate-scale 0.9] [--highest] [--json FILE]
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec
from planners import Arrow, Dopd, Dynamo
from pushing import always, in_place, longer_than, pushing, uncached_over

from twinpool.assemble import build_controller
from twinpool.config import Routing
from twinpool.core.controller import Controller
from twinpool.core.model import Role
from twinpool.sim.findings import findings_of
from twinpool.sim.goodput import ATTAINMENT_RATIO, highest_scale
from twinpool.sim.planners import Planner
from twinpool.sim.run import Run, kind_of, simulate
from twinpool.sim.scenario import Arm, Scenario
from twinpool.sim.shelf import load_scenario


class Peer(NamedTuple):
    """`planner` makes a fresh one a run."""

    build: Callable[[Routing], Controller]
    planner: Callable[[], Planner] | None = None


def peers_for(scenario: Scenario, arm: Arm) -> dict[str, Peer]:
    objectives = scenario.objectives
    kind = kind_of(arm.workers[0])
    costs = kind.cost.at_full_batches(kind.profile, objectives.slo_itl_s)
    context = 2000
    running = 1
    while running < kind.profile.max_sequences and kind.cost.decode(running, running * context) <= objectives.slo_itl_s / 2:
        running += 1

    def behind(decides: Callable[[Any], bool]) -> Callable[[Routing], Controller]:
        return partial(build_controller, change=in_place(pushing(decides)))

    return {
        "twinpool": Peer(build_controller),
        "all handed over": Peer(behind(always)),
        "threshold 4,096 (AWS)": Peer(behind(longer_than(4096))),
        "uncached over 512 (llm-d)": Peer(behind(uncached_over(512))),
        "role flips (Arrow)": Peer(behind(always), lambda: Arrow(objectives, costs, running)),
        "load planner (Dynamo)": Peer(behind(always), lambda: Dynamo(objectives)),
        "ratio (DOPD)": Peer(behind(always), lambda: Dopd(costs)),
    }


def split_of(arm: Arm, prefill: int, decode: int) -> Arm:
    group = arm.workers[0]
    workers = [
        msgspec.structs.replace(group, count=count, role=role, allowed_roles=())
        for count, role in ((prefill, Role.PREFILL), (decode, Role.DECODE))
    ]
    return msgspec.structs.replace(arm, workers=tuple(workers))


def play(scenario: Scenario, arm: Arm, peer: Peer, scale: float, *, may_give_up: bool) -> Run:
    traffic = msgspec.structs.replace(scenario.traffic, rate_scale=scenario.traffic.rate_scale * scale)
    scaled = msgspec.structs.replace(scenario, traffic=traffic)
    allowed = float("inf")
    if may_give_up and scenario.traffic.arrivals is not None:
        expected = scenario.traffic.arrivals.rate_at(0.0) * traffic.rate_scale * scenario.duration_s
        allowed = (1 - ATTAINMENT_RATIO) * expected  # more than the window's share: only hopeless runs are cut
    planner = peer.planner() if peer.planner is not None else None
    return simulate(scaled, arm, build=peer.build, planner=planner, misses_allowed=allowed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario")
    parser.add_argument("--split")
    parser.add_argument("--rate-scale", type=float, default=1.0)
    parser.add_argument("--highest", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    scenario = load_scenario(options.scenario)
    arm = next(arm for arm in scenario.all_arms() if any(group.role is Role.PREFILL for group in arm.workers))
    if options.split:
        arm = split_of(arm, *(int(part) for part in options.split.split(":")))
    rows = {}
    print(f"{'':<26} {'goodput':>8} {'bound':>7} {'attained':>8} {'TTFT':>7} {'p99':>7} {'worst gap':>9} flips")
    for name, peer in peers_for(scenario, arm).items():
        if options.highest:
            found = highest_scale(partial(play, scenario, arm, peer, may_give_up=True), 0.7, 1.3)
            run = found.run
        else:
            run = play(scenario, arm, peer, options.rate_scale, may_give_up=False)
        if run is None:
            print(f"{name:<26} carries nothing")
            continue
        seen = findings_of(run)
        ttft, worst = seen.report.ttft_s, seen.report.itl_worst_s
        rows[name] = seen.as_json()
        print(
            f"{name:<26} {seen.report.goodput_req_s:>8.1f} {seen.bound_req_s:>7.1f} {seen.attainment_ratio:>8.1%} "
            f"{ttft.mean if ttft else 0:>7.3f} {ttft.p99 if ttft else 0:>7.3f} {worst.p99 if worst else 0:>9.3f} "
            f"{len(seen.role_changes)}"
        )
    if options.json:
        with open(options.json, "w") as out:
            json.dump(rows, out)


if __name__ == "__main__":
    main()
