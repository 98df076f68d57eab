"""One request on each path, from its arrival to its end: the commands, the decision, the load, the handle."""

from tests.core.stage import Stage, prompt, worker

from twinpool.core.cluster import LegKey
from twinpool.core.commands import RecordDecision, SendDecode, SendPrefill, SendWhole
from twinpool.core.decisions import Choice, Decision, Why
from twinpool.core.lifecycle import HandleState
from twinpool.core.model import Dialect, Leg, Usage


def test_nixl_sends_one_leg_after_the_other() -> None:
    stage = Stage(worker("p1"), worker("d1"))
    assert stage.arrives("r") == [SendPrefill(request="r", attempt=1, worker="p1")]
    assert stage.prefilled("r") == [SendDecode(request="r", attempt=1, worker="d1", prefill_worker="p1")]
    assert stage.handles == {HandleState.SENT: 1}
    assert stage.first_token("r") == []
    assert stage.handles == {}
    assert stage.finishes("r") == []
    assert stage.is_empty()


def test_nixl_reserves_room_on_decode_before_prefill_starts() -> None:
    stage = Stage(worker("p1"), worker("d1"))
    stage.arrives("r", prompt(300))
    assert stage.load("p1") == (300, 0, 1)
    assert stage.load("d1") == (0, 300, 1)
    stage.prefilled("r")
    assert stage.load("p1") == (0, 0, 0)
    assert stage.load("d1") == (0, 300, 1)
    stage.first_token("r")
    assert stage.load("d1") == (0, 300, 1)


def test_sglang_sends_both_legs_at_once() -> None:
    stage = Stage(worker("p1", dialect=Dialect.SGLANG), worker("d1", dialect=Dialect.SGLANG))
    assert stage.arrives("r") == [
        SendPrefill(request="r", attempt=1, worker="p1"),
        SendDecode(request="r", attempt=1, worker="d1", prefill_worker="p1"),
    ]
    assert stage.prefilled("r") == []
    assert stage.load("p1") == (0, 0, 0)
    assert stage.handles == {}
    assert stage.first_token("r") == []
    assert stage.finishes("r") == []
    assert stage.is_empty()


def test_sglang_prefill_may_answer_after_the_first_token() -> None:
    stage = Stage(worker("p1", dialect=Dialect.SGLANG), worker("d1", dialect=Dialect.SGLANG))
    stage.arrives("r")
    stage.first_token("r")
    assert stage.load("p1") == (100, 0, 1)
    assert stage.prefilled("r") == []
    assert stage.load("p1") == (0, 0, 0)
    stage.finishes("r")
    assert stage.is_empty()


def test_one_worker_does_all_where_there_is_no_pair() -> None:
    stage = Stage(worker("c1"))
    assert stage.arrives("r") == [SendWhole(request="r", attempt=1, worker="c1")]
    assert stage.load("c1") == (100, 100, 1)
    assert stage.first_token("r") == []
    assert stage.load("c1") == (0, 100, 1), "read: only its sequence and its KV weigh on"
    assert stage.finishes("r") == []
    assert stage.is_empty()


def test_several_answers_count_as_several_sequences() -> None:
    stage = Stage(worker("c1"))
    stage.arrives("r", prompt(50, sequences=3, obstacle=Why.N_CHOICES))
    assert stage.load("c1") == (50, 150, 3)


def test_an_answer_that_is_not_streamed_finishes_without_a_first_token() -> None:
    stage = Stage(worker("p1"), worker("d1"))
    stage.arrives("r")
    stage.prefilled("r")
    assert stage.finishes("r") == []
    assert stage.is_empty()


def test_every_choice_is_recorded_with_its_reason() -> None:
    stage = Stage(worker("p1"), worker("d1"))
    stage.arrives("r")
    assert stage.commands[-1] == [
        RecordDecision(
            request="r",
            attempt=1,
            decision=Decision(Choice.DISAGGREGATED, Why.PAIR_READY, prefill="p1", decode="d1"),
        ),
        SendPrefill(request="r", attempt=1, worker="p1"),
    ]


def test_pools_of_two_models_do_not_mix() -> None:
    stage = Stage(worker("c1", models=("m",)), worker("c2", models=("other", "other-lora")))
    assert stage.arrives("r", prompt(model="other-lora")) == [SendWhole(request="r", attempt=1, worker="c2")]


def test_stale_news_changes_nothing() -> None:
    stage = Stage(worker("p1"), worker("d1"))
    stage.arrives("r")
    assert stage.prefilled("r", attempt=7) == []
    assert stage.first_token("r") == [], "no decode leg is out"
    assert stage.finishes("r") == []
    assert stage.prefilled("unknown", attempt=1) == []
    stage.prefilled("r")
    assert stage.prefilled("r") == [], "said twice"
    stage.finishes("r")
    assert stage.finishes("r") == []
    assert stage.leaves("r") == []
    assert stage.is_empty()


def test_a_request_that_arrives_twice_arrived_once() -> None:
    stage = Stage(worker("c1"))
    stage.arrives("r")
    assert stage.arrives("r") == []
    assert stage.load("c1") == (100, 100, 1)
    stage.finishes("r")
    assert stage.is_empty()


def test_the_length_of_prompts_is_learnt_from_what_engines_count() -> None:
    stage = Stage(worker("p1"), worker("d1"))
    for n in range(200):
        stage.arrives(f"r{n}", prompt(1000))
        stage.prefilled(f"r{n}", tokens=2000)
        stage.finishes(f"r{n}")
    stage.arrives("r", prompt(1000))
    assert 1950 < stage.load("p1")[0] <= 2000
    assert stage.controller.cluster.holds(LegKey("r", 1, Leg.PREFILL))


def test_an_engine_that_did_not_count_teaches_nothing() -> None:
    stage = Stage(worker("p1"), worker("d1"))
    stage.arrives("r", prompt(1000))
    stage.prefilled("r", tokens=0)
    stage.finishes("r", usage=Usage(prompt_tokens=0, completion_tokens=3))
    stage.arrives("next", prompt(1000))
    assert stage.load("p1")[0] == 1000
