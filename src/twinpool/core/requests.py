"""The controller's record of one request."""

import msgspec

from twinpool.core.cluster import LegKey
from twinpool.core.lifecycle import RequestState, RequestStory
from twinpool.core.meters import Mark
from twinpool.core.model import Dialect, Incarnation, Leg, RequestFacts
from twinpool.core.policies import Pending


class Request(msgspec.Struct, eq=False, omit_defaults=True):
    """A live request. `attempt` numbers its tries from 1; `strikes` counts those that an engine spoiled."""

    id: str
    facts: RequestFacts
    prompt_tokens: int
    expires: float  # the end of all attempts
    deadline: float  # the end of the present wait
    story: RequestStory
    turn: float  # its place among those of its tenant: when it came, or earlier by its priority
    attempt: int = 0
    strikes: int = 0
    failed_handoffs: int = 0
    sent_at: float | None = None  # this attempt's prefill leg: no lease on its KV can have begun before
    counted_tokens: int | None = None  # of the prompt, by the engine that prefilled it in this attempt
    avoid: frozenset[str] = frozenset()
    prefill: Incarnation | None = None
    decode: Incarnation | None = None  # also the one worker of a whole leg
    dialect: Dialect | None = None
    out: list[Leg] = []  # legs that were sent and have not ended
    waits_since: float = 0.0  # the beginning of the present wait
    is_again: bool = False  # it waits after an attempt, before all whose first wait it is
    shown_waiting: bool = False
    is_begun: bool = False  # the client has part of the answer
    cached_tokens: int = 0  # of the prompt, that its reading worker should hold already
    held_tokens: int = 0  # of the prompt, that its worker was thought to hold when it read it
    mark: Mark | None = None  # where its worker's sums stood at its first token

    @classmethod
    def arrived(cls, request: str, facts: RequestFacts, prompt_tokens: int, *, expires: float, turn: float) -> "Request":
        story = RequestStory(f"request {request}", RequestState.NEW)
        return cls(request, facts, prompt_tokens, expires, expires, story, turn)

    def pending(self, at: float, ahead_tokens: int = 0) -> Pending:
        return Pending(self.facts, self.prompt_tokens, self.avoid, self.is_begun, self.failed_handoffs, at, ahead_tokens)

    def key(self, leg: Leg) -> LegKey:
        return LegKey(self.id, self.attempt, leg)

    def engines(self) -> tuple[Incarnation, Incarnation]:
        """The two that this attempt is for; raises `ValueError` where one engine does all of it."""
        if self.prefill is None or self.decode is None:
            raise ValueError(f"{self.id} has no pair")
        return self.prefill, self.decode
