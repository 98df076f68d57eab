"""One client's request as the driver keeps it, and what is handed on when it has ended."""

import msgspec

from twinpool.core.model import Leg
from twinpool.measure.timeline import Timeline
from twinpool.sim.fleet import SimulatedWorker
from twinpool.sim.sequence import Sequence
from twinpool.sim.stream_gaps import StreamGaps
from twinpool.workload.offered import Offered


class Placed(msgspec.Struct, frozen=True, eq=False):
    """A sequence and the worker it was given to, in that life of its engine."""

    worker: SimulatedWorker
    incarnation: int
    sequence: Sequence

    @property
    def is_alive(self) -> bool:
        return self.worker.is_up and self.worker.incarnation == self.incarnation


class Ended(msgspec.Struct, frozen=True):
    """One request's end. `outcome` is ok, refused, rejected, failed or left; `path` None where no worker was given it. `gaps`
    are those of a finished stream."""

    offered: Offered
    outcome: str
    path: str | None
    timeline: Timeline
    gaps: StreamGaps | None = None
    cached_tokens: int = 0


class Client:
    """`written` tokens came from engines that are gone; the present attempt adds its own."""

    __slots__ = (
        "arrived",
        "attempt",
        "decode",
        "decode_began",
        "first_token",
        "handle",
        "handoff_s",
        "id",
        "offered",
        "path",
        "prefill",
        "prefilled",
        "sent",
        "written",
    )

    def __init__(self, id_: str, offered: Offered, arrived: float) -> None:
        self.id = id_
        self.offered = offered
        self.arrived = arrived
        self.attempt = 0
        self.path: str | None = None
        self.sent: float | None = None
        self.prefilled: float | None = None
        self.decode_began = 0.0  # its leg arrived there
        self.handoff_s: float | None = None
        self.first_token: float | None = None
        self.prefill: Placed | None = None
        self.decode: Placed | None = None  # also the one worker of a whole leg
        self.handle: Placed | None = None
        self.written = 0

    def begin(self, attempt: int, path: str, at: float) -> None:
        self.attempt = attempt
        self.path = path
        self.sent = at
        self.prefilled = self.handoff_s = None
        self.prefill = self.handle = None

    def answer(self, leg: Leg) -> Sequence:
        """What is left to write. The client sees one stream: where an engine had begun it, with a long gap in it."""
        sequence = Sequence(self, leg, self.offered, written=self.written)
        if self.written and self.decode is not None:
            sequence.gaps = self.decode.sequence.gaps
            sequence.last_token_at = self.decode.sequence.last_token_at
        return sequence

    def forget_legs(self) -> None:
        """It has ended. Its sequences know it, so that a million such circles would be left to the garbage collector."""
        self.prefill = self.decode = self.handle = None

    def timeline(self, ended: float) -> Timeline:
        return Timeline(
            arrived=self.arrived,
            ended=ended,
            sent=self.sent,
            prefilled=self.prefilled,
            first_token=self.first_token,
            handoff_s=self.handoff_s,
        )
