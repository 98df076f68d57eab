"""How true the simulator is: the same traffic served by the embedded engine and simulated from its measured profile.

Profiles a worker whose neighbour reads prompts, as it does in both fleets (or takes --profile FILE), serves MIX for --duration
seconds from two colocated workers and from one prefill and one decode worker, plays both in virtual time, and prints each
figure beside the other. Wants a quiet machine, and one whose speed does not wander: what engines had to do took them longer or
shorter in that run than when they were profiled, by so much as their counted busy time differs from the simulated one. That
is printed, and the same again played at the speed of the run: what is still off then is off by what the simulator leaves out.
With --live FILE, the --json of an earlier run, that run's live figures stand.

    python benchmarks/fidelity.py [--rate 0.5] [--duration 600] [--mix mixed-60-40] [--scale-lengths 4] [--profile FILE]
    [--live FILE] [--json FILE]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import requests
from prometheus_client.parser import text_string_to_metric_families

from twinpool.config import Objectives
from twinpool.core.model import Role
from twinpool.sim.findings import findings_of
from twinpool.sim.run import simulate
from twinpool.sim.scenario import Arm, Scenario, TrafficSpec, WorkerGroup
from twinpool.workload.arrivals import Poisson

TWINPOOL = (sys.executable, "-m", "twinpool")
FLEETS = {"colocated": ("--colocated-workers", "2"), "two pools": ("--prefill-workers", "1", "--decode-workers", "1")}
FIGURES = (
    ("mean TTFT", "ttft_s.mean"),
    ("p90 TTFT", "ttft_s.p90"),
    ("ITL p50", "itl_s.p50"),
    ("worst gap p50", "itl_worst_s.p50"),
    ("worst gap p90", "itl_worst_s.p90"),
    ("requests a second", "throughput_req_s"),
    ("output tokens a second", "throughput_output_tok_s"),
)
WITHIN = 0.10
ROUNDS = 4


@contextmanager
def serving(*options: str) -> Iterator[dict[str, Any]]:
    """What `serve --json` says once it is ready."""
    command = [*TWINPOOL, "serve", "--port", "0", "--admin-port", "0", "--json", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        if process.stdout is None:
            raise RuntimeError("serve has no output")
        for line in process.stdout:
            told: dict[str, Any] = json.loads(line)
            if told.get("event") == "ready":
                yield told
                return
        raise RuntimeError("serve did not become ready")
    finally:
        process.terminate()
        process.wait(30)


def measured_profile(out: Path) -> None:
    with serving(*FLEETS["two pools"]) as told:
        prefill, decode = (worker["url"] for worker in told["workers"][:2])
        others = ("--decode", decode, "--beside", decode)
        subprocess.run([*TWINPOOL, "profile", prefill, *others, "--out", str(out)], check=True)


class Served(NamedTuple):
    """`busy_s`: seconds that the fleet's workers had work, by role."""

    figures: dict[str, float | None]
    busy_s: dict[str, float]


def live(fleet: str, options: argparse.Namespace) -> Served:
    if options.live is not None:
        return Served(**json.loads(options.live.read_text())[fleet]["live"])
    with serving(*FLEETS[fleet]) as told, tempfile.TemporaryDirectory() as folder:
        before = busy_of(told["workers"])
        out = Path(folder) / "live.json"
        load = ["--mix", options.mix, "--rate", str(options.rate), "--duration", str(options.duration), "--seed", "1"]
        more = ["--scale-lengths", str(options.scale_lengths), "--slo-itl", str(options.slo_itl), "--json", str(out)]
        subprocess.run([*TWINPOOL, "bench", told["gateway"]["url"], *load, *more], check=True, stdout=subprocess.DEVNULL)
        answer = json.loads(out.read_text())
        busy_s = {role: seconds - before[role] for role, seconds in busy_of(told["workers"]).items()}
        return Served({name: at(answer, key) for name, key in FIGURES}, busy_s)


def busy_of(workers: list[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for worker in workers:
        page = requests.get(f"{worker['url']}/metrics", timeout=30).text
        seconds = next(
            sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == "twinpool_worker_busy_seconds_total"
        )
        found[worker["role"]] = found.get(worker["role"], 0.0) + seconds
    return found


def simulated(fleet: str, profile: Path, options: argparse.Namespace, slowness: dict[str, float]) -> Served:
    def group(count: int, role: Role) -> WorkerGroup:
        slow = slowness.get(role.value, 1.0)
        return WorkerGroup(count=count, role=role, profile=str(profile), budget_tokens=options.budget, slowness=slow)

    roles = (group(2, Role.COLOCATED),) if fleet == "colocated" else (group(1, Role.PREFILL), group(1, Role.DECODE))
    arm = Arm(name=fleet, workers=roles)
    scenario = Scenario(
        name="fidelity",
        traffic=TrafficSpec(mix=options.mix, arrivals=Poisson(rate=options.rate), length_divisor=options.scale_lengths),
        duration_s=options.duration,
        objectives=Objectives(slo_itl_s=options.slo_itl),
        arms=(arm,),
    )
    run = simulate(scenario, arm)
    answer = findings_of(run).as_json()
    busy_s: dict[str, float] = {}
    in_order = [each.role.value for each in roles for _ in range(each.count)]
    for role, totals in zip(in_order, run.totals.values(), strict=True):
        busy_s[role] = busy_s.get(role, 0.0) + totals.busy_s
    return Served({name: at(answer, key) for name, key in FIGURES}, busy_s)


def at_its_speed(fleet: str, profile: Path, options: argparse.Namespace, served: Served) -> tuple[dict[str, float], Served]:
    """How much longer engines took in that run than in the profile, by role, and the simulation of such engines. A slower
    decode worker has larger batches, so it is looked for more than once."""
    slowness: dict[str, float] = {}
    for _ in range(ROUNDS):
        played = simulated(fleet, profile, options, slowness)
        slowness = {role: slowness.get(role, 1.0) * busy_s / played.busy_s[role] for role, busy_s in served.busy_s.items()}
    return slowness, simulated(fleet, profile, options, slowness)


def at(tree: dict[str, Any], key: str) -> float | None:
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return None if value is None else float(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--duration", type=float, default=600.0)
    parser.add_argument("--mix", default="mixed-60-40")
    parser.add_argument("--scale-lengths", type=float, default=4.0)
    parser.add_argument("--slo-itl", type=float, default=0.05)
    parser.add_argument("--budget", type=int, default=256, help="tokens a step of the embedded worker")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--keep-profile", type=Path, help="where the measured one is kept")
    parser.add_argument("--live", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        profile = options.profile or options.keep_profile or Path(folder) / "embedded.json"
        if options.profile is None:
            measured_profile(profile)
        found = {}
        for fleet in FLEETS:
            served = live(fleet, options)
            played = simulated(fleet, profile, options, {})
            slowness, matched = at_its_speed(fleet, profile, options, served)
            found[fleet] = {
                "live": served._asdict(),
                "simulated": played._asdict(),
                "slowness": slowness,
                "matched": matched._asdict(),
            }
            print(f"{fleet:<34} {'live':>9} {'simulated':>16} {'at its speed':>16}")
            for name, _ in FIGURES:
                beside = "".join(compared(served.figures[name], each.figures[name]) for each in (played, matched))
                print(f"  {name:<32} {served.figures[name] or 0.0:>9.3f} {beside}")
            took = ", ".join(f"{role} {ratio:.2f}" for role, ratio in slowness.items())
            print(f"  time for the same work, of the profile's: {took}\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found))


def compared(live: float | None, simulated: float | None) -> str:
    if live is None or simulated is None:
        return f"{'-':>17}"
    off = simulated / live - 1 if live else 0.0
    return f"{simulated:>9.3f} {off:>+6.0%}{' ' if abs(off) <= WITHIN else '!'}"


if __name__ == "__main__":
    main()
