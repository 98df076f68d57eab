"""An engine that can be done in the head: 0.1 ms a prompt token, 10 ms a decode step, whatever its batch and context."""

from typing import Any

import msgspec

from twinpool.core.model import Leg
from twinpool.profile import Profile
from twinpool.sim.cost import StepCost
from twinpool.sim.engine import Engine, EngineLimits, Scheduling
from twinpool.sim.loop import Loop, Rank
from twinpool.sim.sequence import Place, Sequence
from twinpool.sim.stream_gaps import GapLimits
from twinpool.workload.offered import Offered

PROFILE = Profile(
    name="plain",
    model="m",
    engine="e 1",
    source="made up",
    kv_tokens=100_000,
    kv_bytes_per_token=1000,
    prefill_ms=((100, 10.0), (200, 20.0)),
    decode_step_ms=((1, 100, 10.0), (1, 200, 10.0), (8, 100, 10.0), (8, 200, 10.0)),
    handoff_bytes_per_s=1e9,
    handoff_latency_ms=1.0,
)


def profile(**changes: Any) -> Profile:
    return msgspec.structs.replace(PROFILE, **changes)


class Bench:
    """One engine, and all it says, with its time in milliseconds."""

    def __init__(
        self,
        *,
        kv_tokens: int = 100_000,
        budget: int = 1000,
        scheduling: Scheduling = Scheduling.CHUNKED,
        sequences: int = 64,
        costs: Profile = PROFILE,
    ) -> None:
        self.loop = Loop()
        self.said: list[tuple[float, str, str]] = []
        self.tokens = 0
        limits = EngineLimits(kv_tokens, 100_000, sequences, budget, scheduling)
        self.engine = Engine(self.loop, StepCost(costs), limits, self, self._count, GapLimits(0.05, 0.5))

    def _count(self, at: float, short: int, long: int, gap_s: float | None) -> None:
        self.tokens += short + long

    def _say(self, at: float, what: str, sequence: Sequence) -> None:
        self.said.append((round(at * 1e3, 6), what, sequence.request))

    def prompt_read(self, at: float, sequence: Sequence) -> None:
        self._say(at, "read", sequence)

    def first_token(self, at: float, sequence: Sequence) -> None:
        self._say(at, "first", sequence)

    def finished(self, at: float, sequence: Sequence) -> None:
        self._say(at, "finished", sequence)

    def has_room(self, at: float, sequence: Sequence) -> None:
        self._say(at, "room", sequence)

    def gives(
        self,
        name: str,
        prompt: int,
        output: int = 1,
        *,
        at_ms: float = 0.0,
        leg: Leg = Leg.WHOLE,
        prefix: tuple[int, ...] = (),
    ) -> Sequence:
        """A sequence that comes at that time."""
        sequence = Sequence(name, leg, Offered(0.0, prompt, output, False, prefix))
        ask = self.engine.receive if leg is Leg.DECODE else self.engine.submit
        self.loop.call_at(at_ms / 1e3, Rank.CLIENT, ask, sequence)
        return sequence

    def at(self, at_ms: float, call: Any, sequence: Sequence) -> None:
        self.loop.call_at(at_ms / 1e3, Rank.CLIENT, call, sequence)

    def runs(self) -> list[tuple[float, str, str]]:
        self.loop.run()
        return self.said

    def when(self, what: str, name: str) -> float:
        return next(at for at, said, of in self.said if (said, of) == (what, name))


def is_gone(sequence: Sequence) -> bool:
    return sequence.place is Place.GONE
