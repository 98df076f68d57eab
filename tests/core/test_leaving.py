"""A client that leaves: in every state its legs are cancelled at once, its handle is given back, and nothing weighs on."""

import pytest
from tests.core.stage import Stage, worker

from twinpool.config import Routing
from twinpool.core.commands import CancelLeg, ReleaseHandle, SendWhole
from twinpool.core.lifecycle import HandleState
from twinpool.core.model import Dialect, Leg

RELEASE = ReleaseHandle(request="r", attempt=1, worker="p1")


def cancel(leg: Leg) -> CancelLeg:
    return CancelLeg(request="r", attempt=1, leg=leg)


def pair(dialect: Dialect = Dialect.NIXL) -> Stage:
    return Stage(worker("p1", dialect=dialect), worker("d1", dialect=dialect))


def test_while_waiting() -> None:
    stage = Stage()
    stage.arrives("r")
    assert stage.leaves("r") == []
    assert stage.controller.waiting_requests() == 0
    assert stage.joins(worker("c1")) == []


def test_while_prefilling() -> None:
    stage = pair()
    stage.arrives("r")
    assert stage.leaves("r") == [cancel(Leg.PREFILL)]
    assert stage.is_empty()


def test_between_prefill_and_decode_the_handle_is_given_back() -> None:
    stage = pair()
    stage.arrives("r")
    stage.prefilled("r")
    assert stage.leaves("r") == [cancel(Leg.DECODE), RELEASE]
    assert stage.handles == {HandleState.RELEASING: 1}
    stage.released("r", freed=True)
    assert stage.is_empty()


def test_while_streaming_the_handle_is_spent_already() -> None:
    stage = pair()
    stage.arrives("r")
    stage.prefilled("r")
    stage.first_token("r")
    assert stage.leaves("r") == [cancel(Leg.DECODE)]
    assert stage.is_empty()


@pytest.mark.parametrize("streams", [False, True])
def test_with_both_legs_out(streams: bool) -> None:
    stage = pair(Dialect.SGLANG)
    stage.arrives("r")
    if streams:
        stage.first_token("r")
    assert stage.leaves("r") == [cancel(Leg.PREFILL), cancel(Leg.DECODE)]
    assert stage.is_empty()


@pytest.mark.parametrize("streams", [False, True])
def test_while_one_worker_does_all(streams: bool) -> None:
    stage = Stage(worker("c1"))
    stage.arrives("r")
    if streams:
        stage.first_token("r")
    assert stage.leaves("r") == [cancel(Leg.WHOLE)]
    assert stage.is_empty()


def test_who_waited_behind_goes_at_once() -> None:
    stage = Stage(worker("c1", slots=1))
    stage.arrives("r")
    assert stage.arrives("next") == []
    assert stage.leaves("r") == [cancel(Leg.WHOLE), SendWhole(request="next", attempt=1, worker="c1")]


def test_a_storm_of_leavers_leaves_nothing_behind() -> None:
    """WF-11, LB-02, KV-01: four hundred clients that leave at four different moments."""
    stage = Stage(*(worker(name, slots=64) for name in ("p1", "p2", "d1", "d2", "c1")), rules=Routing(max_waiting=400))
    for n in range(400):
        stage.arrives(f"r{n}")
    for n in range(0, 400, 2):
        stage.prefilled(f"r{n}")
    for n in range(0, 400, 4):
        stage.first_token(f"r{n}")
    for n in range(400):
        stage.leaves(f"r{n}")
    assert stage.controller.live_requests == 0
    assert stage.controller.waiting_requests() == 0
    assert set(stage.handles) <= {HandleState.RELEASING}
    for n in range(400):
        stage.released(f"r{n}", freed=n % 8 == 0)
    stage.waits(60)
    assert stage.is_empty()
    assert stage.controller.next_wakeup() is None
