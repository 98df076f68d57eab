"""The router's queue: first come first served, bounded in length and in time, and late in its choice."""

import pytest
from tests.core.stage import Stage, prompt, worker

from twinpool.config import Routing
from twinpool.core.commands import FailRequest, RecordDecision, SendPrefill, SendWhole
from twinpool.core.decisions import Choice, Decision, Why
from twinpool.core.events import TimePassed
from twinpool.core.model import Failure, Leg
from twinpool.errors import Reason

FULL = {"status": 429, "reason": Reason.QUEUE_FULL, "retry_after_s": 1}
TOO_LONG = {"status": 503, "reason": Reason.QUEUE_TIMEOUT, "retry_after_s": 5}
NO_WORKER = {"status": 503, "reason": Reason.NO_WORKER, "retry_after_s": 5}
DRAINING = {"status": 503, "reason": Reason.DRAINING, "retry_after_s": 5}


def refused(request: str, why: dict[str, object]) -> FailRequest:
    return FailRequest(request=request, **why)


def whole(request: str, name: str = "c1", attempt: int = 1) -> SendWhole:
    return SendWhole(request=request, attempt=attempt, worker=name)


def test_first_come_first_served() -> None:
    stage = Stage(worker("c1", slots=1))
    stage.arrives("r0")
    for n in range(1, 5):
        assert stage.arrives(f"r{n}") == []
    for n in range(1, 5):
        assert stage.finishes(f"r{n - 1}") == [whole(f"r{n}")]


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    stage = Stage(worker("p1"), worker("d1"))
    stage.arrives("long", prompt(2000))
    assert stage.arrives("longer", prompt(2000)) == []
    assert stage.arrives("short", prompt(10)) == [], "it would fit beside the first, and goes after the second"
    assert stage.prefilled("long")[1:] == [SendPrefill(request=name, attempt=1, worker="p1") for name in ("longer", "short")]


def test_a_retry_goes_to_the_head() -> None:
    stage = Stage(worker("c1", slots=1))
    stage.arrives("r1")
    stage.arrives("r2")
    assert stage.fails("r1", Leg.WHOLE, Failure.ERROR) == [whole("r1", attempt=2)]


def test_the_choice_is_made_late() -> None:
    """What waits is not bound: it takes the worker that is free first, also one that came after it."""
    stage = Stage(worker("p1"), worker("p2"), worker("d1"))
    stage.arrives("r1", prompt(4000))
    stage.arrives("r2", prompt(3000))
    assert stage.arrives("r3", prompt(4000)) == []
    assert stage.arrives("r4", prompt(4000)) == []
    assert stage.prefilled("r2")[1:] == [SendPrefill(request="r3", attempt=1, worker="p2")]
    assert stage.joins(worker("p3")) == [SendPrefill(request="r4", attempt=1, worker="p3")]


def test_short_prompts_share_a_prefill_window_and_a_long_one_has_it_for_itself() -> None:
    stage = Stage(worker("p1"), worker("d1", slots=64), rules=Routing(prefill_window_tokens=1000))
    sent = [bool(stage.arrives(f"r{n}", prompt(400))) for n in range(3)]
    assert sent == [True, True, False]


def test_waiting_is_recorded_once_with_its_reason() -> None:
    stage = Stage(worker("p1"), worker("d1"))
    stage.arrives("r1", prompt(4000))
    stage.arrives("r2", prompt(4000))
    shown = RecordDecision(request="r2", attempt=0, decision=Decision(Choice.WAIT, Why.PREFILL_BUSY))
    assert stage.commands[-1] == [shown]
    stage.arrives("r3", prompt(4000))
    assert stage.commands[-1] == []


def test_the_queue_is_bounded() -> None:
    """BS-14: of a hundred arrivals on eight slots and a queue of sixteen, twenty-four are taken."""
    stage = Stage(worker("c1", slots=8), rules=Routing(max_waiting=16))
    answers = [stage.arrives(f"r{n}") for n in range(100)]
    assert answers[:8] == [[whole(f"r{n}")] for n in range(8)]
    assert answers[8:24] == [[]] * 16
    assert answers[24:] == [[refused(f"r{n}", FULL)] for n in range(24, 100)]
    assert stage.decisions[-1] == Decision(Choice.REFUSE, Why.QUEUE_FULL)
    assert stage.load("c1")[2] == 8
    assert stage.controller.live_requests == 24


def test_a_slot_is_held_until_the_stream_has_ended() -> None:
    stage = Stage(worker("c1", slots=1))
    stage.arrives("r1")
    stage.arrives("r2")
    assert stage.first_token("r1") == []
    assert stage.finishes("r1") == [whole("r2")]


def test_the_wait_is_bounded() -> None:
    stage = Stage(worker("c1", slots=1), rules=Routing(queue_timeout_s=20))
    stage.arrives("r1")
    stage.at = 5.0
    stage.arrives("r2")
    stage.at = 8.0
    stage.arrives("r3")
    assert stage.waits(16.9) == []
    assert stage.waits(0.1) == [refused("r2", TOO_LONG)]
    assert stage.decisions[-2] == Decision(Choice.REFUSE, Why.QUEUE_TIMEOUT)
    assert stage.waits(3) == [refused("r3", TOO_LONG)]
    assert stage.finishes("r1") == []
    assert stage.is_empty()


def test_a_timer_that_is_early_does_no_harm() -> None:
    stage = Stage(worker("c1", slots=1))
    stage.arrives("r1")
    stage.arrives("r2")
    due = stage.controller.next_wakeup()
    assert due == 60.0
    assert stage.tell(TimePassed(at=1.0)) == []
    assert stage.controller.next_wakeup() == due


def test_without_any_worker_the_wait_is_short() -> None:
    stage = Stage(rules=Routing(worker_wait_s=10))
    assert stage.arrives("r") == []
    assert stage.decisions == [Decision(Choice.WAIT, Why.NO_WORKER)]
    assert stage.waits(9.9) == []
    assert stage.waits(0.1) == [refused("r", NO_WORKER)]
    assert stage.controller.next_wakeup() is None


def test_workers_for_another_model_are_no_workers() -> None:
    stage = Stage(worker("c1", models=("other",)))
    stage.arrives("r")
    assert stage.waits(10) == [refused("r", NO_WORKER)]


def test_a_worker_that_comes_in_time_serves_who_waited_for_it() -> None:
    stage = Stage()
    stage.arrives("r")
    stage.at = 9.0
    assert stage.joins(worker("c1")) == [whole("r")]


def test_once_a_worker_is_back_the_queue_is_as_patient_as_ever() -> None:
    stage = Stage(rules=Routing(worker_wait_s=10, queue_timeout_s=60))
    stage.arrives("r1")
    stage.arrives("r2")
    stage.at = 9.0
    assert stage.joins(worker("c1", slots=1)) == [whole("r1")]
    assert stage.waits(50) == [], "the wait that began at 9 s may last 60"
    assert stage.finishes("r1") == [whole("r2")]


def test_a_retry_that_finds_nobody_has_a_timer_of_its_own() -> None:
    stage = Stage(worker("c1"), rules=Routing(worker_wait_s=10))
    stage.arrives("r")
    stage.waits(100)
    assert stage.controller.next_wakeup() == 600.0, "the request's own end"
    stage.fails("r", Leg.WHOLE, Failure.BROKEN)
    assert stage.controller.next_wakeup() == 110.0
    assert stage.waits(10) == [refused("r", NO_WORKER)]


def test_no_wait_goes_beyond_the_time_of_the_request() -> None:
    stage = Stage(worker("c1", slots=1), rules=Routing(queue_timeout_s=60, request_timeout_s=70))
    stage.arrives("r1")
    stage.at = 50.0
    stage.arrives("r2")
    stage.at = 69.0
    stage.loses("c1")
    assert stage.fails("r1", Leg.WHOLE, Failure.ERROR) == []
    assert stage.waits(1) == [FailRequest(request="r1", status=504, reason=Reason.DEADLINE_EXCEEDED)]
    assert stage.controller.waiting_requests() == 1


def test_a_draining_gateway_takes_nothing_new_and_finishes_what_it_has() -> None:
    stage = Stage(worker("c1", slots=1))
    stage.arrives("runs")
    stage.arrives("waits")
    assert stage.gateway_drains() == []
    assert stage.arrives("late") == [refused("late", DRAINING)]
    assert stage.fails("runs", Leg.WHOLE, Failure.ERROR) == [whole("runs", attempt=2)]
    assert stage.finishes("runs") == [whole("waits")]
    assert stage.finishes("waits") == []
    assert stage.is_empty()


@pytest.mark.parametrize("refusal", ["full", "draining"])
def test_who_is_refused_leaves_nothing_behind(refusal: str) -> None:
    stage = Stage(rules=Routing(max_waiting=0))
    if refusal == "draining":
        stage.gateway_drains()
    assert len(stage.arrives("r")) == 1
    assert stage.leaves("r") == []
    assert stage.controller.live_requests == 0
    assert stage.controller.next_wakeup() is None


def test_what_can_only_be_served_whole_waits_its_turn_for_slots() -> None:
    stage = Stage(worker("c1", slots=2))
    stage.arrives("r1")
    assert stage.arrives("three", prompt(sequences=3, obstacle=Why.N_CHOICES)) == []
    assert stage.arrives("r2") == []
    assert stage.finishes("r1") == [whole("three")], "more answers than slots go to an idle worker"
    assert stage.finishes("three") == [whole("r2")]
