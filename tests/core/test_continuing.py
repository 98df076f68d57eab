"""A stream whose engine died goes on elsewhere, where the driver says that it can and a worker is able to."""

import pytest
from tests.core.stage import Stage, worker

from twinpool.config import Routing
from twinpool.core.commands import BreakLeg, CancelLeg, FailRequest, ProbeWorker, SendDecode, SendPrefill, SendWhole
from twinpool.core.model import Dialect, Failure, Leg


def streaming(*others: str, **rules: float) -> Stage:
    """One pair, both of which can continue, with a stream under way on d1; and other workers that can, too."""
    names = ("p1", "d1", *others)
    stage = Stage(*(worker(name, continues=True) for name in names), rules=Routing(**rules))  # type: ignore[arg-type]
    stage.arrives("r")
    stage.prefilled("r")
    stage.first_token("r")
    return stage


def breaks(stage: Stage) -> list[object]:
    return list(stage.fails("r", Leg.DECODE, Failure.BROKEN, can_continue=True))


def test_it_goes_on_with_a_new_prefill_and_another_decode_worker() -> None:
    stage = streaming("d2")
    assert breaks(stage) == [ProbeWorker(worker="d1"), SendPrefill(request="r", attempt=2, worker="p1")]
    assert stage.prefilled("r") == [SendDecode(request="r", attempt=2, worker="d2", prefill_worker="p1")]
    stage.first_token("r")
    stage.finishes("r")
    assert stage.is_empty()


def test_without_another_decode_worker_the_prefill_worker_writes_the_rest() -> None:
    assert breaks(streaming())[-1] == SendWhole(request="r", attempt=2, worker="p1")


def test_the_rest_has_the_time_of_a_request_anew() -> None:
    stage = streaming("d2", request_timeout_s=100.0)
    stage.at = 150.0
    breaks(stage)
    stage.at = 160.0
    assert stage.fails("r", Leg.PREFILL, Failure.ERROR) == [SendPrefill(request="r", attempt=3, worker="p1")]


def test_a_worker_that_cannot_continue_gets_none_of_it() -> None:
    stage = streaming()
    stage.loses("p1")
    stage.joins(worker("c1", continues=False))
    assert breaks(stage) == [ProbeWorker(worker="d1")]
    assert stage.restarts("d1") == [SendWhole(request="r", attempt=2, worker="d1")]


def test_one_that_waits_for_a_worker_that_can_does_not_hold_up_the_others() -> None:
    stage = Stage(worker("c1", continues=True), worker("c2"))
    stage.arrives("r")
    stage.first_token("r")
    assert stage.fails("r", Leg.WHOLE, Failure.BROKEN, can_continue=True) == [ProbeWorker(worker="c1")]
    assert stage.arrives("other") == [SendWhole(request="other", attempt=1, worker="c2")]
    assert stage.returns("c1") == [SendWhole(request="r", attempt=2, worker="c1")]


def test_one_that_waits_goes_before_those_who_came_earlier() -> None:
    stage = Stage(worker("c1", slots=1, continues=True))
    stage.arrives("r")
    stage.arrives("earlier")
    stage.first_token("r")
    assert stage.fails("r", Leg.WHOLE, Failure.ERROR, can_continue=True) == [SendWhole(request="r", attempt=2, worker="c1")]


def test_one_that_finds_no_worker_in_time_fails() -> None:
    stage = streaming(worker_wait_s=5.0)
    stage.loses("p1")
    breaks(stage)
    (failed,) = stage.waits(5.0)
    assert isinstance(failed, FailRequest)
    assert failed.status == 503
    assert stage.is_empty()


@pytest.mark.parametrize("can_continue", [True, False])
def test_only_what_can_be_gone_on_with_is(can_continue: bool) -> None:
    acts = streaming("d2").fails("r", Leg.DECODE, Failure.BROKEN, can_continue=can_continue)
    assert any(isinstance(act, SendPrefill) for act in acts) is can_continue
    assert any(isinstance(act, FailRequest) for act in acts) is not can_continue


def test_it_is_not_gone_on_with_for_ever() -> None:
    stage = streaming("c1", "c2", max_attempts=2)
    breaks(stage)
    stage.prefilled("r")
    stage.first_token("r")
    last = stage.fails("r", Leg.WHOLE, Failure.BROKEN, can_continue=True)
    assert isinstance(last[-1], FailRequest)
    assert stage.is_empty()


def test_the_prefill_beside_a_stream_that_goes_on_elsewhere_is_cancelled() -> None:
    stage = Stage(*(worker(name, dialect=Dialect.SGLANG, continues=True) for name in ("p1", "d1", "d2")))
    stage.arrives("r")
    stage.first_token("r")
    acts = stage.fails("r", Leg.DECODE, Failure.ERROR, can_continue=True)
    assert acts == [
        CancelLeg(request="r", attempt=1, leg=Leg.PREFILL),
        SendPrefill(request="r", attempt=2, worker="p1"),
        SendDecode(request="r", attempt=2, worker="d2", prefill_worker="p1"),
    ]


def test_a_stream_of_an_engine_that_restarted_is_broken_off_by_the_driver() -> None:
    stage = streaming("d2")
    assert stage.restarts("d1") == [BreakLeg(request="r", attempt=1, leg=Leg.DECODE)]
    acts = stage.fails("r", Leg.DECODE, Failure.RESTARTED, can_continue=True)
    assert acts == [SendPrefill(request="r", attempt=2, worker="p1")]
