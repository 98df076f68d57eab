"""Who gets in, and who would be late."""

import pytest
from tests.core.stage import Stage, prompt, worker
from tests.policy.costs_of import PRIOR

from twinpool.assemble import build_controller
from twinpool.config import Objectives, Routing, RoutingPolicy
from twinpool.core import commands as do
from twinpool.core.decisions import Choice, Decision, Forecast, Why
from twinpool.core.law import Law
from twinpool.core.meters import ReadingSeen, WritingSeen
from twinpool.core.model import Failure, Leg
from twinpool.core.policies import Entrance
from twinpool.errors import Reason
from twinpool.policy.admission import bounded_queue, predicted_miss
from twinpool.policy.learning import Learning

LAW = Law(priors={"": PRIOR}, objectives=Objectives(slo_ttft_s=0.5))


@pytest.mark.parametrize(
    ("waiting", "is_draining", "answer"),
    [
        (0, False, None),
        (3, False, None),
        (4, False, Why.QUEUE_FULL),
        (5, False, Why.QUEUE_FULL),
        (0, True, Why.DRAINING),
        (9, True, Why.DRAINING),
    ],
)
def test_admission(waiting: int, is_draining: bool, answer: Why | None) -> None:
    assert bounded_queue(Routing(max_waiting=4))(prompt(), Entrance(waiting, is_draining)) is answer


FORECAST = Forecast(pair_s=0.4, decode_s=0.6, prefill_s=0.2)


@pytest.mark.parametrize(
    ("choice", "why", "waited_s", "late_s"),
    [
        (Choice.WAIT, Why.PREFILL_BUSY, 0.0, None),
        (Choice.WAIT, Why.PREFILL_BUSY, 0.1, None),
        (Choice.WAIT, Why.PREFILL_BUSY, 0.3, 0.2),
        (Choice.DISAGGREGATED, Why.PAIR_READY, 0.2, 0.1),
        (Choice.COLOCATED, Why.DECODE_SOONER, 0.0, 0.1),
        (Choice.COLOCATED, Why.DECODE_FULL, 0.2, None),
    ],
)
def test_late_is_what_the_chosen_way_would_miss(choice: Choice, why: Why, waited_s: float, late_s: float | None) -> None:
    learning = Learning(LAW)
    assert learning.is_known("any")
    found = predicted_miss(LAW, learning)(prompt(1000), 1000, waited_s, Decision(choice, why, forecast=FORECAST))
    assert found == pytest.approx(late_s)


def test_a_prompt_that_is_late_on_an_idle_worker_is_not_refused_for_it() -> None:
    learning = Learning(LAW)
    assert learning.is_known("any")
    late = predicted_miss(LAW, learning)
    long = Forecast(pair_s=5.0)
    assert late(prompt(20_000), 20_000, 0.0, Decision(Choice.WAIT, Why.PREFILL_BUSY, forecast=long)) is None
    assert late(prompt(1000), 1000, 0.0, Decision(Choice.WAIT, Why.PREFILL_BUSY, forecast=long)) == pytest.approx(4.5)


def test_who_does_not_know_does_not_refuse() -> None:
    late = predicted_miss(Law(), Learning(Law()))
    assert late(prompt(), 100, 99.0, Decision(Choice.WAIT, Why.PREFILL_BUSY)) is None
    assert late(prompt(), 100, 99.0, Decision(Choice.WAIT, Why.PREFILL_BUSY, forecast=Forecast(pair_s=9.0))) is None


def busy_stage(**rules: bool) -> Stage:
    """A pair that reads prompts of 4,000 tokens (0.16 s each, as far as is known), and writes already."""
    made = Stage()
    made.controller = build_controller(Routing(policy=RoutingPolicy.LEAST_COST, **rules), law=LAW)  # type: ignore[arg-type]
    for name in ("p1", "d1"):
        made.joins(worker(name, slots=256, budget_tokens=8192))
    made.arrives("writes", prompt(1000))
    made.first_token("writes")
    return made


def test_what_would_wait_too_long_is_refused_when_it_comes() -> None:
    made = busy_stage(refuse_late=True)
    answers = [made.arrives(f"r{n}", prompt(4000)) for n in range(8)]
    refused = do.FailRequest(request="r7", status=429, reason=Reason.WOULD_BE_LATE, retry_after_s=1)
    assert answers[7] == [refused]
    assert made.decisions[-1] == Decision(Choice.REFUSE, Why.LATE)
    assert answers[0] == [do.SendPrefill(request="r0", attempt=1, worker="p1")]
    assert 1 <= made.controller.waiting_requests() <= 3


def test_what_has_waited_too_long_leaves_the_queue_when_its_turn_comes() -> None:
    """The first prompt took longer than anybody had thought."""
    made = busy_stage(refuse_late=True)
    made.arrives("r0", prompt(4000))
    made.arrives("r1", prompt(4000))
    assert made.controller.waiting_requests() == 1
    made.at = 3.0
    assert do.FailRequest(request="r1", status=429, reason=Reason.WOULD_BE_LATE, retry_after_s=3) in made.prefilled("r0")
    assert made.controller.waiting_requests() == 0


@pytest.mark.parametrize("waiting", [1, 64, 65, 200])
def test_a_queue_of_them_is_looked_at_to_its_end(waiting: int) -> None:
    """However long it is: no event would come to look at those behind, and they would wait beside an idle worker."""
    made = Stage()
    rules = Routing(policy=RoutingPolicy.LEAST_COST, refuse_late=True)
    made.controller = build_controller(rules, law=LAW)
    made.joins(worker("c1", slots=1, budget_tokens=8192))
    made.loses("c1")
    for n in range(waiting):
        made.arrives(f"r{n}", prompt(1000))
    assert made.controller.waiting_requests() == waiting
    made.at = 3.0
    made.returns("c1")
    assert made.controller.waiting_requests() == 0
    assert sum(each.why is Why.LATE for each in made.decisions) == waiting


def test_nobody_is_refused_for_it_unless_that_was_asked_for() -> None:
    made = busy_stage()
    for n in range(8):
        made.arrives(f"r{n}", prompt(4000))
    assert Why.LATE not in {each.why for each in made.decisions}


def test_what_was_tried_is_tried_again_however_late() -> None:
    made = busy_stage(refuse_late=True)
    made.arrives("r0", prompt(4000))
    made.at = 5.0
    assert made.fails("r0", Leg.PREFILL, Failure.ERROR) == [do.SendPrefill(request="r0", attempt=2, worker="p1")]


def test_prompts_of_one_length_teach_when_to_refuse_them() -> None:
    """As a fleet learns that nobody has measured before: all its prompts take 0.4 s, and so it is known that one alone does."""
    learnt = Learning(Law())
    for n in range(40):
        learnt.read("k", ReadingSeen(1, 1, 4000, 16e6, 0.4 * (0.97 + 0.02 * (n % 4))))
        learnt.wrote("k", WritingSeen(1.0, 1.0, 4000.0, 0), 100)
    late = predicted_miss(LAW, learnt)
    behind_others = Decision(Choice.WAIT, Why.PREFILL_BUSY, forecast=Forecast(pair_s=0.8))
    assert learnt.costs.quickest_read(4000) == pytest.approx(0.4, rel=0.1)
    assert learnt.costs.quickest_read(1000) == pytest.approx(0.1, rel=0.2)
    assert late(prompt(4000), 4000, 0.0, behind_others) is not None
