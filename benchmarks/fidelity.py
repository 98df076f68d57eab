"""How true the simulator is: the same traffic served by the embedded engine and simulated from its measured profile.

Profiles a worker whose neighbour reads prompts, as it does in both fleets (or takes --profile FILE), serves MIX for --duration
seconds from two colocated workers and from one prefill and one decode worker, plays both in virtual time, and prints each
figure beside the other. Wants a quiet machine. With --live FILE, the --json of an earlier run, that run's live figures stand.

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


class Row(NamedTuple):
    fleet: str
    figure: str
    live: float | None
    simulated: float | None


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


def live(fleet: str, options: argparse.Namespace) -> dict[str, float | None]:
    """By figure's name."""
    if options.live is not None:
        rows = [Row(**row) for row in json.loads(options.live.read_text())]
        return {row.figure: row.live for row in rows if row.fleet == fleet}
    with serving(*FLEETS[fleet]) as told, tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "live.json"
        load = ["--mix", options.mix, "--rate", str(options.rate), "--duration", str(options.duration), "--seed", "1"]
        more = ["--scale-lengths", str(options.scale_lengths), "--slo-itl", str(options.slo_itl), "--json", str(out)]
        subprocess.run([*TWINPOOL, "bench", told["gateway"]["url"], *load, *more], check=True, stdout=subprocess.DEVNULL)
        answer = json.loads(out.read_text())
        return {name: at(answer, key) for name, key in FIGURES}


def simulated(fleet: str, profile: Path, options: argparse.Namespace) -> dict[str, float | None]:
    def group(count: int, role: Role) -> WorkerGroup:
        return WorkerGroup(count=count, role=role, profile=str(profile), budget_tokens=options.budget)

    roles = (group(2, Role.COLOCATED),) if fleet == "colocated" else (group(1, Role.PREFILL), group(1, Role.DECODE))
    arm = Arm(name=fleet, workers=roles)
    scenario = Scenario(
        name="fidelity",
        traffic=TrafficSpec(mix=options.mix, arrivals=Poisson(rate=options.rate), length_divisor=options.scale_lengths),
        duration_s=options.duration,
        objectives=Objectives(slo_itl_s=options.slo_itl),
        arms=(arm,),
    )
    answer = findings_of(simulate(scenario, arm)).as_json()
    return {name: at(answer, key) for name, key in FIGURES}


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
        rows = []
        for fleet in FLEETS:
            served, played = live(fleet, options), simulated(fleet, profile, options)
            rows += [Row(fleet, name, served[name], played[name]) for name, _ in FIGURES]
    print(f"{'':<12} {'':<24} {'live':>9} {'simulated':>9}   off")
    for row in rows:
        if row.live is None or row.simulated is None:
            print(f"{row.fleet:<12} {row.figure:<24} {'-':>9} {'-':>9}")
            continue
        off = row.simulated / row.live - 1 if row.live else 0.0
        mark = "" if abs(off) <= WITHIN else "  over 10 %"
        print(f"{row.fleet:<12} {row.figure:<24} {row.live:>9.3f} {row.simulated:>9.3f} {off:>+6.0%}{mark}")
    if options.json:
        options.json.write_text(json.dumps([row._asdict() for row in rows]))


if __name__ == "__main__":
    main()
