"""Workers that come, go, restart, drain and change their role."""

import pytest
from tests.core.stage import Stage, prompt, worker

from twinpool.config import Routing
from twinpool.core.commands import (
    BreakLeg,
    CancelLeg,
    FailRequest,
    ProbeWorker,
    RecordRole,
    ReleaseHandle,
    SendDecode,
    SendPrefill,
    SendWhole,
)
from twinpool.core.decisions import Why
from twinpool.core.lifecycle import HandleState, WorkerState
from twinpool.core.model import Dialect, Failure, Leg, Role, kind_of
from twinpool.errors import Reason


def whole(request: str, name: str, attempt: int = 1) -> SendWhole:
    return SendWhole(request=request, attempt=attempt, worker=name)


# A restart: the same address, another engine


def test_what_a_restarted_worker_was_doing_is_done_anew() -> None:
    stage = Stage(worker("c1"), worker("c2"))
    stage.arrives("r")
    assert stage.restarts("c1") == [CancelLeg(request="r", attempt=1, leg=Leg.WHOLE), whole("r", "c2", 2)]
    assert stage.load("c1") == (0, 0, 0)
    assert stage.worker("c1").story.state is WorkerState.READY


def test_a_restart_that_nobody_was_hit_by_commands_nothing() -> None:
    stage = Stage(worker("c1"))
    assert stage.restarts("c1") == []
    assert stage.worker("c1").facts.incarnation == "2"


def test_a_restart_breaks_streams_off() -> None:
    stage = Stage(worker("p1"), worker("d1"))
    stage.arrives("r")
    stage.prefilled("r")
    stage.first_token("r")
    assert stage.restarts("d1") == [BreakLeg(request="r", attempt=1, leg=Leg.DECODE)]
    assert stage.fails("r", Leg.DECODE, Failure.RESTARTED) == [
        FailRequest(request="r", status=502, reason=Reason.UPSTREAM_FAILED)
    ]
    assert stage.is_empty()


def test_all_requests_of_a_restarted_worker_are_begun_anew_in_their_order() -> None:
    stage = Stage(worker("c1"))
    for n in range(3):
        stage.arrives(f"r{n}")
    commands = stage.restarts("c1")
    assert [command for command in commands if isinstance(command, CancelLeg)] == [
        CancelLeg(request=f"r{n}", attempt=1, leg=Leg.WHOLE) for n in range(3)
    ]
    assert sorted(command.request for command in commands if isinstance(command, SendWhole)) == ["r0", "r1", "r2"]
    assert not any(isinstance(command, ProbeWorker) for command in commands), "it was found well just now"
    assert commands.index(CancelLeg(request="r2", attempt=1, leg=Leg.WHOLE)) == 2, "old legs go before new ones are sent"


def test_a_prefill_restart_cancels_the_prefill_and_moves_the_reservation() -> None:
    stage = Stage(worker("p1"), worker("p2"), worker("d1"))
    stage.arrives("r")
    assert stage.restarts("p1") == [
        CancelLeg(request="r", attempt=1, leg=Leg.PREFILL),
        SendPrefill(request="r", attempt=2, worker="p2"),
    ]
    assert stage.load("d1") == (0, 100, 1)


def test_a_decode_restart_cancels_both_legs_where_they_run_at_once() -> None:
    stage = Stage(*(worker(name, dialect=Dialect.SGLANG) for name in ("p1", "d1", "d2")))
    stage.arrives("r")
    assert stage.restarts("d1") == [
        CancelLeg(request="r", attempt=1, leg=Leg.DECODE),
        CancelLeg(request="r", attempt=1, leg=Leg.PREFILL),
        SendPrefill(request="r", attempt=2, worker="p1"),
        SendDecode(request="r", attempt=2, worker="d2", prefill_worker="p1"),
    ]


def test_a_decode_restart_gives_the_handle_back_to_prefill() -> None:
    stage = Stage(worker("p1"), worker("d1"))
    stage.arrives("r")
    stage.prefilled("r")
    assert stage.restarts("d1") == [
        CancelLeg(request="r", attempt=1, leg=Leg.DECODE),
        ReleaseHandle(request="r", attempt=1, worker="p1"),
        SendPrefill(request="r", attempt=2, worker="p1"),
    ]


def test_a_decode_restart_does_not_touch_a_request_that_only_has_room_there() -> None:
    stage = Stage(worker("p1"), worker("d1"))
    stage.arrives("r")
    assert stage.restarts("d1") == []
    assert stage.load("d1") == (0, 100, 1)
    assert stage.prefilled("r") == [SendDecode(request="r", attempt=1, worker="d1", prefill_worker="p1")]


def test_the_handles_of_a_restarted_worker_are_gone_and_nobody_gives_them_back() -> None:
    stage = Stage(worker("p1"), worker("p2"), worker("d1"))
    stage.arrives("r1")
    stage.arrives("r2")
    stage.prefilled("r1")
    stage.prefilled("r2")
    stage.restarts("p1")
    assert stage.handles == {HandleState.SENT: 1}
    assert stage.commands[-1][0] == CancelLeg(request="r1", attempt=1, leg=Leg.DECODE), "D may read another's KV"
    assert not any(isinstance(command, ReleaseHandle) for command in stage.commands[-1])
    stage.leaves("r1")
    assert stage.leaves("r2")[-1] == ReleaseHandle(request="r2", attempt=1, worker="p2")


def test_a_restart_ends_the_pause_and_the_drain() -> None:
    stage = Stage(worker("c1"))
    stage.arrives("r")
    stage.fails("r", Leg.WHOLE, Failure.BUSY, retry_after_s=20)
    stage.drains("c1")
    assert stage.restarts("c1") == [whole("r", "c1", 2)]


def test_a_worker_that_restarts_while_lost_starts_with_no_load() -> None:
    stage = Stage(worker("c1"), worker("c2"))
    stage.arrives("r")
    stage.loses("c1")
    assert stage.load("c1") == (100, 100, 1), "its connection still stands: it tells how it ends"
    assert stage.restarts("c1")[-1] == whole("r", "c2", 2)
    assert stage.load("c1") == (0, 0, 0)


# Lost and found


def test_a_lost_worker_gets_nothing_new_and_keeps_what_it_has() -> None:
    stage = Stage(worker("c1"), worker("c2"))
    stage.arrives("r")
    assert stage.loses("c1") == []
    assert stage.arrives("r2") == [whole("r2", "c2")]
    assert stage.arrives("r3") == [whole("r3", "c2")]
    assert stage.first_token("r") == []
    assert stage.finishes("r") == []
    stage.returns("c1")
    assert stage.arrives("r4") == [whole("r4", "c1")]


def test_health_checks_never_touch_the_load() -> None:
    """LB-01: ten cycles of probes over five open streams."""
    stage = Stage(worker("c1"))
    for n in range(5):
        stage.arrives(f"r{n}")
        stage.first_token(f"r{n}")
    for cycle in range(10):
        if cycle % 2:
            stage.loses("c1")
        stage.returns("c1")
        assert stage.load("c1") == (0, 500, 5)


@pytest.mark.parametrize("how", ["loses", "removes", "drains"])
def test_who_waited_for_a_worker_that_went_away_goes_another_way_at_once(how: str) -> None:
    """The last prefill worker goes while a request waits for its window: the decode worker can serve it whole."""
    stage = Stage(worker("p1"), worker("d1"))
    stage.arrives("r1", prompt(4000))
    assert stage.arrives("r2", prompt(4000)) == []
    assert stage.decisions[-1].why is Why.PREFILL_BUSY
    assert getattr(stage, how)("p1") == [whole("r2", "d1")]


@pytest.mark.parametrize("leg", [Leg.PREFILL, Leg.DECODE])
def test_a_pool_that_is_at_its_limit_is_waited_for_and_not_gone_round(leg: Leg) -> None:
    """WF-07, WF-09: back-pressure is no reason to send the work to the other pool."""
    stage = Stage(worker("p1"), worker("d1"))
    stage.arrives("r")
    if leg is Leg.DECODE:
        stage.prefilled("r")
    acts = stage.fails("r", leg, Failure.BUSY, retry_after_s=3)
    assert not any(isinstance(act, SendPrefill | SendWhole) for act in acts)
    assert stage.waits(3) == [SendPrefill(request="r", attempt=2, worker="p1")]


def test_a_request_s_own_end_cuts_its_legs() -> None:
    stage = Stage(worker("p1"), worker("d1"), rules=Routing(request_timeout_s=5))
    stage.arrives("r")
    stage.at = 1.0
    cancelled, failed = stage.waits(4)
    assert cancelled == CancelLeg(request="r", attempt=1, leg=Leg.PREFILL)
    assert isinstance(failed, FailRequest)
    assert failed.status == 504
    assert stage.is_empty()


def test_news_of_workers_nobody_knows_change_nothing() -> None:
    stage = Stage()
    assert stage.loses("x") == stage.removes("x") == stage.drains("x") == stage.asks("x", Role.DECODE) == []


# Removed


def test_a_removed_worker_finishes_what_it_has() -> None:
    stage = Stage(worker("p1"), worker("d1"))
    stage.arrives("r")
    stage.removes("p1")
    assert stage.prefilled("r") == [SendDecode(request="r", attempt=1, worker="d1", prefill_worker="p1")]
    stage.removes("d1")
    assert stage.first_token("r") == stage.finishes("r") == []
    assert stage.is_empty()


def test_a_removed_worker_that_is_back_has_what_it_had() -> None:
    """The same engine, with its sequences still running: it must not look idle."""
    stage = Stage(worker("p1"), worker("c1"))
    stage.arrives("r1")
    stage.arrives("r2")
    before = stage.load("c1")
    stage.removes("c1")
    stage.joins(worker("c1"))
    assert stage.load("c1") == before == (200, 200, 2)
    stage.finishes("r1")
    stage.finishes("r2")
    assert stage.is_empty()


def test_room_on_a_removed_worker_that_is_back_is_kept() -> None:
    stage = Stage(worker("p1"), worker("d1"))
    stage.arrives("r")
    stage.removes("d1")
    stage.joins(worker("d1", incarnation="2"))
    assert stage.load("d1") == (0, 100, 1)
    assert stage.prefilled("r") == [SendDecode(request="r", attempt=1, worker="d1", prefill_worker="p1")]
    stage.finishes("r")
    assert stage.is_empty()


def test_a_failure_on_a_removed_worker_is_nobodys_fault_and_the_request_goes_on() -> None:
    stage = Stage(worker("c1"), worker("c2"))
    stage.arrives("r")
    stage.removes("c1")
    assert stage.fails("r", Leg.WHOLE, Failure.BROKEN) == [whole("r", "c2", 2)]


# Drained


def test_a_drained_worker_gets_nothing_new_and_finishes_what_it_has() -> None:
    stage = Stage(worker("c1"), worker("c2"))
    stage.arrives("r")
    stage.drains("c1")
    for n in range(3):
        assert stage.arrives(f"r{n}") == [whole(f"r{n}", "c2")]
    assert stage.first_token("r") == stage.finishes("r") == []
    assert stage.load("c1") == (0, 0, 0)


def test_a_drained_prefill_worker_keeps_its_handles_until_they_are_read() -> None:
    """WF-04: drained is not the same as idle."""
    stage = Stage(worker("p1"), worker("p2"), worker("d1"))
    stage.arrives("r")
    stage.drains("p1")
    assert stage.prefilled("r") == [SendDecode(request="r", attempt=1, worker="d1", prefill_worker="p1")]
    assert stage.handles == {HandleState.SENT: 1}
    stage.first_token("r")
    assert stage.handles == {}


def test_a_drain_outlasts_a_loss() -> None:
    stage = Stage(worker("c1"), worker("c2"))
    stage.drains("c1")
    stage.loses("c1")
    stage.returns("c1")
    assert stage.arrives("r") == [whole("r", "c2")]


def test_a_drain_asked_while_the_worker_is_lost_holds_when_it_returns() -> None:
    stage = Stage(worker("c1"), worker("c2"))
    stage.loses("c1")
    stage.drains("c1")
    stage.returns("c1")
    assert stage.arrives("r") == [whole("r", "c2")]


def test_a_drain_asked_twice_is_one() -> None:
    stage = Stage(worker("c1"))
    assert stage.drains("c1") == stage.drains("c1") == []
    assert stage.worker("c1").story.state is WorkerState.DRAINING


# Roles


def test_a_role_asked_for_is_recorded_and_used_at_once() -> None:
    stage = Stage(worker("c1"), worker("d1"))
    assert stage.asks("c1", Role.PREFILL) == [RecordRole(worker="c1", role=Role.PREFILL, reason="manual")]
    assert stage.arrives("r") == [SendPrefill(request="r", attempt=1, worker="c1")]


def test_a_role_change_sends_who_waited() -> None:
    stage = Stage(worker("p1", serves_whole=False), worker("p2", serves_whole=False))
    assert stage.arrives("r") == []
    assert stage.asks("p2", Role.DECODE) == [
        RecordRole(worker="p2", role=Role.DECODE, reason="manual"),
        SendPrefill(request="r", attempt=1, worker="p1"),
    ]


def test_a_role_that_is_not_allowed_or_is_there_already_changes_nothing() -> None:
    stage = Stage(worker("d1", allowed_roles=(Role.DECODE,)))
    assert stage.asks("d1", Role.PREFILL) == stage.asks("d1", Role.DECODE) == []
    assert stage.worker("d1").role is Role.DECODE


def test_a_role_asked_for_holds_over_probes_losses_and_restarts() -> None:
    stage = Stage(worker("c1"))
    stage.asks("c1", Role.DECODE)
    stage.returns("c1")
    stage.loses("c1")
    stage.restarts("c1")
    assert stage.worker("c1").role is Role.DECODE


def test_a_new_configuration_of_the_role_replaces_what_was_asked_for() -> None:
    stage = Stage(worker("c1"))
    stage.asks("c1", Role.DECODE)
    stage.joins(worker("c1", role=Role.PREFILL))
    assert stage.worker("c1").role is Role.PREFILL


def test_a_change_of_role_does_not_touch_what_runs() -> None:
    """Soft: a decode worker that prefills from now on keeps the sequence it writes and the room it promised."""
    stage = Stage(worker("p1"), worker("d1"))
    stage.arrives("r1")
    stage.prefilled("r1")
    stage.arrives("r2")
    stage.asks("d1", Role.PREFILL)
    assert stage.load("d1") == (0, 200, 2)
    assert stage.prefilled("r2") == [SendDecode(request="r2", attempt=1, worker="d1", prefill_worker="p1")]
    stage.finishes("r1")
    stage.finishes("r2")
    assert stage.is_empty()


def test_facts_that_a_probe_learns_later_are_used() -> None:
    stage = Stage(worker("c1", slots=1), rules=Routing())
    stage.arrives("r1")
    assert stage.arrives("r2") == []
    assert stage.joins(worker("c1", slots=2)) == [whole("r2", "c1")]


def test_a_kind_names_what_is_known_of_it_and_no_more() -> None:
    assert kind_of(worker("d1")) == "scripted m tp1"
    assert kind_of(worker("d1", budget_tokens=2048, kv_capacity_tokens=131_072)) == "scripted m tp1 budget 2048 kv 1.3e+05"
