"""The law's choices, each with its reason: a prompt of 1,000 tokens takes 40 ms, a step 10 ms and more by its batch."""

import msgspec
import pytest
from tests.core.stage import Stage, prompt, worker
from tests.policy.costs_of import PRIOR

from twinpool.assemble import build_controller
from twinpool.config import Routing, RoutingPolicy
from twinpool.core import commands as do
from twinpool.core import events as on
from twinpool.core.decisions import Choice, Why
from twinpool.core.law import Law
from twinpool.core.model import RequestFacts, Role, Usage, WorkerFacts


def facts(name: str, *, budget: int | None = 8192, kv: int | None = None, slots: int = 256) -> WorkerFacts:
    return msgspec.structs.replace(worker(name, slots=slots), budget_tokens=budget, kv_capacity_tokens=kv)


def stage(*workers: WorkerFacts | str) -> Stage:
    made = Stage()
    made.controller = build_controller(Routing(policy=RoutingPolicy.LEAST_COST), law=Law(priors={"": PRIOR}))
    for each in workers:
        made.joins(facts(each) if isinstance(each, str) else each)
    return made


def busy(made: Stage, count: int, name: str = "b") -> None:
    """So many answers are written on decode workers."""
    for n in range(count):
        made.arrives(f"{name}{n}", prompt(1000))
        if made.decisions[-1].choice is Choice.DISAGGREGATED:
            made.prefilled(f"{name}{n}", tokens=1000)
        made.first_token(f"{name}{n}")


def went(made: Stage) -> tuple[Choice, Why, str | None, str | None]:
    last = made.decisions[-1]
    return last.choice, last.why, last.prefill, last.decode


def test_an_idle_fleet_answers_on_one_worker_which_is_sooner() -> None:
    """No handoff, no step for the first token. There is nobody whose gaps it could stretch."""
    made = stage("p1", "d1")
    made.arrives("r", prompt(1000))
    assert went(made) == (Choice.COLOCATED, Why.DECODE_SOONER, None, "d1")


def test_a_long_prompt_does_not_go_where_it_would_stretch_gaps() -> None:
    made = stage("p1", "d1")
    busy(made, 1)
    made.arrives("r", prompt(3000))
    assert went(made) == (Choice.DISAGGREGATED, Why.PAIR_READY, "p1", "d1")


def test_a_long_prompt_goes_there_in_chunks_where_the_budget_keeps_the_objective() -> None:
    made = stage(facts("p1", budget=512), facts("d1", budget=512))
    busy(made, 1)
    made.arrives("a", prompt(3000))
    made.arrives("b", prompt(3000))
    assert {(each.choice, each.why) for each in made.decisions[-2:]} == {
        (Choice.DISAGGREGATED, Why.PAIR_READY),
        (Choice.COLOCATED, Why.DECODE_SOONER),
    }


def test_what_waits_for_prefill_may_be_read_beside_sooner() -> None:
    made = stage("p1", "d1")
    busy(made, 1)
    made.arrives("long", prompt(3000))
    made.arrives("short", prompt(300))
    assert went(made) == (Choice.COLOCATED, Why.DECODE_SOONER, None, "d1")


def test_a_short_one_may_go_before_a_long_one_that_waits() -> None:
    made = stage("p1", "d1")
    busy(made, 1)
    made.arrives("a", prompt(3000))
    made.arrives("b", prompt(3000))
    assert went(made)[0] is Choice.WAIT
    assert made.arrives("c", prompt(300)) == [do.SendWhole(request="c", attempt=1, worker="d1")]
    assert made.controller.waiting_requests() == 1


def test_one_at_a_time_is_read_beside_as_far_as_gaps_allow() -> None:
    made = stage("p1", "d1")
    busy(made, 1)
    made.arrives("long", prompt(3000))
    made.arrives("a", prompt(700))
    made.arrives("b", prompt(700))
    assert went(made)[:2] == (Choice.WAIT, Why.PREFILL_BUSY)


def test_room_for_the_answer_is_part_of_the_choice() -> None:
    """No decode worker has KV left: the one that reads it writes it, if that does not hold up its reading."""
    made = stage(facts("p1", budget=512), facts("d1", budget=512, kv=2400))
    busy(made, 1)
    made.arrives("r", prompt(1500))
    assert went(made) == (Choice.COLOCATED, Why.DECODE_FULL, None, "p1")


def test_a_prefill_worker_whose_steps_are_long_writes_nothing() -> None:
    made = stage(facts("p1", budget=8192), facts("d1", budget=8192, kv=2400))
    busy(made, 1)
    made.arrives("r", prompt(1500))
    assert went(made)[:2] == (Choice.WAIT, Why.DECODE_BUSY)


def test_one_that_changed_its_role_reads_in_its_old_answers_gaps() -> None:
    made = stage("p1", "d1", "d2")
    busy(made, 2)
    writes = next(name for name in ("d1", "d2") if made.worker(name).sequences)
    made.asks(writes, Role.PREFILL)
    made.arrives("x", prompt(3000))
    assert went(made)[2] == "p1"
    made.arrives("y", prompt(3000))
    assert went(made)[2:] != (writes, None)


def test_who_holds_the_beginning_reads_less() -> None:
    made = stage("p1", "p2", "d1")
    shared = RequestFacts(model="m", endpoint="chat", stream=True, prompt_chars=16_000, prefix=tuple(range(7)))
    busy(made, 1)
    made.arrives("a", shared)
    first = made.decisions[-1].prefill
    made.prefilled("a", tokens=4000)
    made.arrives("other", prompt(1000))
    made.arrives("b", shared)
    assert made.decisions[-1].prefill == first
    assert made.decisions[-1].cached_tokens == 7 * 512


def test_a_beginning_that_one_worker_holds_is_no_load_there() -> None:
    """All of it on the one that has read it before: only what is new counts as waiting."""
    made = stage("p1", "d1")
    shared = RequestFacts(model="m", endpoint="chat", stream=True, prompt_chars=16_000, prefix=tuple(range(7)))
    made.arrives("a", shared)
    assert went(made) == (Choice.COLOCATED, Why.DECODE_SOONER, None, "d1")
    made.first_token("a")
    made.arrives("b", shared)
    assert went(made) == (Choice.COLOCATED, Why.DECODE_SOONER, None, "d1")
    assert made.decisions[-1].cached_tokens == 7 * 512
    assert made.controller.cluster["d1"].prefill_tokens == 4000 - 7 * 512


def test_a_popular_beginning_does_not_pin_one_worker() -> None:
    made = stage("p1", "p2", "p3", "d1")
    shared = RequestFacts(model="m", endpoint="chat", stream=True, prompt_chars=8_000, prefix=(1,))
    busy(made, 1)
    chosen = set()
    for n in range(6):
        made.arrives(f"r{n}", shared)
        chosen.add(made.decisions[-1].prefill)
    assert len(chosen - {None}) == 3


def test_a_miss_goes_by_load_and_not_to_the_emptiest_cache() -> None:
    made = stage("p1", "p2", "d1")
    busy(made, 1)
    hot = RequestFacts(model="m", endpoint="chat", stream=True, prompt_chars=12_000, prefix=tuple(range(5)))
    made.arrives("a", hot)
    first = made.decisions[-1].prefill
    made.prefilled("a", tokens=3000)
    made.arrives("busy", prompt(2500))
    other = made.decisions[-1].prefill
    made.arrives("miss", RequestFacts(model="m", endpoint="chat", stream=True, prompt_chars=12_000, prefix=(77,)))
    assert made.decisions[-1].prefill == ({"p1", "p2"} - {other}).pop()
    assert first in ("p1", "p2")


def test_each_choice_tells_what_the_others_would_have_cost() -> None:
    made = stage("p1", "d1")
    made.arrives("r", prompt(1000))
    forecast = made.decisions[-1].forecast
    assert forecast is not None
    assert forecast.decode_s == pytest.approx(0.040, abs=1e-3)
    assert forecast.pair_s == pytest.approx(0.040 + 0.006 + 0.015, abs=2e-3)


def test_without_costs_the_least_loaded_is_chosen() -> None:
    made = Stage(facts("p1"), facts("d1"))
    made.arrives("r", prompt(1000))
    assert went(made) == (Choice.DISAGGREGATED, Why.PAIR_READY, "p1", "d1")
    assert made.decisions[-1].forecast is None


def test_an_engine_that_says_it_is_full_gets_nothing_while_that_is_fresh() -> None:
    made = stage("p1", "d1", "d2")
    made.tell(on.LoadReported(at=0.0, worker="d1", kv_used_ratio=1.0))
    made.arrives("r", prompt(1000))
    assert went(made)[3] == "d2"
    made.at = 60.0
    made.finishes("r", usage=Usage(prompt_tokens=1000, completion_tokens=2))
    made.arrives("s", prompt(1000))
    assert went(made)[3] == "d1"


def test_a_newcomer_is_not_buried_under_all_that_waits() -> None:
    """BS-15: it gets a window of prompts, as everybody does, and the rest can still choose."""
    made = stage("p1", "d1")
    busy(made, 1)
    for n in range(200):
        made.arrives(f"r{n}", prompt(3000))
    waiting = made.controller.waiting_requests()
    made.joins(facts("p2"))
    assert 1 <= waiting - made.controller.waiting_requests() <= 2
    assert made.worker("p2").prefill_tokens <= made.controller.rules.prefill_window_tokens + 3000
