"""The shape of the policies that the controller asks. They live in `twinpool.policy`; `twinpool.assemble` brings them here.

Policies propose and give a reason; the controller disposes. Each is a plain function of what it is shown.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from twinpool.core.cluster import WorkerView
from twinpool.core.decisions import Balanced, Decision, Why
from twinpool.core.law import CostPrior
from twinpool.core.meters import ReadingSeen, WritingSeen
from twinpool.core.model import RequestFacts, Usage


class Pending(msgspec.Struct, frozen=True, gc=False):
    """A request that must be routed. `avoid` has the workers on which it failed already: better not, but rather than none.
    One that `must_continue` has begun its answer, and only a worker that can go on with it may write the rest. Those that wait
    before it have `ahead_tokens` of prompts."""

    facts: RequestFacts
    prompt_tokens: int
    avoid: frozenset[str] = frozenset()
    must_continue: bool = False
    failed_handoffs: int = 0
    at: float = 0.0
    ahead_tokens: int = 0


class Entrance(msgspec.Struct, frozen=True, gc=False):
    """What admission may see."""

    waiting: int
    is_draining: bool


Admit = Callable[[RequestFacts, Entrance], Why | None]
"""None lets the request in; a reason refuses it."""

Late = Callable[[RequestFacts, int, float, Decision], float | None]
"""By how many seconds a request would miss its objective, given the tokens of its prompt, how long it has waited, and what
routing would do with it; None where it would not, or nobody can tell."""

Route = Callable[[Pending, Sequence[WorkerView]], Decision]
"""One of the ways to go, given the workers that are there, in the order of their ids. One that is paused gets nothing."""

PickDecode = Callable[[Pending, WorkerView, Sequence[WorkerView]], str | None]
"""Another decode worker for a prompt that stands prefilled on a worker; None where there is none with room."""


class PromptLengths(Protocol):
    """Guesses a prompt's tokens before any engine has counted them, and learns from those that have. `error_ratio`: the mean
    relative error of recent guesses."""

    @property
    def error_ratio(self) -> float: ...
    def tokens(self, facts: RequestFacts) -> int: ...
    def learn(self, facts: RequestFacts, prompt_tokens: int) -> None: ...
    def remember(self) -> dict[str, float]:
        """What it has learnt, for a snapshot."""

    def recall(self, learnt: Mapping[str, float]) -> None:
        """Know what another one had learnt."""


class PoolView(NamedTuple):
    """What balance may see: the workers that are well, in the order of their ids; how many requests wait, and with how many
    prompt tokens."""

    at: float
    workers: Sequence[WorkerView]
    waiting: int
    waiting_tokens: int


Balance = Callable[[PoolView, float], Balanced]
"""The second argument: when the last role was changed."""


class Learner(Protocol):
    """What the policies keep in mind of what they saw: costs by kind of worker, what is asked for, who holds which
    beginnings."""

    def is_known(self, kind: str) -> bool:
        """Whether its costs are."""

    def errors(self) -> dict[str, dict[str, float]]:
        """The mean relative error of recent predictions of costs, by kind of worker and by what was predicted."""

    def arrived(self, at: float, facts: RequestFacts, prompt_tokens: int) -> None: ...
    def finished(self, facts: RequestFacts, usage: Usage) -> None: ...
    def read(self, kind: str, seen: ReadingSeen) -> None: ...
    def wrote(self, kind: str, seen: WritingSeen, steps: int) -> None: ...
    def handed_over(self, kind: str, tokens: int, seconds: float) -> None: ...
    def holds(self, worker: str, prefix: tuple[int, ...], room_tokens: float | None) -> None:
        """It has this beginning of a prompt, and so much room for KV beside what runs there; None where that is not known."""

    def reused(self, unread: int, cached: int) -> None:
        """Of a prompt that others may share, so many tokens were read, and so many need not be."""

    def held(self, worker: str, prefix: tuple[int, ...], prompt_tokens: int) -> int:
        """Tokens of a prompt with this beginning that it should hold, by what it was given to read alone."""

    def told(self, worker: str, held_tokens: int, cached_tokens: int) -> None:
        """Of a prompt of which it was thought to hold so many tokens, its engine had so many in its cache."""

    def forget(self, worker: str) -> None:
        """Its engine is gone, and what it held."""

    def priors(self) -> dict[str, CostPrior]:
        """What it has learnt of costs by kind of worker, for another one to start from."""

    def remember(self) -> msgspec.Raw:
        """All of it, for a snapshot."""

    def recall(self, learnt: msgspec.Raw) -> None: ...


class Policies(NamedTuple):
    admit: Admit
    late: Late
    route: Route
    pick_decode: PickDecode
    prompt_lengths: PromptLengths
    learner: Learner
    balance: Balance
