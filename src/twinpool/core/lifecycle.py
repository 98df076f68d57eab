"""The lifecycles of a request, a handle, a worker and a pair: four tables, and the one function that moves along them.

A request whose legs run one after the other (nixl) goes prefilling > decoding; where both legs run at once (sglang) it is
paired. What a table does not have is a bug, and raises with the story so far. `docs/structure.md` draws the tables; a test
keeps the drawing true.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from twinpool.errors import IllegalMoveError

S = TypeVar("S", bound=StrEnum)
M = TypeVar("M", bound=StrEnum)


class RequestState(StrEnum):
    NEW = "new"
    WAITING = "waiting"  # in the router's queue; holds nothing
    PREFILLING = "prefilling"  # the prefill leg is out, room on D is reserved
    DECODING = "decoding"  # D was given the handle
    PAIRED = "paired"  # both legs are out at once
    SERVING = "serving"  # one worker does all
    STREAMING = "streaming"  # the client has the first token: nothing can be begun anew, at best gone on with
    FINISHED = "finished"
    REFUSED = "refused"
    FAILED = "failed"
    LEFT = "left"


class RequestMove(StrEnum):
    QUEUE = "queue"
    PREFILL = "prefill"
    HAND_OFF = "hand off"
    PAIR = "pair"
    SERVE = "serve"
    FIRST_TOKEN = "first token"  # noqa: S105 - a word of the table
    RETRY = "retry"
    RESUME = "resume"
    FINISH = "finish"
    REFUSE = "refuse"
    FAIL = "fail"
    LEAVE = "leave"


_R, _RM = RequestState, RequestMove

REQUEST_TABLE: Mapping[tuple[RequestState, RequestMove], RequestState] = {
    (_R.NEW, _RM.QUEUE): _R.WAITING,
    (_R.NEW, _RM.REFUSE): _R.REFUSED,
    (_R.WAITING, _RM.PREFILL): _R.PREFILLING,
    (_R.WAITING, _RM.PAIR): _R.PAIRED,
    (_R.WAITING, _RM.SERVE): _R.SERVING,
    (_R.WAITING, _RM.REFUSE): _R.REFUSED,
    (_R.WAITING, _RM.FAIL): _R.FAILED,
    (_R.WAITING, _RM.LEAVE): _R.LEFT,
    (_R.PREFILLING, _RM.HAND_OFF): _R.DECODING,
    (_R.PREFILLING, _RM.RETRY): _R.WAITING,
    (_R.PREFILLING, _RM.FAIL): _R.FAILED,
    (_R.PREFILLING, _RM.LEAVE): _R.LEFT,
    **{
        (state, move): target
        for state in (_R.DECODING, _R.PAIRED, _R.SERVING)
        for move, target in (
            (_RM.FIRST_TOKEN, _R.STREAMING),
            (_RM.RETRY, _R.WAITING),
            (_RM.FINISH, _R.FINISHED),
            (_RM.FAIL, _R.FAILED),
            (_RM.LEAVE, _R.LEFT),
        )
    },
    (_R.STREAMING, _RM.RESUME): _R.WAITING,
    (_R.STREAMING, _RM.FINISH): _R.FINISHED,
    (_R.STREAMING, _RM.FAIL): _R.FAILED,
    (_R.STREAMING, _RM.LEAVE): _R.LEFT,
}

ENDS = frozenset({_R.FINISHED, _R.REFUSED, _R.FAILED, _R.LEFT})
"""A request in one of these holds nothing any more."""


class HandleState(StrEnum):
    HELD = "held"  # P keeps the KV, D was not told yet; within one event
    SENT = "sent"  # D was told; whether it has read is not known
    RELEASING = "releasing"
    ORPHANED = "orphaned"  # nobody will read it: its lease must end it
    SPENT = "spent"
    FREED = "freed"
    EXPIRED = "expired"


class HandleMove(StrEnum):
    SEND = "send"
    READ = "read"
    RELEASE = "release"
    CONFIRM = "confirm"
    LOSE = "lose"
    EXPIRE = "expire"


_H, _HM = HandleState, HandleMove

HANDLE_TABLE: Mapping[tuple[HandleState, HandleMove], HandleState] = {
    (_H.HELD, _HM.SEND): _H.SENT,
    (_H.HELD, _HM.RELEASE): _H.RELEASING,
    (_H.SENT, _HM.READ): _H.SPENT,
    (_H.SENT, _HM.RELEASE): _H.RELEASING,
    (_H.RELEASING, _HM.CONFIRM): _H.FREED,
    (_H.RELEASING, _HM.LOSE): _H.ORPHANED,
    (_H.ORPHANED, _HM.EXPIRE): _H.EXPIRED,
    # the worker restarted: its memory is gone, and the handle with it
    (_H.SENT, _HM.EXPIRE): _H.EXPIRED,
    (_H.RELEASING, _HM.EXPIRE): _H.EXPIRED,
}

HANDLE_ENDS = frozenset({_H.SPENT, _H.FREED, _H.EXPIRED})


class WorkerState(StrEnum):
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, gets nothing new
    LOST = "lost"  # does not answer; probed until it does


class WorkerMove(StrEnum):
    DRAIN = "drain"
    LOSE = "lose"
    RETURN = "return"


_W, _WM = WorkerState, WorkerMove

WORKER_TABLE: Mapping[tuple[WorkerState, WorkerMove], WorkerState] = {
    (_W.READY, _WM.DRAIN): _W.DRAINING,
    (_W.READY, _WM.LOSE): _W.LOST,
    (_W.DRAINING, _WM.LOSE): _W.LOST,
    (_W.LOST, _WM.RETURN): _W.READY,
}


class PairState(StrEnum):
    UNPROVED = "unproved"  # nobody has seen a handoff arrive: nothing goes this way yet
    PROVED = "proved"
    ASIDE = "aside"  # a handoff went wrong, or several: nothing goes this way until a canary arrives


class PairMove(StrEnum):
    PROVE = "prove"
    DOUBT = "doubt"


_P, _PM = PairState, PairMove

PAIR_TABLE: Mapping[tuple[PairState, PairMove], PairState] = {
    (_P.UNPROVED, _PM.PROVE): _P.PROVED,
    (_P.UNPROVED, _PM.DOUBT): _P.ASIDE,
    (_P.PROVED, _PM.PROVE): _P.PROVED,
    (_P.PROVED, _PM.DOUBT): _P.ASIDE,
    (_P.ASIDE, _PM.PROVE): _P.PROVED,
    (_P.ASIDE, _PM.DOUBT): _P.ASIDE,
}


MOVES_KEPT = 32
"""Of one story: more than any request needs that is not being retried for minutes; a worker's goes on for ever."""


class Story(msgspec.Struct, Generic[S, M], eq=False):
    """A state that moves only as its table allows, and remembers how it came where it is (its last moves)."""

    what: str
    state: S
    moves: list[M] = []

    table: ClassVar[Mapping[Any, Any]]

    def move(self, move: M) -> S:
        """Make the move and return the new state; raises `IllegalMoveError` where the table has no such move."""
        target: S | None = self.table.get((self.state, move))
        if target is None:
            raise IllegalMoveError(self.what, self.state, move, tuple(self.moves))
        moves = self.moves
        moves.append(move)
        if len(moves) > MOVES_KEPT:
            del moves[0]
        self.state = target
        return target

    def can(self, move: M) -> bool:
        return (self.state, move) in self.table


class RequestStory(Story[RequestState, RequestMove], eq=False):
    table: ClassVar[Mapping[Any, Any]] = REQUEST_TABLE


class HandleStory(Story[HandleState, HandleMove], eq=False):
    table: ClassVar[Mapping[Any, Any]] = HANDLE_TABLE


class WorkerStory(Story[WorkerState, WorkerMove], eq=False):
    table: ClassVar[Mapping[Any, Any]] = WORKER_TABLE


class PairStory(Story[PairState, PairMove], eq=False):
    table: ClassVar[Mapping[Any, Any]] = PAIR_TABLE
