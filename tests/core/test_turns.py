"""Whose turn it is in the router's queue: by time, by priority up to a wait, by work between tenants."""

from itertools import pairwise

import pytest
from tests.core.stage import Stage, prompt, worker

from twinpool.config import Routing
from twinpool.core import commands as do
from twinpool.core.decisions import Why
from twinpool.core.model import Failure, Leg
from twinpool.errors import Reason


def one_slot(**rules: float) -> Stage:
    """One request at a time, and one under way."""
    stage = Stage(worker("c1", slots=1), rules=Routing(**rules))  # type: ignore[arg-type]
    stage.arrives("runs")
    return stage


def served(stage: Stage, count: int) -> list[str]:
    """The next so many, in the order in which they are."""
    order = []
    running = next(key.request for key in stage.controller.cluster.legs_on("c1"))
    for _ in range(count):
        (sent,) = (act for act in stage.finishes(running) if isinstance(act, do.SendWhole))
        running = sent.request
        order.append(running)
    return order


def test_a_priority_overtakes_those_that_wait() -> None:
    stage = one_slot()
    for n in range(5):
        stage.arrives(f"r{n}")
    stage.arrives("urgent", prompt(priority=1))
    stage.arrives("urgent too", prompt(priority=1))
    stage.arrives("now", prompt(priority=2))
    stage.arrives("whenever", prompt(priority=-1))
    assert served(stage, 9) == ["now", "urgent", "urgent too", "r0", "r1", "r2", "r3", "r4", "whenever"]


def test_nobody_is_overtaken_for_longer_than_the_lead() -> None:
    stage = one_slot(priority_lead_s=10.0)
    stage.arrives("patient")
    order: list[str] = []
    for second in range(1, 13):
        stage.at = float(second)
        stage.arrives(f"urgent{second}", prompt(priority=1))
        order += served(stage, 1)
    assert order.index("patient") == 9, "who comes 10 s later goes behind, however urgent"


def test_a_flood_leaves_others_their_turns() -> None:
    stage = one_slot()
    for n in range(100):
        stage.arrives(f"flood{n}", prompt(tenant="a"))
    for n in range(3):
        stage.arrives(f"r{n}", prompt(tenant="b"))
    assert served(stage, 6) == ["flood0", "r0", "flood1", "r1", "flood2", "r2"]


def test_turns_are_shared_by_work_and_not_by_requests() -> None:
    stage = one_slot()
    for n in range(10):
        stage.arrives(f"long{n}", prompt(4000, tenant="a"))
    for n in range(40):
        stage.arrives(f"short{n}", prompt(1000, tenant="b"))
    order = served(stage, 25)
    assert sum(name.startswith("long") for name in order) == 5
    assert [name for name in order if name.startswith("short")] == [f"short{n}" for n in range(20)]


def test_who_asks_one_at_a_time_gets_no_more_work_than_others() -> None:
    """What a tenant has had counts on when it has nothing in the queue."""
    stage = one_slot()
    for n in range(100):
        stage.arrives(f"flood{n}", prompt(500, tenant="a"))
    stage.arrives("big0", prompt(4000, tenant="b"))
    order: list[str] = []
    for n in range(40):
        order += served(stage, 1)
        if order[-1].startswith("big"):
            stage.arrives(f"big{n + 1}", prompt(4000, tenant="b"))
    big = [n for n, name in enumerate(order) if name.startswith("big")]
    assert [later - earlier for earlier, later in pairwise(big)] == [9] * (len(big) - 1)


def test_a_tenant_buys_nothing_of_others_with_priority() -> None:
    stage = one_slot()
    for n in range(20):
        stage.arrives(f"flood{n}", prompt(tenant="a", priority=100))
    stage.arrives("r0", prompt(tenant="b"))
    stage.arrives("r1", prompt(tenant="b"))
    assert served(stage, 4) == ["flood0", "r0", "flood1", "r1"]


def test_who_comes_back_has_no_claim_on_what_was_served_meanwhile() -> None:
    stage = one_slot()
    stage.arrives("early", prompt(tenant="b"))
    for n in range(30):
        stage.arrives(f"a{n}", prompt(tenant="a"))
    assert served(stage, 20).count("early") == 1
    for n in range(5):
        stage.arrives(f"late{n}", prompt(tenant="b"))
    assert sum(name.startswith("late") for name in served(stage, 6)) == 3


def test_a_retry_goes_before_all_and_costs_its_tenant_nothing_more() -> None:
    stage = one_slot()
    stage.arrives("a0", prompt(2000, tenant="a"))
    stage.arrives("a1", prompt(2000, tenant="a"))
    stage.arrives("b0", prompt(2000, tenant="b"))
    stage.arrives("b1", prompt(2000, tenant="b"))
    assert served(stage, 1) == ["a0"]
    stage.arrives("now", prompt(tenant="b", priority=100))
    assert stage.fails("a0", Leg.WHOLE, Failure.ERROR) == [do.SendWhole(request="a0", attempt=2, worker="c1")]
    assert served(stage, 3) == ["now", "b0", "a1"]


@pytest.mark.parametrize("count", [1, 70])
def test_who_leaves_the_queue_leaves_the_turns_as_they_were(count: int) -> None:
    stage = one_slot()
    for n in range(4):
        stage.arrives(f"a{n}", prompt(tenant="a"))
        stage.arrives(f"b{n}", prompt(tenant="b"))
    for n in range(count):
        stage.arrives(f"gone{n}", prompt(tenant=f"tenant{n}"))
    for n in range(count):
        stage.leaves(f"gone{n}")
    stage.leaves("a1")
    assert served(stage, 7) == ["a0", "b0", "a2", "b1", "a3", "b2", "b3"]


# A full queue


FULL = {"status": 429, "reason": Reason.QUEUE_FULL, "retry_after_s": 1}


def test_whoever_fills_the_queue_makes_room_for_others() -> None:
    stage = one_slot(max_waiting=10)
    for n in range(10):
        stage.arrives(f"flood{n}", prompt(tenant="a"))
    assert stage.arrives("flood10", prompt(tenant="a")) == [do.FailRequest(request="flood10", **FULL)]
    assert stage.arrives("r0", prompt(tenant="b")) == [do.FailRequest(request="flood9", **FULL)]
    assert stage.decisions[-1].why is Why.QUEUE_FULL
    for n in range(1, 8):
        stage.arrives(f"r{n}", prompt(tenant="b"))
    assert stage.controller.waiting_requests() == 10
    left = served(stage, 10)
    assert sum(name.startswith("flood") for name in left) == 5


def test_an_urgent_one_finds_room_in_the_queue_of_its_tenant() -> None:
    stage = one_slot(max_waiting=2)
    stage.arrives("r0")
    stage.arrives("r1")
    assert stage.arrives("urgent", prompt(priority=1)) == [do.FailRequest(request="r1", **FULL)]
    assert stage.arrives("r2") == [do.FailRequest(request="r2", **FULL)]
    assert served(stage, 2) == ["urgent", "r0"]


def test_what_was_promised_another_try_is_not_put_out() -> None:
    stage = one_slot(max_waiting=1)
    stage.loses("c1")
    stage.fails("runs", Leg.WHOLE, Failure.ERROR)
    assert stage.arrives("r", prompt(tenant="b", priority=9)) == [do.FailRequest(request="r", **FULL)]
