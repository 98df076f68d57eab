"""Legs that do not end well: what becomes of the request, of the other leg, of the handle, and of the worker."""

import pytest
from tests.core.stage import Stage, prompt, worker

from twinpool.config import Routing
from twinpool.core.commands import (
    CancelLeg,
    FailRequest,
    ProbeWorker,
    RelayFailure,
    ReleaseHandle,
    SendDecode,
    SendPrefill,
    SendWhole,
)
from twinpool.core.events import TimePassed
from twinpool.core.lifecycle import HandleState, WorkerState
from twinpool.core.model import Dialect, Failure, Leg
from twinpool.errors import Reason

F = Failure


def two_pairs(dialect: Dialect = Dialect.NIXL, *, rules: Routing | None = None) -> Stage:
    return Stage(*(worker(name, dialect=dialect) for name in ("p1", "p2", "d1", "d2")), rules=rules)


def prefill(worker: str, attempt: int) -> SendPrefill:
    return SendPrefill(request="r", attempt=attempt, worker=worker)


def decode(worker: str, prefill_worker: str, attempt: int) -> SendDecode:
    return SendDecode(request="r", attempt=attempt, worker=worker, prefill_worker=prefill_worker)


def cancel(leg: Leg, attempt: int = 1) -> CancelLeg:
    return CancelLeg(request="r", attempt=attempt, leg=leg)


RELEASE = ReleaseHandle(request="r", attempt=1, worker="p1")

SPOILED = [F.ERROR, F.TIMED_OUT, F.RESTARTED]


# Before the first token: begun anew, elsewhere


@pytest.mark.parametrize("failure", [*SPOILED, F.NO_HANDLE])
def test_a_prefill_that_failed_is_done_again_on_another_worker(failure: Failure) -> None:
    stage = two_pairs()
    stage.arrives("r")
    assert stage.fails("r", Leg.PREFILL, failure, status=500) == [prefill("p2", 2)]
    assert stage.load("p1") == (0, 0, 0)
    assert stage.worker("p1").story.state is WorkerState.READY, "one bad answer evicts nobody"
    assert stage.prefilled("r") == [decode("d1", "p2", 2)]


@pytest.mark.parametrize("failure", [F.UNREACHABLE, F.BROKEN])
def test_a_prefill_worker_whose_connection_fails_is_probed_and_left_alone(failure: Failure) -> None:
    stage = two_pairs()
    stage.arrives("r")
    assert stage.fails("r", Leg.PREFILL, failure) == [ProbeWorker(worker="p1"), prefill("p2", 2)]
    assert stage.worker("p1").story.state is WorkerState.LOST
    assert stage.arrives("r2") == [SendPrefill(request="r2", attempt=1, worker="p2")]


def prefill_after(leg: Leg, failure: Failure) -> str:
    """Who reads the prompt again: not the prefill worker that failed, nor one whose handoff may have."""
    return "p2" if leg is Leg.PREFILL or failure in (F.ERROR, F.TIMED_OUT, F.HANDLE_REFUSED) else "p1"


@pytest.mark.parametrize("failure", [*SPOILED, F.HANDLE_REFUSED])
def test_a_second_try_of_a_decode_is_a_new_prefill_with_a_new_handle(failure: Failure) -> None:
    stage = two_pairs()
    stage.arrives("r")
    stage.prefilled("r")
    fresh = prefill_after(Leg.DECODE, failure)
    assert stage.fails("r", Leg.DECODE, failure, status=500) == [RELEASE, prefill(fresh, 2)]
    assert stage.handles == {HandleState.RELEASING: 1}
    assert stage.prefilled("r") == [decode("d2", fresh, 2)]
    assert stage.handles == {HandleState.RELEASING: 1, HandleState.SENT: 1}


@pytest.mark.parametrize("failure", [F.UNREACHABLE, F.BROKEN])
def test_a_decode_worker_whose_connection_fails_is_probed_and_left_alone(failure: Failure) -> None:
    stage = two_pairs()
    stage.arrives("r")
    stage.prefilled("r")
    assert stage.fails("r", Leg.DECODE, failure) == [ProbeWorker(worker="d1"), RELEASE, prefill("p1", 2)]
    assert stage.prefilled("r") == [decode("d2", "p1", 2)]


@pytest.mark.parametrize("failure", SPOILED)
@pytest.mark.parametrize(
    ("leg", "other", "then"),
    [(Leg.PREFILL, Leg.DECODE, "d1"), (Leg.DECODE, Leg.PREFILL, "d2")],
)
def test_of_two_legs_at_once_the_first_to_fail_cancels_the_other(failure: Failure, leg: Leg, other: Leg, then: str) -> None:
    stage = two_pairs(Dialect.SGLANG)
    stage.arrives("r")
    fresh = prefill_after(leg, failure)
    assert stage.fails("r", leg, failure) == [cancel(other), prefill(fresh, 2), decode(then, fresh, 2)]
    assert stage.fails("r", other, failure, attempt=1) == [], "its end is stale news"


@pytest.mark.parametrize("leg", [Leg.PREFILL, Leg.DECODE])
def test_of_two_legs_at_once_an_unreachable_worker_ends_both(leg: Leg) -> None:
    stage = two_pairs(Dialect.SGLANG)
    stage.arrives("r")
    failed, other = ("p1", Leg.DECODE) if leg is Leg.PREFILL else ("d1", Leg.PREFILL)
    commands = stage.fails("r", leg, F.UNREACHABLE)
    assert commands[:2] == [ProbeWorker(worker=failed), cancel(other)]
    assert failed not in {command.worker for command in commands[2:]}


def test_a_decode_that_fails_after_its_prefill_has_ended_cancels_nothing() -> None:
    stage = two_pairs(Dialect.SGLANG)
    stage.arrives("r")
    stage.prefilled("r")
    assert stage.fails("r", Leg.DECODE, F.ERROR) == [prefill("p2", 2), decode("d2", "p2", 2)]


@pytest.mark.parametrize("failure", SPOILED)
def test_a_whole_leg_that_failed_is_done_again_on_another_worker(failure: Failure) -> None:
    stage = Stage(worker("c1"), worker("c2"))
    stage.arrives("r")
    assert stage.fails("r", Leg.WHOLE, failure) == [SendWhole(request="r", attempt=2, worker="c2")]


def test_the_worker_that_failed_is_taken_again_rather_than_none() -> None:
    stage = Stage(worker("c1"))
    stage.arrives("r")
    assert stage.fails("r", Leg.WHOLE, F.ERROR) == [SendWhole(request="r", attempt=2, worker="c1")]


def test_an_unreachable_worker_is_avoided_even_when_the_probe_finds_it_well() -> None:
    stage = Stage(worker("c1"), worker("c2"), worker("c3"))
    for n in range(3):
        stage.arrives(f"long{n}", prompt(5000))
    stage.finishes("long0")
    stage.finishes("long1")
    assert stage.arrives("r") == [SendWhole(request="r", attempt=1, worker="c1")]
    assert stage.fails("r", Leg.WHOLE, F.UNREACHABLE)[1] == SendWhole(request="r", attempt=2, worker="c2")
    stage.returns("c1")
    assert stage.fails("r", Leg.WHOLE, F.ERROR) == [SendWhole(request="r", attempt=3, worker="c3")]


def test_one_request_that_kills_its_engines_is_given_up() -> None:
    stage = Stage(*(worker(f"c{n}") for n in range(1, 6)))
    stage.arrives("r")
    stage.fails("r", Leg.WHOLE, F.BROKEN)
    stage.fails("r", Leg.WHOLE, F.BROKEN)
    assert stage.fails("r", Leg.WHOLE, F.BROKEN) == [
        ProbeWorker(worker="c3"),
        FailRequest(request="r", status=502, reason=Reason.UPSTREAM_FAILED),
    ]
    assert stage.is_empty()


# The attempts are used up


@pytest.mark.parametrize(
    ("failure", "status", "end"),
    [
        (F.ERROR, 500, RelayFailure(request="r")),
        (F.ERROR, None, FailRequest(request="r", status=502, reason=Reason.UPSTREAM_FAILED)),
        (F.TIMED_OUT, None, FailRequest(request="r", status=504, reason=Reason.DEADLINE_EXCEEDED)),
        (F.NO_HANDLE, None, FailRequest(request="r", status=503, reason=Reason.HANDOFF_FAILED, retry_after_s=1)),
    ],
)
def test_after_the_last_attempt_the_client_gets_what_is_known(failure: Failure, status: int | None, end: object) -> None:
    stage = two_pairs(rules=Routing(max_attempts=2))
    stage.arrives("r")
    assert stage.fails("r", Leg.PREFILL, failure, status=status) == [prefill("p2", 2)]
    assert stage.fails("r", Leg.PREFILL, failure, status=status) == [end]
    assert stage.is_empty()


def test_a_handle_refused_to_the_last_is_a_failed_handoff() -> None:
    stage = two_pairs(rules=Routing(max_attempts=1))
    stage.arrives("r")
    stage.prefilled("r")
    failed = FailRequest(request="r", status=503, reason=Reason.HANDOFF_FAILED, retry_after_s=1)
    assert stage.fails("r", Leg.DECODE, F.HANDLE_REFUSED, status=410) == [RELEASE, failed]


@pytest.mark.parametrize("failure", [F.BUSY, F.UNREACHABLE, F.ERROR])
def test_nothing_is_begun_anew_once_the_time_of_the_request_is_over(failure: Failure) -> None:
    stage = two_pairs(rules=Routing(request_timeout_s=20))
    stage.arrives("r")
    stage.at = 20.0
    commands = stage.fails("r", Leg.PREFILL, failure)
    assert commands[-1] == FailRequest(request="r", status=504, reason=Reason.DEADLINE_EXCEEDED)
    assert stage.controller.live_requests == 0


# 4xx: the request is at fault


@pytest.mark.parametrize("dialect", list(Dialect))
def test_a_prefill_that_was_rejected_ends_the_request_with_the_engines_words(dialect: Dialect) -> None:
    stage = two_pairs(dialect)
    stage.arrives("r")
    cancelled = [cancel(Leg.DECODE)] if dialect is Dialect.SGLANG else []
    assert stage.fails("r", Leg.PREFILL, F.REJECTED, status=400) == [*cancelled, RelayFailure(request="r")]
    assert stage.is_empty()


def test_a_decode_that_was_rejected_releases_the_handle() -> None:
    stage = two_pairs()
    stage.arrives("r")
    stage.prefilled("r")
    assert stage.fails("r", Leg.DECODE, F.REJECTED, status=422) == [RELEASE, RelayFailure(request="r")]


def test_4xx_is_never_held_against_a_worker() -> None:
    """WF-06: twenty bad requests in a row, and the next good one goes to the same worker."""
    stage = Stage(worker("c1"), worker("c2"))
    for n in range(20):
        assert stage.arrives(f"bad{n}") == [SendWhole(request=f"bad{n}", attempt=1, worker="c1")]
        assert stage.fails(f"bad{n}", Leg.WHOLE, F.REJECTED, status=400) == [RelayFailure(request=f"bad{n}")]
    assert stage.worker("c1").story.state is WorkerState.READY
    assert stage.controller.next_wakeup() != stage.worker("c1").paused_until
    assert stage.arrives("good") == [SendWhole(request="good", attempt=1, worker="c1")]


# 429 and 503: back-pressure


@pytest.mark.parametrize(
    ("retry_after_s", "pause_s"),
    [(None, 1.0), (7.0, 7.0), (3600.0, 30.0), (0.0, 1.0), (-5.0, 1.0)],
    ids=["absent", "honoured", "capped", "zero", "negative"],
)
def test_a_busy_worker_is_left_alone_for_as_long_as_it_says(retry_after_s: float | None, pause_s: float) -> None:
    stage = Stage(worker("c1"), worker("c2"))
    stage.arrives("r")
    again = stage.fails("r", Leg.WHOLE, F.BUSY, status=429, retry_after_s=retry_after_s)
    assert again == [SendWhole(request="r", attempt=2, worker="c2")]
    assert stage.worker("c1").story.state is WorkerState.READY, "busy, not dead"
    stage.finishes("r")
    stage.at = pause_s - 0.01
    assert stage.arrives("early") == [SendWhole(request="early", attempt=1, worker="c2")]
    stage.at = pause_s
    assert stage.arrives("then") == [SendWhole(request="then", attempt=1, worker="c1")]


def test_who_waits_for_a_busy_worker_goes_when_its_pause_is_over() -> None:
    stage = Stage(worker("c1"))
    stage.arrives("r")
    assert stage.fails("r", Leg.WHOLE, F.BUSY, status=503, retry_after_s=3) == []
    assert stage.controller.next_wakeup() == 3.0
    assert stage.waits(2.9) == []
    assert stage.waits(0.1) == [SendWhole(request="r", attempt=2, worker="c1")]


def test_a_timer_for_something_else_does_not_forget_the_pause() -> None:
    stage = Stage(worker("c1"))
    stage.arrives("r")
    stage.fails("r", Leg.WHOLE, F.BUSY, retry_after_s=20)
    stage.tell(TimePassed(at=1.0))
    assert stage.controller.next_wakeup() == 20.0


def test_a_shorter_pause_does_not_end_a_longer_one() -> None:
    stage = Stage(worker("c1"))
    stage.arrives("r1")
    stage.arrives("r2")
    stage.fails("r1", Leg.WHOLE, F.BUSY, retry_after_s=10)
    stage.fails("r2", Leg.WHOLE, F.BUSY)
    assert stage.waits(9.9) == []
    assert [command.request for command in stage.waits(0.1)] == ["r2", "r1"]


def test_being_busy_is_no_strike_and_costs_no_new_wait() -> None:
    stage = Stage(worker("c1"), rules=Routing(max_attempts=1, queue_timeout_s=10))
    stage.arrives("r")
    for attempt in range(2, 11):
        stage.fails("r", Leg.WHOLE, F.BUSY, status=429)
        assert stage.waits(1) == [SendWhole(request="r", attempt=attempt, worker="c1")]
    stage.fails("r", Leg.WHOLE, F.BUSY, status=429)
    assert stage.waits(1) == [FailRequest(request="r", status=503, reason=Reason.QUEUE_TIMEOUT, retry_after_s=5)]


def test_a_busy_decode_costs_the_handle() -> None:
    stage = two_pairs()
    stage.arrives("r")
    stage.prefilled("r")
    assert stage.fails("r", Leg.DECODE, F.BUSY, status=429) == [RELEASE, prefill("p1", 2)]
    assert stage.prefilled("r") == [decode("d2", "p1", 2)]


# After the first token: nothing can be begun anew


@pytest.mark.parametrize("failure", list(F))
@pytest.mark.parametrize(("names", "leg"), [(("p1", "d1"), Leg.DECODE), (("c1",), Leg.WHOLE)])
def test_a_stream_that_breaks_ends_with_an_error_and_is_not_begun_anew(
    failure: Failure, names: tuple[str, ...], leg: Leg
) -> None:
    stage = Stage(*(worker(name) for name in names))
    stage.arrives("r")
    if leg is Leg.DECODE:
        stage.prefilled("r")
    stage.first_token("r")
    commands = stage.fails("r", leg, failure)
    assert commands[-1] == FailRequest(request="r", status=502, reason=Reason.UPSTREAM_FAILED)
    assert [type(command) for command in commands[:-1]] in ([], [ProbeWorker])
    assert stage.is_empty()


def test_a_prefill_beside_a_running_stream_that_fails_is_nobodys_loss() -> None:
    stage = two_pairs(Dialect.SGLANG)
    stage.arrives("r")
    stage.first_token("r")
    assert stage.fails("r", Leg.PREFILL, F.ERROR) == []
    assert stage.load("p1") == (0, 0, 0)
    stage.finishes("r")
    assert stage.is_empty()


def test_a_stream_that_breaks_cancels_the_prefill_beside_it() -> None:
    stage = two_pairs(Dialect.SGLANG)
    stage.arrives("r")
    stage.first_token("r")
    failed = FailRequest(request="r", status=502, reason=Reason.UPSTREAM_FAILED)
    assert stage.fails("r", Leg.DECODE, F.ERROR) == [cancel(Leg.PREFILL), failed]


def test_an_answer_that_is_whole_before_its_prefill_has_answered_cancels_it() -> None:
    stage = two_pairs(Dialect.SGLANG)
    stage.arrives("r")
    assert stage.finishes("r") == [cancel(Leg.PREFILL)]
    assert stage.is_empty()


# What a failure says of a worker that is another by now


def test_a_late_failure_is_not_held_against_the_next_incarnation() -> None:
    stage = Stage(worker("c1"), worker("c2"))
    stage.arrives("r")
    stage.removes("c1")
    stage.joins(worker("c1", incarnation="2"))
    stage.fails("r", Leg.WHOLE, F.BROKEN, attempt=1)
    assert stage.worker("c1").story.state is WorkerState.READY
