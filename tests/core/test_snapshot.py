"""A controller built from what another one knew goes on exactly as that one does."""

import json
from collections import deque
from collections.abc import Mapping
from functools import cache
from types import FunctionType, MethodType
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from tests.core.afternoon import busy_afternoon
from tests.core.anything import anything
from tests.core.stage import Stage, prompt, stock, worker
from tests.core.test_event_orders import NAMES, RULES, World

from twinpool import __version__
from twinpool.assemble import build_controller, replay
from twinpool.config import Routing
from twinpool.core import commands as do
from twinpool.core import events as on
from twinpool.core.controller import Controller
from twinpool.core.journal import Header, decode_header, encode_header, encode_step
from twinpool.core.lifecycle import MOVES_KEPT, WorkerState
from twinpool.core.model import Failure, Leg, Role, Usage
from twinpool.errors import UserError


def again(controller: Controller, rules: Routing = RULES) -> Controller:
    """Built from what the other knows, by way of a journal's header."""
    line = encode_header(Header(version=__version__, rules=rules, snapshot=controller.remember()))
    assert line.count(b"\n") == 1
    header = decode_header(line)
    assert header.snapshot is not msgspec.UNSET
    return build_controller(header.rules, header.snapshot)


def everything(thing: Any) -> Any:
    """All that an object holds, at any depth, whoever owns it; not what it can do."""
    if isinstance(thing, msgspec.Struct):
        return {name: everything(getattr(thing, name)) for name in thing.__struct_fields__}
    if isinstance(thing, Mapping):
        return [(everything(key), everything(value)) for key, value in thing.items() if not isinstance(key, type)]
    if isinstance(thing, tuple | list | deque):
        return [everything(item) for item in thing]
    if isinstance(thing, FunctionType | MethodType):
        return None
    if hasattr(thing, "__dict__") and not hasattr(type(thing), "__members__"):
        return {name: everything(value) for name, value in vars(thing).items()}
    return thing


class Twins:
    """A controller, and after `remember` another that was built from its memory and is told all that it is told."""

    def __init__(self, controller: Controller) -> None:
        self.first = controller
        self.second: Controller | None = None

    def remember(self) -> None:
        self.second = again(self.second or self.first)
        self.first.remember()  # forgets what it has only looked up
        assert everything(self.second) == everything(self.first)

    def handle(self, event: on.Event) -> list[do.Command]:
        commands = self.first.handle(event)
        if self.second is not None:
            assert self.second.handle(event) == commands
            assert self.second.next_wakeup() == self.first.next_wakeup()
            self.second.validate()
        return commands

    def __getattr__(self, name: str) -> Any:
        return getattr(self.first, name)


class RememberedWorld(World):
    """Any order of events, and at any moments snapshots, also of one that was built from a snapshot."""

    def __init__(self) -> None:
        super().__init__()
        self.twins = Twins(self.controller)
        self.controller = self.twins  # type: ignore[assignment]

    @rule()
    def is_remembered(self) -> None:
        self.twins.remember()

    def teardown(self) -> None:
        super().teardown()
        if self.twins.second is not None:
            assert everything(self.twins.second) == everything(self.twins.first)


RememberedWorld.TestCase.settings = settings(
    max_examples=300, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.timeout(400)
class TestRememberedWorld(RememberedWorld.TestCase):
    pass


@settings(max_examples=100, deadline=None)
@given(st.lists(anything(on.Event, NAMES), max_size=40), st.integers(0, 40))
def test_nonsense_is_remembered_too(events: list[on.Event], moment: int) -> None:
    twins = Twins(build_controller(RULES))
    for facts in (worker("p1"), worker("d1")):
        twins.handle(on.WorkerJoined(at=0.0, facts=facts))
    for n, event in enumerate(events):
        if n == moment:
            twins.remember()
        twins.handle(event)


@cache
def afternoon() -> Stage:
    return busy_afternoon(requests=400)


@pytest.mark.parametrize("moment", range(60, 1800, 173))
def test_a_busy_afternoon_goes_on_from_any_moment(moment: int) -> None:
    stage = afternoon()
    before = build_controller(Routing())
    for event in stage.events[:moment]:
        before.handle(event)
    after = again(before, Routing())
    assert bytes(after.remember()) == bytes(before.remember())
    assert [after.handle(event) for event in stage.events[moment:]] == stage.commands[moment:]
    assert everything(after) == everything(stage.controller)


@pytest.mark.parametrize("moment", range(60, 1800, 173))
def test_a_journal_that_begins_there_replays_on_its_own(moment: int) -> None:
    stage = afternoon()
    before = build_controller(Routing())
    for event in stage.events[:moment]:
        before.handle(event)
    header = encode_header(Header(version=__version__, rules=Routing(), snapshot=before.remember()))
    steps = [encode_step(*step) for step in zip(stage.events[moment:], stage.commands[moment:], strict=True)]
    result = replay([header, *steps])
    assert result.difference is None
    assert result.events == len(steps)
    other = build_controller(Routing())
    for event in stage.events[: moment - 30]:
        other.handle(event)
    stale = encode_header(Header(version=__version__, rules=Routing(), snapshot=other.remember()))
    assert replay([stale, *steps]).difference is not None, "a snapshot of another moment is noticed"


def full_stage() -> Stage:
    """Something of everything: two lanes that wait, a removed worker with a leg, a pause, a drain, an orphan, an estimate."""
    stage = Stage(worker("c1", slots=1), worker("c2", slots=1, continues=True), worker("d1"), worker("p1"), rules=RULES)
    stage.drains("c2")
    stage.arrives("pair")
    stage.prefilled("pair")
    stage.leaves("pair")
    stage.released("pair", freed=False)
    stage.arrives("goes on", prompt(400))
    stage.prefilled("goes on", tokens=777)
    stage.first_token("goes on")
    stage.arrives("removed")
    stage.fails("goes on", Leg.DECODE, Failure.BROKEN, can_continue=True)
    stage.removes("p1")
    stage.arrives("first", prompt(model="n"))
    stage.arrives("second", prompt(model="n"))
    stage.arrives("busy")
    stage.fails("busy", Leg.WHOLE, Failure.BUSY, retry_after_s=9.0)
    stage.gateway_drains()
    return stage


def test_something_of_everything_is_remembered() -> None:
    controller = full_stage().controller
    told = json.loads(bytes(controller.remember()))
    gone = [load["leg"] for load in told["cluster"]["loads"] if load["worker"] == "p1"]
    assert gone == [["removed", 1, "prefill"]]
    alone: dict[str, object] = {"is_shared": False, "due": [], "had": []}
    assert [["n", False], {"again": [], "queues": [["", ["first", "second"]]], **alone}] in told["waiting"]
    assert [["m", True], {"again": ["goes on"], "queues": [], **alone}] in told["waiting"]
    assert told["is_draining"] is True
    assert {w["facts"]["worker"]: w["story"]["state"] for w in told["cluster"]["workers"]}["c2"] == "draining"
    assert any(w.get("paused_until") for w in told["cluster"]["workers"])
    assert [handle["story"]["state"] for handle in told["handles"]] == ["orphaned"]
    assert told["prompt_lengths"]["ascii_tokens_per_char"] != 0.25
    assert everything(again(controller)) == everything(controller)


def test_nothing_is_remembered_of_what_a_worker_held_that_was_removed() -> None:
    stage = Stage(worker("c1"), rules=RULES)
    stage.arrives("r", msgspec.structs.replace(prompt(2000), prefix=(1, 2, 3)))
    stage.first_token("r")
    assert json.loads(bytes(stage.controller.remember()))["learnt"]["prefixes"]["held"] == {"c1": [1, 2, 3]}
    stage.removes("c1")
    stage.finishes("r", usage=Usage(2000, 16, 0))
    assert json.loads(bytes(stage.controller.remember()))["learnt"]["prefixes"] == {"held": {}, "came_true": {}}


def test_pairs_are_remembered_with_their_canaries_strikes_and_waits() -> None:
    """One is struck once, one is set aside, one has its canary under way, others are not yet due."""
    stage = Stage(*(stock(name) for name in ("d1", "d2", "p1", "p2")), rules=RULES)
    flown = {pair.canary: pair for pair in stage.controller.pairs() if pair.canary}
    first, second = sorted(flown)
    stage.proves(first, moved_bytes=5_000_000, moved_s=0.5)
    stage.fails_canary(second, why="it wrote something else")
    way = flown[first]
    stage.arrives("struck")
    stage.prefilled("struck")
    stage.fails("struck", Leg.DECODE, Failure.SUSPECT)
    assert stage.pair(way.prefill, way.decode).strikes == 1
    stage.waits(1)
    under_way = next(pair for pair in stage.controller.pairs() if pair.canary)
    stage.controller.validate()
    after = again(stage.controller)
    assert everything(after) == everything(stage.controller)
    after.validate()
    told = on.HandoffProved(at=stage.at + 1, canary=under_way.canary, took_s=0.2)
    assert after.handle(told) == stage.controller.handle(told)
    assert under_way.canary == 0
    for seconds in (2, 5, 9, 60, 600):
        woken = on.TimePassed(at=stage.at + seconds)
        assert after.handle(woken) == stage.controller.handle(woken)
    assert everything(after) == everything(stage.controller)


def test_a_removed_worker_that_is_back_has_its_legs_after_a_snapshot_too() -> None:
    controller = again(full_stage().controller)
    controller.handle(on.WorkerJoined(at=0.0, facts=worker("p1")))
    controller.validate()
    assert [key.request for key in controller.cluster.legs_on("p1")][:1] == ["removed"]
    assert controller.cluster["p1"].prefill_tokens >= 100


def test_a_snapshot_is_of_its_moment() -> None:
    """It is text: what the controller does later does not change it, and two built from it share nothing."""
    stage = full_stage()
    taken = stage.controller.remember()
    text = bytes(taken)
    one, other = build_controller(RULES, taken), build_controller(RULES, taken)
    for controller in (stage.controller, one):
        controller.handle(on.TimePassed(at=500.0))
        controller.handle(on.RoleAsked(at=500.0, worker="c1", role=Role.DECODE))
    assert bytes(taken) == text == bytes(other.remember())


def test_a_snapshot_has_no_word_of_a_prompt() -> None:
    told = json.loads(bytes(full_stage().controller.remember()))
    for request in told["requests"]:
        assert {name for name, value in request["facts"].items() if isinstance(value, str)} == {"model", "endpoint"}


def test_the_story_of_a_worker_that_comes_and_goes_does_not_grow() -> None:
    stage = Stage(worker("c1"))
    for _ in range(100):
        stage.loses("c1")
        stage.returns("c1")
    story = stage.worker("c1").story
    assert story.state is WorkerState.READY
    assert len(story.moves) == MOVES_KEPT
    assert story.moves[-2:] == ["lose", "return"]


@pytest.mark.parametrize(
    ("found", "put"),
    [
        (b'"is_draining":true', b'"is_draining":7'),
        (b'["first","second"]', b'["first","nobody"]'),
        (b'"ascii_tokens_per_char"', b'"unheard_of"'),
        (b'"state":"orphaned"', b'"state":"unheard of"'),
        (b'"story":', b'"tale":'),
        (b'"came_true"', b'"was_true"'),
    ],
)
def test_a_broken_snapshot_is_said_to_be_one(found: bytes, put: bytes) -> None:
    header = encode_header(Header(version=__version__, rules=RULES, snapshot=full_stage().controller.remember()))
    assert found in header
    with pytest.raises(UserError, match="the journal's snapshot is broken") as raised:
        replay([header.replace(found, put)])
    assert "\n" not in str(raised.value)
