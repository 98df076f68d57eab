"""The controller's record of one request."""

from twinpool.core.lifecycle import REQUEST_TABLE, RequestState, Story
from twinpool.core.model import Dialect, Leg, RequestFacts, WorkerFacts
from twinpool.core.policies import Pending


class Request:
    """A live request. `attempt` numbers its tries from 1; `strikes` counts those that an engine spoiled."""

    __slots__ = (
        "attempt",
        "avoid",
        "deadline",
        "decode",
        "dialect",
        "expires",
        "facts",
        "failed_handoffs",
        "id",
        "is_begun",
        "out",
        "prefill",
        "prompt_tokens",
        "shown_waiting",
        "story",
        "strikes",
    )

    def __init__(self, request: str, facts: RequestFacts, prompt_tokens: int, expires: float) -> None:
        self.id = request
        self.facts = facts
        self.prompt_tokens = prompt_tokens
        self.expires = expires  # the end of all attempts
        self.deadline = expires  # the end of the present wait
        self.story = Story(f"request {request}", REQUEST_TABLE, RequestState.NEW)
        self.attempt = 0
        self.strikes = 0
        self.failed_handoffs = 0
        self.avoid: frozenset[str] = frozenset()
        self.prefill: WorkerFacts | None = None
        self.decode: WorkerFacts | None = None  # also the one worker of a whole leg
        self.dialect: Dialect | None = None
        self.out: list[Leg] = []  # legs that were sent and have not ended
        self.shown_waiting = False
        self.is_begun = False  # the client has part of the answer

    def pending(self) -> Pending:
        return Pending(self.facts, self.prompt_tokens, self.avoid, self.is_begun, self.failed_handoffs)
