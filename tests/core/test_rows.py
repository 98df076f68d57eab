"""Every row of the four lifecycle tables happens, through the controller's events alone, and nothing else can."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.core.stage import Stage, prompt, stock, worker

from twinpool.config import Routing
from twinpool.core.decisions import Why
from twinpool.core.lifecycle import (
    ENDS,
    HANDLE_ENDS,
    HANDLE_TABLE,
    PAIR_TABLE,
    REQUEST_TABLE,
    WORKER_TABLE,
    HandleMove,
    HandleState,
    PairMove,
    PairState,
    RequestMove,
    RequestState,
    RequestStory,
    Story,
    WorkerMove,
    WorkerState,
    WorkerStory,
)
from twinpool.core.model import Dialect, Failure, Leg, Role
from twinpool.errors import IllegalMoveError

R, RM = RequestState, RequestMove
H, HM = HandleState, HandleMove
W, WM = WorkerState, WorkerMove
P, PM = PairState, PairMove


def pair() -> Stage:
    return Stage(worker("p1"), worker("d1"))


def sglang_pair() -> Stage:
    return Stage(worker("p1", dialect=Dialect.SGLANG), worker("d1", dialect=Dialect.SGLANG))


def prefilling() -> Stage:
    stage = pair()
    stage.arrives("r")
    return stage


def decoding() -> Stage:
    stage = prefilling()
    stage.prefilled("r")
    return stage


def paired() -> Stage:
    stage = sglang_pair()
    stage.arrives("r")
    return stage


def serving() -> Stage:
    stage = Stage(worker("c1"))
    stage.arrives("r")
    return stage


def streaming() -> Stage:
    stage = decoding()
    stage.first_token("r")
    return stage


def waiting(stage: Stage | None = None) -> Stage:
    stage = stage or Stage()
    stage.arrives("r")
    return stage


def late() -> Stage:
    """A request that was begun and is in the queue again when its own time is over."""
    stage = Stage(worker("c1"), rules=Routing(request_timeout_s=5.0))
    stage.arrives("r")
    stage.fails("r", Leg.WHOLE, Failure.UNREACHABLE)
    return stage


def releasing() -> Stage:
    stage = decoding()
    stage.leaves("r")
    return stage


def orphaned() -> Stage:
    stage = releasing()
    stage.released("r", freed=False)
    return stage


def held_without_decode() -> Stage:
    stage = prefilling()
    stage.loses("d1")
    return stage


def unproved() -> Stage:
    """One pair, whose canary is on its way."""
    return Stage(stock("p1", allowed_roles=(Role.PREFILL,)), stock("d1", allowed_roles=(Role.DECODE,)))


def proved() -> Stage:
    """Its second canary is on its way."""
    stage = unproved()
    stage.proves(1)
    stage.waits(61)
    return stage


def aside() -> Stage:
    """The same."""
    stage = unproved()
    stage.fails_canary(1)
    stage.waits(2)
    return stage


Step = tuple[Callable[[], Stage], Callable[[Stage], object]]

REQUEST_ROWS: dict[tuple[RequestState, RequestMove], Step] = {
    (R.NEW, RM.QUEUE): (pair, lambda s: s.arrives("r")),
    (R.NEW, RM.REFUSE): (lambda: Stage(rules=Routing(max_waiting=0)), lambda s: s.arrives("r")),
    (R.WAITING, RM.PREFILL): (waiting, lambda s: (s.joins(worker("d1", serves_whole=False)), s.joins(worker("p1")))),
    (R.WAITING, RM.PAIR): (sglang_pair, lambda s: s.arrives("r")),
    (R.WAITING, RM.SERVE): (waiting, lambda s: s.joins(worker("c1"))),
    (R.WAITING, RM.REFUSE): (waiting, lambda s: s.waits(60)),
    (R.WAITING, RM.FAIL): (late, lambda s: s.waits(60)),
    (R.WAITING, RM.LEAVE): (waiting, lambda s: s.leaves("r")),
    (R.PREFILLING, RM.HAND_OFF): (prefilling, lambda s: s.prefilled("r")),
    (R.PREFILLING, RM.RETRY): (prefilling, lambda s: s.fails("r", Leg.PREFILL, Failure.ERROR)),
    (R.PREFILLING, RM.FAIL): (prefilling, lambda s: s.fails("r", Leg.PREFILL, Failure.REJECTED)),
    (R.PREFILLING, RM.LEAVE): (prefilling, lambda s: s.leaves("r")),
    (R.DECODING, RM.FIRST_TOKEN): (decoding, lambda s: s.first_token("r")),
    (R.DECODING, RM.RETRY): (decoding, lambda s: s.fails("r", Leg.DECODE, Failure.HANDLE_REFUSED)),
    (R.DECODING, RM.FINISH): (decoding, lambda s: s.finishes("r")),
    (R.DECODING, RM.FAIL): (decoding, lambda s: s.fails("r", Leg.DECODE, Failure.REJECTED)),
    (R.DECODING, RM.LEAVE): (decoding, lambda s: s.leaves("r")),
    (R.PAIRED, RM.FIRST_TOKEN): (paired, lambda s: s.first_token("r")),
    (R.PAIRED, RM.RETRY): (paired, lambda s: s.fails("r", Leg.PREFILL, Failure.BROKEN)),
    (R.PAIRED, RM.FINISH): (paired, lambda s: s.finishes("r")),
    (R.PAIRED, RM.FAIL): (paired, lambda s: s.fails("r", Leg.PREFILL, Failure.REJECTED)),
    (R.PAIRED, RM.LEAVE): (paired, lambda s: s.leaves("r")),
    (R.SERVING, RM.FIRST_TOKEN): (serving, lambda s: s.first_token("r")),
    (R.SERVING, RM.RETRY): (serving, lambda s: s.fails("r", Leg.WHOLE, Failure.BUSY)),
    (R.SERVING, RM.FINISH): (serving, lambda s: s.finishes("r")),
    (R.SERVING, RM.FAIL): (serving, lambda s: s.fails("r", Leg.WHOLE, Failure.REJECTED)),
    (R.SERVING, RM.LEAVE): (serving, lambda s: s.leaves("r")),
    (R.STREAMING, RM.FINISH): (streaming, lambda s: s.finishes("r")),
    (R.STREAMING, RM.RESUME): (streaming, lambda s: s.fails("r", Leg.DECODE, Failure.BROKEN, can_continue=True)),
    (R.STREAMING, RM.FAIL): (streaming, lambda s: s.fails("r", Leg.DECODE, Failure.BROKEN)),
    (R.STREAMING, RM.LEAVE): (streaming, lambda s: s.leaves("r")),
}

HANDLE_ROWS: dict[tuple[HandleState, HandleMove], Step] = {
    (H.HELD, HM.SEND): (prefilling, lambda s: s.prefilled("r")),
    (H.HELD, HM.RELEASE): (held_without_decode, lambda s: s.prefilled("r")),
    (H.SENT, HM.READ): (decoding, lambda s: s.first_token("r")),
    (H.SENT, HM.RELEASE): (decoding, lambda s: s.leaves("r")),
    (H.SENT, HM.EXPIRE): (decoding, lambda s: s.restarts("p1")),
    (H.RELEASING, HM.CONFIRM): (releasing, lambda s: s.released("r", freed=True)),
    (H.RELEASING, HM.LOSE): (releasing, lambda s: s.released("r", freed=False)),
    (H.RELEASING, HM.EXPIRE): (releasing, lambda s: s.restarts("p1")),
    (H.ORPHANED, HM.EXPIRE): (orphaned, lambda s: s.waits(30)),
}

WORKER_ROWS: dict[tuple[WorkerState, WorkerMove], Step] = {
    (W.READY, WM.DRAIN): (pair, lambda s: s.drains("p1")),
    (W.READY, WM.LOSE): (pair, lambda s: s.loses("p1")),
    (W.DRAINING, WM.LOSE): (pair, lambda s: (s.drains("p1"), s.loses("p1"))),
    (W.LOST, WM.RETURN): (pair, lambda s: (s.loses("p1"), s.returns("p1"))),
}

PAIR_ROWS: dict[tuple[PairState, PairMove], Step] = {
    (P.UNPROVED, PM.PROVE): (unproved, lambda s: s.proves(1)),
    (P.UNPROVED, PM.DOUBT): (unproved, lambda s: s.fails_canary(1)),
    (P.PROVED, PM.PROVE): (proved, lambda s: s.proves(2)),
    (P.PROVED, PM.DOUBT): (proved, lambda s: s.fails_canary(2)),
    (P.ASIDE, PM.PROVE): (aside, lambda s: s.proves(2)),
    (P.ASIDE, PM.DOUBT): (aside, lambda s: s.fails_canary(2)),
}

ROWS = {**REQUEST_ROWS, **HANDLE_ROWS, **WORKER_ROWS, **PAIR_ROWS}
TABLES = {**REQUEST_TABLE, **HANDLE_TABLE, **WORKER_TABLE, **PAIR_TABLE}


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any, Any]]:
    """Every move that any lifecycle makes: from, move, to."""
    made: list[tuple[Any, Any, Any]] = []
    really_move = Story.move

    def move(story: Story, move: Any) -> Any:
        before = story.state
        after = really_move(story, move)
        made.append((before, move, after))
        return after

    monkeypatch.setattr(Story, "move", move)
    return made


def test_there_is_a_story_for_each_row() -> None:
    assert set(REQUEST_ROWS) == set(REQUEST_TABLE)
    assert set(HANDLE_ROWS) == set(HANDLE_TABLE)
    assert set(WORKER_ROWS) == set(WORKER_TABLE)
    assert set(PAIR_ROWS) == set(PAIR_TABLE)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{type(row[0]).__name__}-{row[0]}-{row[1]}".replace(" ", "_"))
def test_each_row_happens(row: tuple[Any, Any], moves: list[tuple[Any, Any, Any]]) -> None:
    set_up, step = ROWS[row]
    stage = set_up()
    moves.clear()
    step(stage)
    assert (*row, TABLES[row]) in moves


@pytest.mark.parametrize(
    ("table", "start", "ends"),
    [
        (REQUEST_TABLE, R.NEW, ENDS),
        (HANDLE_TABLE, H.HELD, HANDLE_ENDS),
        (WORKER_TABLE, W.READY, frozenset()),
        (PAIR_TABLE, P.UNPROVED, frozenset()),
    ],
)
def test_every_state_is_reached_and_only_ends_have_no_way_out(table: Any, start: Any, ends: frozenset[Any]) -> None:
    states = set(type(start))
    assert set(table.values()) | {start} == states
    assert states - {state for state, _ in table} == ends


def test_an_illegal_move_raises_and_carries_the_story() -> None:
    story = RequestStory("request r7", R.NEW)
    story.move(RM.QUEUE)
    story.move(RM.PREFILL)
    with pytest.raises(IllegalMoveError) as raised:
        story.move(RM.FINISH)
    assert str(raised.value) == "request r7 is prefilling: no move 'finish' from there; so far: queue > prefill"
    assert story.state is R.PREFILLING


def test_a_story_without_moves_says_so() -> None:
    with pytest.raises(IllegalMoveError, match="so far: nothing"):
        WorkerStory("worker p1", W.READY).move(WM.RETURN)


@pytest.mark.parametrize("why", [Why.N_CHOICES, Why.PROMPT_LIST])
def test_what_cannot_be_handed_over_is_served_by_one_worker(why: Why) -> None:
    stage = pair()
    stage.arrives("r", prompt(obstacle=why))
    assert stage.decisions[-1].why is why
    assert stage.decisions[-1].prefill is None
