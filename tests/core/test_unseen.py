"""Answers that are not streamed teach too, though nobody tells when their prompt is read or their first token comes."""

import msgspec
import pytest
from tests.core.stage import Stage, prompt, worker
from tests.policy.costs_of import PRIOR

from twinpool.assemble import build_controller
from twinpool.config import Routing, RoutingPolicy
from twinpool.core import events as on
from twinpool.core.law import Law
from twinpool.core.model import Failure, Leg, RequestFacts, Usage
from twinpool.measure.timeline import Timeline


def whole(tokens: int = 1000, **fields: object) -> RequestFacts:
    return msgspec.structs.replace(prompt(tokens), stream=False, **fields)


def stage(*names: str, knows: bool = True) -> Stage:
    """1,000 tokens take 40 ms, as far as is known; or nothing is, and each request goes over the pair that there is."""
    made = Stage()
    rules = Routing(policy=RoutingPolicy.LEAST_COST if knows else RoutingPolicy.LEAST_LOADED)
    made.controller = build_controller(rules, law=Law(priors={"": PRIOR} if knows else {}))
    for name in names:
        made.joins(worker(name, slots=64, budget_tokens=8192))
    return made


def test_a_prompt_that_should_be_read_by_now_waits_no_more() -> None:
    made = stage("c1")
    made.arrives("r", whole())
    assert made.load("c1") == (1000, 1000, 1)
    assert made.controller.next_wakeup() == pytest.approx(0.04, rel=1e-4)
    made.waits(0.05)
    assert made.load("c1") == (0, 1000, 1)
    made.at = 0.5
    made.finishes("r", usage=Usage(1000, 40))
    assert made.load("c1") == (0, 0, 0)
    assert made.is_empty()


def test_the_second_waits_for_its_own_time() -> None:
    made = stage("c1")
    made.arrives("r", whole())
    made.at = 0.02
    made.arrives("s", whole())
    made.waits(0.025)
    assert made.load("c1")[0] == 1000
    made.waits(0.2)
    assert made.load("c1")[0] == 0


@pytest.mark.parametrize("ends", ["finishes", "fails", "leaves", "is removed"])
def test_before_or_after_that_it_is_given_back_once(ends: str) -> None:
    for after_s in (0.01, 0.2):
        made = stage("c1")
        made.arrives("r", whole())
        made.waits(after_s)
        if ends == "finishes":
            made.finishes("r")
        elif ends == "fails":
            made.fails("r", Leg.WHOLE, Failure.REJECTED)
        elif ends == "leaves":
            made.leaves("r")
        else:
            made.removes("c1")
            made.waits(1.0)
            made.finishes("r")
        assert made.is_empty()


def taught(made: Stage, answers: int, step_s: float, read_token_s: float, handoff_s: float | None) -> None:
    for n in range(answers):
        tokens, written = 200 + 100 * (n % 7), 10 + n % 30
        made.arrives(f"r{n}", whole(tokens))
        is_pair = handoff_s is not None
        if is_pair:
            made.at += tokens * read_token_s
            made.prefilled(f"r{n}", tokens=tokens)
            made.at += handoff_s or 0.0
        else:
            made.at += tokens * read_token_s
        made.at += written * step_s
        timeline = Timeline(arrived=0.0, ended=made.at, handoff_s=handoff_s)
        event = on.RequestFinished(at=made.at, request=f"r{n}", attempt=1, timeline=timeline, usage=Usage(tokens, written))
        made.tell(event)


@pytest.mark.parametrize(("names", "handoff_s"), [(("c1",), None), (("p1", "d1"), 0.25)])
def test_what_a_token_takes_is_learnt_from_them(names: tuple[str, ...], handoff_s: float | None) -> None:
    made = stage(*names, knows=False)
    taught(made, 200, step_s=0.02, read_token_s=1e-4, handoff_s=handoff_s)
    (costs,) = made.controller.learnt()[0].values()
    assert costs.step_s + costs.step_sequence_s == pytest.approx(0.02, rel=0.1)
    assert costs.read_token_s == pytest.approx(1e-4, rel=0.2)


def test_a_few_tokens_teach_nothing() -> None:
    made = stage("c1", knows=False)
    for n in range(60):
        made.arrives(f"r{n}", whole())
        made.at += 1.0
        made.finishes(f"r{n}", usage=Usage(1000, 3))
    assert made.controller.learnt()[0] == {}
