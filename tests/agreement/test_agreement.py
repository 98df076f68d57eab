"""The live driver and the simulator, before the same requests: what clients see has the same distribution.

The traffic is the same, so are the engines' costs, and what happens at one moment has an order in both: requests are served
alike to the microsecond. A distance comes of values that are rounded to either side of a border. Engines that are 1 % slower
move the distributions by 0.016 (TTFT under the law) to 0.55 (gaps of two pools): 0.01 lies between.
"""

import subprocess
import sys
from bisect import bisect_right
from pathlib import Path

import msgspec
import pytest
from tests.agreement.scenes import SCENES, slower, with_seed
from tests.agreement.seen import Seen

from twinpool.assemble import build_controller, replay
from twinpool.config import Routing
from twinpool.core import commands as do
from twinpool.core import events as on
from twinpool.core.controller import Controller
from twinpool.core.journal import Cut, decode_header, decode_steps
from twinpool.core.model import Role
from twinpool.sim.client import Ended
from twinpool.sim.run import law_of, simulate
from twinpool.sim.scenario import Scenario

APART = 0.01
SAME_MOMENT_S = 1e-6  # the simulator counts up to 64 steps in a row as equally long
SEEDS = (1, 2, 3)
MEASURES = ("ttft_s", "e2e_s", "gap_mean_s", "gap_worst_s")
SERVED_ALIKE = 0.99
ROOT = Path(__file__).parents[2]


def live(scenario: Scenario, journal: Path) -> list[Seen]:
    """In a process of its own, whose only clock is the virtual one."""
    command = [sys.executable, "-m", "tests.agreement.live", str(journal)]
    done = subprocess.run(command, input=msgspec.json.encode(scenario), capture_output=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    return msgspec.json.decode(done.stdout, type=list[Seen])


class _Clients:
    """Takes a simulation's ends, in the seat of a planner that never asks for anything."""

    every_s = 1e9

    def __init__(self) -> None:
        self.seen: list[Seen] = []

    def ended(self, end: Ended) -> None:
        gaps, ttft_s = end.gaps, end.timeline.ttft_s
        assert gaps is not None
        assert ttft_s is not None
        self.seen.append(
            Seen(
                at_s=end.offered.at_s,
                ttft_s=ttft_s,
                e2e_s=end.timeline.e2e_s,
                gap_mean_s=gaps.total_s / gaps.gaps,
                gap_worst_s=gaps.worst_s,
            )
        )

    def look(self, at: float, workers: object, waiting: int) -> None:
        return None


class _ToldNoRoom:
    """The project's controller, told no more of its workers than the embedded one tells: not how much KV they have room for."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.next_wakeup = controller.next_wakeup

    def handle(self, event: on.Event) -> list[do.Command]:
        if isinstance(event, on.WorkerJoined):
            facts = msgspec.structs.replace(event.facts, kv_capacity_tokens=None)
            event = msgspec.structs.replace(event, facts=facts)
        return self._controller.handle(event)


def simulated(scenario: Scenario) -> tuple[list[Seen], list[tuple[str, Role]]]:
    """And who was given which role."""
    clients = _Clients()
    (arm,) = scenario.all_arms()

    def build(rules: Routing) -> Controller:
        return _ToldNoRoom(build_controller(rules, law=law_of(scenario, [])))  # type: ignore[return-value]

    run = simulate(scenario, arm, build=build, planner=clients)
    return sorted(clients.seen, key=lambda seen: seen.at_s), [(worker, role) for _, worker, role, _ in run.role_changes]


def apart(one: list[Seen], other: list[Seen], measure: str) -> float:
    """The largest distance of the two empirical distributions (Kolmogorov-Smirnov's), of values to 10 µs."""
    ours, theirs = (sorted(round(getattr(seen, measure), 5) for seen in side) for side in (one, other))
    return max(abs(bisect_right(ours, x) / len(ours) - bisect_right(theirs, x) / len(theirs)) for x in (*ours, *theirs))


def is_same(one: Seen, other: Seen) -> bool:
    return all(abs(getattr(one, measure) - getattr(other, measure)) < SAME_MOMENT_S for measure in ("at_s", *MEASURES))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SCENES)
def test_the_live_driver_and_the_simulator_agree(name: str, tmp_path: Path) -> None:
    in_life: list[Seen] = []
    in_theory: list[Seen] = []
    for seed in SEEDS:
        scenario = with_seed(SCENES[name], seed)
        journal = tmp_path / f"{seed}.jsonl"
        in_life += live(scenario, journal)
        seen, roles = simulated(scenario)
        in_theory += seen
        assert roles_of(journal) == roles
        with journal.open("rb") as lines:
            replayed = replay(lines)
        assert replayed.difference is None
        assert not replayed.is_cut
    assert len(in_life) == len(in_theory) > 1000
    distances = {measure: apart(in_life, in_theory, measure) for measure in MEASURES}
    assert max(distances.values()) <= APART, distances
    same = sum(map(is_same, in_life, in_theory))
    assert same >= SERVED_ALIKE * len(in_life), f"{same} of {len(in_life)} were served alike"


def roles_of(journal: Path) -> list[tuple[str, Role]]:
    with journal.open("rb") as lines:
        decode_header(next(lines))
        steps = [step for _, step in decode_steps(lines) if not isinstance(step, Cut)]
    commands = [command for step in steps for command in step.commands]
    return [(command.worker, command.role) for command in commands if isinstance(command, do.RecordRole)]


def test_balance_has_something_to_do() -> None:
    _, roles = simulated(with_seed(SCENES["balance"], 1))
    assert [role for _, role in roles] == [Role.PREFILL, Role.PREFILL]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["two pools", "the law"])
def test_engines_that_are_two_percent_slower_are_noticed(name: str, tmp_path: Path) -> None:
    in_life: list[Seen] = []
    in_theory: list[Seen] = []
    for seed in SEEDS:
        scenario = with_seed(SCENES[name], seed)
        in_life += live(slower(scenario, 1.02), tmp_path / f"{seed}.jsonl")
        in_theory += simulated(scenario)[0]
    distances = {measure: apart(in_life, in_theory, measure) for measure in MEASURES}
    assert min(distances.values()) > 2 * APART, distances
