"""The controller's record of one request, and of the handle one of its attempts may hold."""

from twinpool.core.lifecycle import (
    HANDLE_TABLE,
    REQUEST_TABLE,
    HandleState,
    RequestState,
    Story,
)
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
        self.avoid: frozenset[str] = frozenset()
        self.prefill: WorkerFacts | None = None
        self.decode: WorkerFacts | None = None  # also the one worker of a whole leg
        self.dialect: Dialect | None = None
        self.out: list[Leg] = []  # legs that were sent and have not ended
        self.shown_waiting = False
        self.is_begun = False  # the client has part of the answer

    def pending(self) -> Pending:
        return Pending(self.facts, self.prompt_tokens, self.avoid, self.is_begun)


class Handle:
    """What a prefill worker holds for one attempt. It can outlive the request, until released or its lease ends."""

    __slots__ = ("expires", "story", "worker")

    def __init__(self, request: str, attempt: int, worker: WorkerFacts, expires: float) -> None:
        self.worker = worker
        self.expires = expires
        self.story = Story(f"handle of {request}, attempt {attempt}", HANDLE_TABLE, HandleState.HELD)
