"""One sequence on one engine: a prompt to read, an answer to write, or both."""

from enum import IntEnum
from typing import Any

from twinpool.core.model import Leg
from twinpool.sim.stream_gaps import StreamGaps
from twinpool.workload.offered import Offered


class Place(IntEnum):
    """Where a sequence stands on its engine."""

    SENT = 0  # on its way: the engine does not have it yet
    WAITING = 1  # for its prompt to be read; holds nothing
    READING = 2  # holds KV for its prompt
    ARRIVING = 3  # a handed-over one; waits for room, holds nothing
    COMING = 4  # its KV is on the way, into room it holds
    READY = 5  # its KV is there; joins the batch at the next step
    RUNNING = 6
    HELD = 7  # read for another engine, which has not fetched it yet
    GONE = 8


class Sequence:
    """`target_tokens` must be read before the next token: the prompt, and after a preemption what was written too.

    A prefill leg writes one token, which nobody sees. `request` is whatever the driver wants back. `written` counts tokens of
    this leg, `output_tokens` is how many there will be."""

    __slots__ = (
        "cached_tokens",
        "ends_at_step",
        "expires",
        "gaps",
        "is_begun",
        "is_long",
        "joined_step",
        "joined_tokens",
        "last_token_at",
        "leg",
        "output_tokens",
        "place",
        "prefix",
        "prompt_tokens",
        "read_tokens",
        "request",
        "target_tokens",
        "written",
    )

    def __init__(self, request: Any, leg: Leg, offered: Offered, *, written: int = 0) -> None:
        self.request = request
        self.leg = leg
        self.prompt_tokens = offered.prompt_tokens + written
        self.output_tokens = max(1, offered.output_tokens - written)
        self.prefix = offered.prefix
        self.is_long = offered.is_long
        self.target_tokens = self.prompt_tokens
        self.read_tokens = 0
        self.cached_tokens = 0
        self.written = 0
        self.place = Place.SENT
        self.joined_step = 0
        self.joined_tokens = 0
        self.ends_at_step = 0
        self.last_token_at: float | None = None
        self.expires = float("inf")
        self.is_begun = False  # its first token on this engine is out
        self.gaps = StreamGaps()
