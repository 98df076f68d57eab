"""What went wrong in other people's balancers, on a virtual clock: the law must not."""

import msgspec
import pytest
from tests.law.fleet import arm, flips, play, reasons, split_after

from twinpool.config import Balance, BalanceMode, Routing, RoutingPolicy
from twinpool.core import commands as do
from twinpool.core import events as on
from twinpool.core.model import Role
from twinpool.sim.run import simulate
from twinpool.sim.scenario import Fault, FaultKind, Scenario, TrafficSpec
from twinpool.workload.lengths import Exactly, Uniform
from twinpool.workload.mixes import Mix, Part, Swing, short_and_long
from twinpool.workload.offered import Offered

PROMPTS = Mix(parts=(Part(share=1.0, prompt=Uniform(6000, 8000), output=Exactly(16)),))
ANSWERS = Mix(parts=(Part(share=1.0, prompt=Uniform(2000, 3000), output=Exactly(800)),))
CHAT = Mix(parts=(Part(share=1.0, prompt=Exactly(200), output=Exactly(800)),))


def test_steady_load_flips_nobody_once_it_has_settled() -> None:
    run = play(arm(2, 1), "mixed-60-40", 25.0, seconds=400.0)
    assert all(at < 120.0 for at, _ in flips(run))
    assert run.attainment_ratio > 0.95


@pytest.mark.parametrize("prefill", [1, 2, 5])
def test_a_wrong_first_split_is_left_within_half_a_minute(prefill: int) -> None:
    run = play(arm(prefill, 6 - prefill), "mixed-60-40", 66.0, seconds=45.0)
    under_load = [(at, role) for at, role in flips(run) if at < 45.0]
    assert prefill + sum(1 if role is Role.PREFILL else -1 for _, role in under_load) in (4, 5)
    assert all(at < 30.0 for at, _ in under_load)


def test_prompts_without_answers_make_the_prefill_pool_grow_and_answers_without_prompts_the_other() -> None:
    """BS-09: a saturated pool is seen on its own."""
    assert split_after(play(arm(2, 2), PROMPTS, 12.0), 2) == 3
    assert split_after(play(arm(2, 2), ANSWERS, 26.0), 2) == 1


def test_survivors_are_asked_before_a_worker_is_taken_from_them() -> None:
    """BS-01: two pools at seven tenths of what they can do stay as they are."""
    run = play(arm(3, 1), "mixed-60-40", 34.0, seconds=120.0)
    assert flips(run) == []


def test_light_load_flips_nobody() -> None:
    run = play(arm(1, 3), "mixed-60-40", 6.0, seconds=60.0)
    assert flips(run) == []
    assert run.attainment_ratio == 1.0


def test_an_objective_that_no_step_keeps_pins_no_workers() -> None:
    """BS-05: 5 ms are less than one step; it is said, and the split serves what is asked for all the same."""
    run = play(arm(2, 4), "mixed-60-40", 60.0, itl_s=0.005)
    assert "hopeless" in reasons(run)
    assert split_after(run, 2) >= 4


def test_everybody_does_everything_where_two_pools_carry_less() -> None:
    """Short prompts are read beside long answers in one step: to keep a worker for them would waste it."""
    run = play(arm(2, 2), CHAT, 60.0, seconds=60.0)
    assert "one_pool" in reasons(run)
    assert flips(run) == []
    assert run.decisions["colocated", "one_pool_better"] > 1000
    assert run.attainment_ratio > 0.99


def test_a_slow_newcomer_moves_nobody() -> None:
    """BS-02: one of six takes four times as long for a while."""
    slow = Fault(at_s=15.0, worker="w005", kind=FaultKind.SLOW, factor=4.0, lasts_s=20.0)
    run = play(arm(4, 2), "mixed-60-40", 50.0, seconds=60.0, faults=(slow,))
    assert len(flips(run)) <= 2
    assert run.recording.outcomes["ok"] == sum(run.recording.outcomes.values())


def test_a_worker_that_is_lost_in_the_middle_of_its_flip_comes_back_in_its_new_role() -> None:
    """BS-03, BS-12: a change is one assignment, so nothing is left half done."""
    quiet = play(arm(2, 4), "mixed-60-40", 60.0)
    at, worker, role, _ = quiet.role_changes[0]
    crash = Fault(at_s=at + 0.05, worker=worker, kind=FaultKind.CRASH, lasts_s=5.0)
    run = play(arm(2, 4), "mixed-60-40", 60.0, faults=(crash,))
    assert run.role_changes[0][1:3] == (worker, role)
    assert sum(run.recording.outcomes.values()) == run.demand.requests
    assert run.recording.outcomes["ok"] > 0.99 * run.demand.requests
    assert split_after(run, 2) in (4, 5)


def test_a_pool_that_lost_its_last_worker_is_filled_at_once() -> None:
    crash = Fault(at_s=10.0, worker="w003", kind=FaultKind.CRASH, lasts_s=20.0)
    run = play(arm(3, 1), "mixed-60-40", 25.0, faults=(crash,))
    filled = [at for at, _, role, why in run.role_changes if why == "pool_empty" and role is Role.DECODE]
    assert filled
    assert filled[0] < 13.0
    assert run.recording.outcomes["ok"] > 0.97 * run.demand.requests


def test_a_manual_role_is_respected() -> None:
    """BS-08: the person's worker stays, and the law does with the others what it can."""
    asked = Fault(at_s=1.0, worker="w000", kind=FaultKind.ROLE, role=Role.DECODE)
    run = play(arm(3, 3), "mixed-60-40", 66.0, faults=(asked,))
    assert [(worker, role) for _, worker, role, _ in run.role_changes if worker == "w000"] == [("w000", Role.DECODE)]
    assert len(flips(run)) >= 1


def test_advice_is_given_and_not_taken() -> None:
    run = play(arm(2, 4), "mixed-60-40", 66.0, mode=BalanceMode.ADVISE)
    assert run.role_changes == []
    assert "prefill_short" in reasons(run)


def test_advice_to_have_one_pool_is_not_taken_either() -> None:
    run = play(arm(2, 2), CHAT, 60.0, seconds=30.0, mode=BalanceMode.ADVISE)
    assert "one_pool" in reasons(run)
    assert run.decisions["colocated", "one_pool_better"] == 0


def test_one_pool_is_no_choice_where_routing_would_not_obey() -> None:
    run = play(arm(2, 2), CHAT, 60.0, seconds=30.0, policy=RoutingPolicy.LEAST_LOADED)
    assert "one_pool" not in reasons(run)
    assert not any(found.is_one_pool for _, found in run.balanced)


def test_off_is_off() -> None:
    run = play(arm(2, 4), "mixed-60-40", 66.0, mode=BalanceMode.OFF)
    assert run.role_changes == []
    assert run.balanced == []


def test_a_reversal_costs_few_flips() -> None:
    turns = Swing(one=short_and_long(0.6, output=Exactly(60)), other=short_and_long(0.1, output=Exactly(500)), every_s=60.0)
    run = play(arm(5, 3), turns, 75.0, seconds=180.0)
    changes = [at for at, _ in flips(run)]
    assert all(len([at for at in changes if begins <= at < begins + 60.0]) <= 3 for begins in (0.0, 60.0, 120.0))
    assert run.attainment_ratio > 0.9


def test_what_is_not_known_is_learnt_and_then_acted_upon() -> None:
    """No profile: least loaded first, until legs have shown what work costs."""
    run = play(arm(2, 6), "mixed-60-40", 70.0, seconds=60.0, knows_costs=False)
    assert split_after(run, 2) >= 4
    assert run.decisions["colocated", "decode_sooner"] > 0


@pytest.mark.parametrize("rate", [40.0, 66.0])
def test_a_tenth_more_is_worth_one_worker_at_most(rate: float) -> None:
    """BS-02: what is learnt is monotone in what is asked for."""
    some, more = (split_after(play(arm(2, 4), "mixed-60-40", asked), 2) for asked in (rate, 1.1 * rate))
    assert 0 <= more - some <= 1


def test_a_change_that_nobody_may_make_is_said_and_not_waited_for() -> None:
    """BS-04: prefill is short, and those that decode have no other role; once answers are, another may still go there."""
    fleet = arm(1, 3)
    prefill, decode = fleet.workers
    fixed = msgspec.structs.replace(decode, allowed_roles=(Role.DECODE,))
    run = play(msgspec.structs.replace(fleet, workers=(prefill, fixed)), PROMPTS, 9.0)
    assert "fixed" in reasons(run)
    assert flips(run) == []
    assert run.recording.outcomes["ok"] == run.demand.requests
    both = msgspec.structs.replace(fleet, workers=(msgspec.structs.replace(prefill, count=3), fixed))
    assert split_after(play(both, ANSWERS, 50.0), 3) < 3


def test_a_worker_that_is_silent_for_a_while_moves_nobody_for_long() -> None:
    """What runs there goes on. The others serve what is asked for, and the split is what it was when it is back."""
    silent = Fault(at_s=15.0, worker="w000", kind=FaultKind.LOST, lasts_s=10.0)
    run = play(arm(4, 2), "mixed-60-40", 50.0, seconds=60.0, faults=(silent,))
    assert len(flips(run)) <= 2
    assert run.recording.outcomes["ok"] == run.demand.requests


def test_prefill_does_not_outrun_decode() -> None:
    """BS-13: room for four answers, a hundred requests: never more prompts are read, or held, than there is room for."""
    fleet = arm(1, 1, sequences=4)
    scenario = Scenario(
        name="outrun",
        traffic=TrafficSpec(trace="given"),
        duration_s=10.0,
        routing=Routing(policy=RoutingPolicy.LEAST_COST, prefill_window_tokens=100_000, queue_timeout_s=600.0),
        balance=Balance(mode=BalanceMode.OFF),
        workers=fleet.workers,
    )
    under_way: set[str] = set()
    most = 0

    def look(event: on.Event, commands: list[do.Command]) -> None:
        nonlocal most
        under_way.update(command.request for command in commands if isinstance(command, do.SendPrefill))
        if isinstance(event, on.RequestFinished):
            under_way.discard(event.request)
        most = max(most, len(under_way))

    requests = iter([Offered(0.01 * n, 3000, 400, is_long=True) for n in range(100)])
    run = simulate(scenario, scenario.all_arms()[0], requests=requests, on_step=look)
    assert most == 4
    assert run.recording.outcomes["ok"] == 100
    assert run.lost_leases == 0
