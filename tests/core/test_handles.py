"""A handle is spent once or given back once; what nobody confirmed stays counted until its lease ends."""

import pytest
from tests.core.stage import Stage, worker

from twinpool.config import Routing
from twinpool.core.commands import ReleaseHandle, SendDecode, SendPrefill
from twinpool.core.decisions import Choice, Decision, Why
from twinpool.core.events import TimePassed
from twinpool.core.lifecycle import HandleState
from twinpool.core.model import Failure, Leg


def left_behind(lease_s: float | None = None, rules: Routing | None = None) -> Stage:
    """A request whose client left while its handle was at D."""
    stage = Stage(worker("p1", lease_s=lease_s), worker("d1"), rules=rules)
    stage.at = 100.0
    stage.arrives("r")
    stage.prefilled("r")
    stage.leaves("r")
    return stage


@pytest.mark.parametrize(("engine_s", "configured_s", "lease_s"), [(None, 30.0, 30.0), (None, 12.0, 12.0), (5.0, 30.0, 5.0)])
def test_an_orphan_lasts_until_the_lease_that_the_engine_told_or_the_configured_one(
    engine_s: float | None, configured_s: float, lease_s: float
) -> None:
    stage = left_behind(engine_s, Routing(lease_s=configured_s))
    stage.released("r", freed=False)
    assert stage.controller.next_wakeup() == 100.0 + lease_s
    stage.waits(lease_s - 0.1)
    assert stage.handles == {HandleState.ORPHANED: 1}
    stage.waits(0.1)
    assert stage.handles == {}
    assert stage.controller.next_wakeup() is None


def test_a_timer_for_something_else_does_not_forget_the_orphan() -> None:
    stage = left_behind()
    stage.released("r", freed=False)
    stage.tell(TimePassed(at=stage.at + 1))
    assert stage.controller.next_wakeup() == 130.0
    stage.waits(30)
    assert stage.handles == {}


def test_an_orphan_whose_lease_is_over_already_ends_at_the_next_tick() -> None:
    stage = left_behind(lease_s=1.0)
    stage.at = 110.0
    stage.released("r", freed=False)
    stage.waits(0)
    assert stage.handles == {}


def test_a_handle_is_given_back_once() -> None:
    stage = left_behind()
    assert stage.leaves("r") == []
    stage.released("r", freed=True)
    stage.released("r", freed=False)
    assert stage.handles == {}


def test_a_handle_that_was_read_is_not_given_back() -> None:
    stage = Stage(worker("p1"), worker("d1"))
    stage.arrives("r")
    stage.prefilled("r")
    stage.first_token("r")
    assert not any(isinstance(command, ReleaseHandle) for command in stage.fails("r", Leg.DECODE, Failure.ERROR))
    assert stage.handles == {}


def test_each_attempt_has_a_handle_of_its_own_and_none_is_sent_twice() -> None:
    stage = Stage(worker("p1"), worker("d1"))
    stage.arrives("r")
    stage.prefilled("r")
    stage.fails("r", Leg.DECODE, Failure.ERROR)
    stage.prefilled("r")
    stage.fails("r", Leg.DECODE, Failure.ERROR)
    sent = [command for commands in stage.commands for command in commands if isinstance(command, SendDecode)]
    released = [command for commands in stage.commands for command in commands if isinstance(command, ReleaseHandle)]
    assert [command.attempt for command in sent] == [1, 2]
    assert [command.attempt for command in released] == [1, 2]
    assert stage.handles == {HandleState.RELEASING: 2}
    assert stage.decisions[-1] == Decision(Choice.COLOCATED, Why.HANDOFF_FAILED, decode="d1"), "twice is enough"


def test_prefilled_is_handed_over_at_once_so_no_kv_is_parked() -> None:
    """BS-13: decode has four slots, prefill has no bound, and never more than four prompts are read ahead."""
    stage = Stage(worker("p1", slots=None), worker("d1", slots=4, serves_whole=False))
    for n in range(100):
        stage.arrives(f"r{n}")
    most, done = 0, 0
    while stage.controller.live_requests:
        running = [key.request for key in stage.controller.cluster.legs_on("d1")]
        most = max(most, len(running))
        for request in running:
            stage.prefilled(request)
        assert sum(stage.handles.values()) <= 4
        for request in running:
            stage.finishes(request)
            done += 1
    assert (most, done) == (4, 100)
    assert stage.is_empty()


# D is gone when P has read the prompt


@pytest.mark.parametrize("gone", ["lost", "removed"])
def test_another_decode_worker_gets_the_handle(gone: str) -> None:
    stage = Stage(worker("p1"), worker("d1"), worker("d2"))
    stage.arrives("r")
    stage.loses("d1") if gone == "lost" else stage.removes("d1")
    assert stage.prefilled("r") == [SendDecode(request="r", attempt=1, worker="d2", prefill_worker="p1")]
    assert stage.load("d2") == (0, 100, 1)
    if gone == "lost":
        assert stage.load("d1") == (0, 0, 0)
    stage.finishes("r")
    assert stage.is_empty()


@pytest.mark.parametrize("gone", ["lost", "removed"])
def test_without_another_decode_worker_the_handle_is_given_back_and_the_request_begun_anew(gone: str) -> None:
    stage = Stage(worker("p1", serves_whole=False), worker("d1"))
    stage.arrives("r")
    stage.loses("d1") if gone == "lost" else stage.removes("d1")
    assert stage.prefilled("r") == [ReleaseHandle(request="r", attempt=1, worker="p1")]
    assert stage.handles == {HandleState.RELEASING: 1}
    assert stage.controller.waiting_requests() == 1
    assert stage.joins(worker("d2")) == [SendPrefill(request="r", attempt=2, worker="p1")]


@pytest.mark.parametrize("why", ["drained", "busy"])
def test_a_decode_worker_that_should_get_nothing_new_passes_its_reservation_on(why: str) -> None:
    stage = reserved()
    stage.joins(worker("d2"))
    stage.drains("d1") if why == "drained" else stage.fails("other", Leg.DECODE, Failure.BUSY)
    assert stage.prefilled("r") == [SendDecode(request="r", attempt=1, worker="d2", prefill_worker="p1")]


@pytest.mark.parametrize("why", ["drained", "busy"])
def test_a_reservation_is_honoured_rather_than_a_prefill_wasted(why: str) -> None:
    stage = reserved()
    stage.drains("d1") if why == "drained" else stage.fails("other", Leg.DECODE, Failure.BUSY)
    assert stage.prefilled("r") == [SendDecode(request="r", attempt=1, worker="d1", prefill_worker="p1")]


def reserved() -> Stage:
    """One request decodes on d1, and another is prefilling with room on d1."""
    stage = Stage(worker("p1", serves_whole=False), worker("d1"))
    stage.arrives("other")
    stage.prefilled("other")
    stage.arrives("r")
    assert stage.load("d1") == (0, 200, 2)
    return stage


def test_nothing_is_begun_anew_for_want_of_a_decode_worker_once_the_time_is_over() -> None:
    stage = Stage(worker("p1"), worker("d1"), rules=Routing(request_timeout_s=20))
    stage.arrives("r")
    stage.loses("d1")
    stage.at = 20.0
    commands = stage.prefilled("r")
    assert [type(command).__name__ for command in commands] == ["ReleaseHandle", "FailRequest"]
    assert commands[1].status == 504


# P restarts


def test_a_restarted_prefill_worker_holds_nothing_any_more() -> None:
    stage = left_behind()
    stage.restarts("p1")
    assert stage.handles == {}
    stage.released("r", freed=False)
    assert stage.handles == {}


def test_a_handle_of_an_older_incarnation_is_never_sent() -> None:
    """The worker was taken away and came back as another engine, while its connection still stood."""
    stage = Stage(worker("p1"), worker("d1"))
    stage.arrives("r")
    stage.removes("p1")
    commands = stage.joins(worker("p1", incarnation="2"))
    assert [type(command).__name__ for command in commands] == ["CancelLeg", "SendPrefill"]
    assert stage.prefilled("r", attempt=1) == []
    assert stage.prefilled("r") == [SendDecode(request="r", attempt=2, worker="d1", prefill_worker="p1")]
