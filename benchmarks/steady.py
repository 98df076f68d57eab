"""A day of steady load in virtual time: how often the law moves a worker, and when.

Once a wrong first split has been left, there is nothing to move for: chance alone brings more prompts in one minute than in
the next. Every move after the first ten minutes is named; the command ends with 1 where there is one. An hour at 12 requests
a second takes some 20 s of one core.

    python benchmarks/steady.py [--hours 24] [--rate 12] [--prefill 2] [--decode 1] [--profile NAME] [--mix mixed-60-40]
"""

import argparse
import sys
from time import process_time

from twinpool.config import Balance, BalanceMode, Routing, RoutingPolicy
from twinpool.core.model import Role
from twinpool.sim.findings import findings_of
from twinpool.sim.run import Run, simulate
from twinpool.sim.scenario import Scenario, TrafficSpec, WorkerGroup
from twinpool.workload.arrivals import Poisson

SETTLED_S = 600.0


def play(profile: str, mix: str, prefill: int, decode: int, rate: float, seconds: float, seed: int) -> Run:
    groups = [
        WorkerGroup(count=count, role=role, profile=profile) for count, role in ((prefill, Role.PREFILL), (decode, Role.DECODE))
    ]
    scenario = Scenario(
        name="steady",
        traffic=TrafficSpec(mix=mix, arrivals=Poisson(rate=rate)),
        duration_s=seconds,
        seed=seed,
        routing=Routing(policy=RoutingPolicy.LEAST_COST, max_waiting=100_000, prefill_window_tokens=4096),
        balance=Balance(mode=BalanceMode.AUTO),
        workers=tuple(groups),
    )
    return simulate(scenario, scenario.all_arms()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--rate", type=float, default=12.0)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--profile", default="llama-3.1-70b-h100-tp4")
    parser.add_argument("--mix", default="mixed-60-40")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    seconds = options.hours * 3600
    began = process_time()
    run = play(options.profile, options.mix, options.prefill, options.decode, options.rate, seconds, options.seed)
    moves = [(at, worker, role, why) for at, worker, role, why in run.role_changes if at < seconds]
    late = [move for move in moves if move[0] > SETTLED_S]
    pressures = [found.pressure for _, found in run.balanced if found.pressure is not None]
    report = findings_of(run).report
    ttft = report.ttft_s.mean if report.ttft_s else float("nan")
    print(
        f"{options.hours:g} h, {run.demand.requests:,} requests at {options.rate:g} a second on {options.prefill} prefill and "
        f"{options.decode} decode workers: {len(moves)} moves, {len(late)} of them after ten minutes"
    )
    print(
        f"{run.attainment_ratio:.2%} met the objectives, mean TTFT {ttft:.3f} s; pressure "
        f"{min(pressures, default=0):.2f} to {max(pressures, default=0):.2f} when told; {process_time() - began:.0f} s of CPU"
    )
    for at, worker, role, why in moves:
        print(f"  {at:9.1f} s  {worker} to {role.value}: {why}")
    sys.exit(1 if late else 0)


if __name__ == "__main__":
    main()
