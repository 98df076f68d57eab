from collections.abc import Sequence

import msgspec
from tests.sim.plain import profile
from tests.sim.scenes import PAIR, play, scene

from twinpool.assemble import build_controller
from twinpool.core.cluster import WorkerView
from twinpool.core.decisions import Choice, Decision, Why
from twinpool.core.model import Role
from twinpool.core.policies import Pending, Policies
from twinpool.sim.client import Ended


class Once:
    """Asks once for one role, and remembers what it was shown."""

    every_s = 10.0

    def __init__(self, worker: str, role: Role) -> None:
        self._wanted: tuple[str, Role] | None = (worker, role)
        self.looks: list[float] = []
        self.ends = 0

    def ended(self, end: Ended) -> None:
        self.ends += 1

    def look(self, at: float, workers: Sequence[WorkerView], waiting: int) -> tuple[str, Role] | None:
        self.looks.append(at)
        wanted, self._wanted = self._wanted, None
        return wanted


def test_a_planner_looks_now_and_then_and_what_it_asks_for_is_done() -> None:
    planner = Once("w001", Role.DECODE)
    run = play(scene(), planner=planner)
    assert [round(at) for at in planner.looks[:3]] == [10, 20, 30]
    assert run.role_changes == [(planner.looks[0], "w001", Role.DECODE, "manual")]
    assert planner.ends == sum(run.recording.outcomes.values())


def test_a_role_that_a_worker_may_not_take_is_not_given() -> None:
    fixed = tuple(msgspec.structs.replace(group, allowed_roles=(group.role,)) for group in PAIR)
    run = play(scene(workers=fixed), planner=Once("w001", Role.DECODE))
    assert run.role_changes == []


def test_another_policy_stands_behind_the_same_core() -> None:
    def alone(pending: Pending, workers: Sequence[WorkerView]) -> Decision:
        return Decision(Choice.COLOCATED, Why.NO_PREFILL_WORKER, decode=workers[0].facts.worker)

    def change(policies: Policies) -> Policies:
        return policies._replace(route=alone)

    run = play(scene(duration_s=10), build=lambda rules: build_controller(rules, change=change), profile=profile())
    assert set(run.recording.paths) == {"colocated"}
    busy = [totals.busy_s > 0 for totals in run.totals.values()]
    assert busy == [True, False, False]
