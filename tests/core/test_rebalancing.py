"""The balance tick, and what comes of it: soft, by one worker at a time, said with its reason, and never against a person."""

from collections.abc import Callable

import msgspec
from tests.core.stage import Stage, prompt, worker

from twinpool.config import Balance, BalanceMode, Routing
from twinpool.core import commands as do
from twinpool.core import events as on
from twinpool.core.controller import Controller
from twinpool.core.decisions import Balanced, WhyBalance
from twinpool.core.law import Law
from twinpool.core.model import Role
from twinpool.core.policies import Policies, PoolView
from twinpool.policy.admission import bounded_queue
from twinpool.policy.estimates import PromptLengths
from twinpool.policy.learning import Learning
from twinpool.policy.least_loaded import disaggregate_when_possible, least_loaded_decode


class Known(Learning):
    """Costs are known from the start."""

    def is_known(self, kind: str) -> bool:
        return True


def stage_with(balance: Callable[[PoolView, float], Balanced], *names: str, mode: BalanceMode = BalanceMode.AUTO) -> Stage:
    law = Law(balance=Balance(mode=mode))
    rules = Routing()
    policies = Policies(
        admit=bounded_queue(rules),
        late=lambda facts, tokens, waited_s, decision: None,
        route=disaggregate_when_possible(rules),
        pick_decode=least_loaded_decode,
        prompt_lengths=PromptLengths(),
        learner=Known(law),
        balance=balance,
    )
    stage = Stage()
    stage.controller = Controller(policies, rules, law=law)
    for name in names:
        stage.joins(worker(name))
    return stage


def says(why: WhyBalance, name: str | None = None, role: Role | None = None) -> Callable[[PoolView, float], Balanced]:
    return lambda view, changed_at: Balanced(why, worker=name, role=role)


def once(name: str, role: Role, why: WhyBalance = WhyBalance.PREFILL_SHORT) -> Callable[[PoolView, float], Balanced]:
    def balance(view: PoolView, changed_at: float) -> Balanced:
        is_done = next(each for each in view.workers if each.facts.worker == name).role is role
        return Balanced(WhyBalance.GOOD) if is_done else Balanced(why, worker=name, role=role)

    return balance


def test_nothing_ticks_before_something_is_asked_for() -> None:
    stage = stage_with(once("d2", Role.PREFILL), "p1", "d1", "d2")
    assert stage.controller.next_wakeup() is None
    stage.arrives("r")
    assert stage.controller.next_wakeup() == 1.0


def test_a_flip_is_recorded_with_its_reason_and_takes_work_at_once() -> None:
    stage = stage_with(once("d2", Role.PREFILL), "p1", "d1", "d2")
    stage.arrives("r", prompt(2000))
    acts = stage.waits(1.0)
    assert do.RecordRole(worker="d2", role=Role.PREFILL, reason=WhyBalance.PREFILL_SHORT) in acts
    assert stage.arrives("s", prompt(2000)) == [do.SendPrefill(request="s", attempt=1, worker="d2")]


def test_a_flip_moves_nothing_that_runs() -> None:
    stage = stage_with(once("d1", Role.PREFILL), "p1", "d1", "d2")
    stage.arrives("r")
    stage.prefilled("r")
    stage.first_token("r")
    assert stage.worker("d1").sequences == 1
    acts = stage.waits(1.0)
    assert [type(act) for act in acts] == [do.RecordBalance, do.RecordRole]
    assert stage.worker("d1").sequences == 1
    stage.finishes("r")
    assert stage.is_empty()


def test_a_prompt_that_waits_goes_to_the_one_that_changed() -> None:
    stage = stage_with(once("d2", Role.PREFILL), "p1", "d1", "d2")
    stage.arrives("r", prompt(2000))
    assert stage.arrives("s", prompt(2000)) == []
    assert do.SendPrefill(request="s", attempt=1, worker="d2") in stage.waits(1.0)


def test_a_handoff_to_one_that_changed_meanwhile_is_honoured() -> None:
    stage = stage_with(once("d1", Role.PREFILL), "p1", "d1")
    stage.arrives("r")
    stage.waits(1.0)
    assert stage.worker("d1").role is Role.PREFILL
    assert [type(act) for act in stage.prefilled("r")] == [do.SendDecode]


def test_what_was_found_is_told_when_it_is_news() -> None:
    stage = stage_with(says(WhyBalance.GOOD), "p1", "d1")
    stage.arrives("r")
    assert stage.waits(1.0) == [do.RecordBalance(balanced=Balanced(WhyBalance.GOOD))]
    assert stage.waits(10.0) == []
    assert stage.controller.balanced() == Balanced(WhyBalance.GOOD)


def test_advice_changes_nothing() -> None:
    stage = stage_with(once("d2", Role.PREFILL), "p1", "d1", "d2", mode=BalanceMode.ADVISE)
    stage.arrives("r")
    assert [type(act) for act in stage.waits(1.0)] == [do.RecordBalance]
    assert stage.worker("d2").role is Role.DECODE


def test_off_has_no_timer() -> None:
    stage = stage_with(once("d2", Role.PREFILL), "p1", "d1", "d2", mode=BalanceMode.OFF)
    stage.arrives("r")
    assert stage.controller.next_wakeup() == 60.0  # the end of the request's wait
    assert stage.controller.balanced() is None


def test_nothing_ticks_where_nobody_may_change() -> None:
    stage = stage_with(says(WhyBalance.GOOD))
    stage.joins(worker("p1", allowed_roles=(Role.PREFILL,)))
    stage.joins(worker("d1", allowed_roles=(Role.DECODE,)))
    stage.arrives("r")
    assert stage.controller.next_wakeup() == 60.0


def test_ticks_end_some_time_after_the_last_request() -> None:
    stage = stage_with(says(WhyBalance.GOOD), "p1", "d1")
    stage.arrives("r")
    stage.prefilled("r")
    stage.first_token("r")
    stage.finishes("r")
    stage.waits(300.0)
    assert stage.controller.next_wakeup() is None
    stage.arrives("s")
    assert stage.controller.next_wakeup() == 301.0


def test_a_person_holds_a_worker_until_they_let_go() -> None:
    stage = stage_with(says(WhyBalance.GOOD), "p1", "d1", "d2")
    assert stage.asks("d2", Role.PREFILL) == [do.RecordRole(worker="d2", role=Role.PREFILL, reason=WhyBalance.MANUAL)]
    assert stage.worker("d2").is_held
    assert stage.tell(on.RoleReleased(at=stage.at, worker="d2")) == [], "its role is what it was"
    assert not stage.worker("d2").is_held


def test_to_ask_for_the_role_it_has_holds_it_too() -> None:
    stage = stage_with(says(WhyBalance.GOOD), "p1", "d1")
    assert stage.asks("d1", Role.DECODE) == []
    assert stage.worker("d1").is_held


def test_one_that_is_lost_after_its_flip_returns_in_its_new_role() -> None:
    stage = stage_with(once("d2", Role.PREFILL), "p1", "d1", "d2")
    stage.arrives("r")
    stage.waits(1.0)
    stage.loses("d2")
    stage.returns("d2")
    assert stage.worker("d2").role is Role.PREFILL


def test_only_those_that_are_well_are_shown() -> None:
    seen: list[list[str]] = []

    def balance(view: PoolView, changed_at: float) -> Balanced:
        seen.append([each.facts.worker for each in view.workers])
        return Balanced(WhyBalance.GOOD)

    stage = stage_with(balance, "p1", "d1", "d2")
    stage.loses("d2")
    stage.arrives("r")
    stage.waits(1.0)
    assert seen == [["d1", "p1"]]


def test_a_report_that_is_old_is_as_old_as_it_says() -> None:
    stage = stage_with(says(WhyBalance.GOOD), "d1")
    stage.at = 10.0
    stage.tell(on.LoadReported(at=10.0, worker="d1", age_s=4.0, kv_used_ratio=0.9))
    assert (stage.worker("d1").kv_used_ratio, stage.worker("d1").kv_used_at) == (0.9, 6.0)


def test_balance_is_remembered() -> None:
    stage = stage_with(once("d2", Role.PREFILL), "p1", "d1", "d2")
    stage.arrives("r")
    stage.waits(1.0)
    known = msgspec.json.decode(stage.controller.remember())
    assert known["balance"]["changed_at"] == 1.0
    assert known["balance"]["last"]["why"] == "prefill_short"


def test_advice_is_recorded_once_however_long_it_stays_the_same() -> None:
    """Whoever of the pool is named: who has least to do changes from look to look."""
    named = iter(["d1", "d2"] * 5)
    stage = stage_with(
        lambda view, changed_at: Balanced(WhyBalance.PREFILL_SHORT, worker=next(named), role=Role.PREFILL),
        *("p1", "d1", "d2"),
        mode=BalanceMode.ADVISE,
    )
    stage.arrives("r")
    said = [act for _ in range(8) for act in stage.waits(1.0) if isinstance(act, do.RecordBalance)]
    assert [each.balanced.worker for each in said] == ["d1"]
