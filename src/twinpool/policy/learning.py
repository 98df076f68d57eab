"""All that the policies learn, as one thing that the core tells what it saw and that a snapshot can hold."""

import msgspec

from twinpool.core.law import CostPrior, Law
from twinpool.core.meters import ReadingSeen, WritingSeen
from twinpool.core.model import RequestFacts, Usage
from twinpool.core.policies import Learner
from twinpool.errors import UserError
from twinpool.policy.costs import Costs, KindRecord
from twinpool.policy.demand import Demand, DemandRecord
from twinpool.policy.prefix import Prefixes, PrefixesRecord


class Reading(msgspec.Struct):
    """Prompt tokens that one worker reads a second, lately; and its sum at the last look."""

    at: float
    read_tokens: int
    tokens_s: float = 0.0


class _Record(msgspec.Struct):
    costs: dict[str, KindRecord]
    demand: DemandRecord
    prefixes: PrefixesRecord
    is_one_pool: bool
    looks: int
    reading: dict[str, Reading]


_DECODER = msgspec.json.Decoder(_Record)


class Learning:
    """`is_one_pool` is balance's word to routing: everybody does everything. `looks` its own: how often in a row
    another split has looked better."""

    def __init__(self, law: Law) -> None:
        self._learns = law.learns
        self.costs = Costs(law.priors, law.objectives.slo_itl_s)
        self.demand = Demand(law.objectives.long_prompt_tokens)
        self.prefixes = Prefixes()
        self.is_one_pool = False
        self.looks = 0
        self._reading: dict[str, Reading] = {}

    def is_known(self, kind: str) -> bool:
        return self.costs.of(kind) is not None

    def errors(self) -> dict[str, dict[str, float]]:
        return self.costs.errors()

    def arrived(self, at: float, facts: RequestFacts, prompt_tokens: int) -> None:
        self.demand.arrived(at, prompt_tokens)

    def finished(self, facts: RequestFacts, usage: Usage) -> None:
        self.demand.finished(usage)

    def read(self, kind: str, seen: ReadingSeen) -> None:
        if self._learns:
            self.costs.read(kind, seen)

    def wrote(self, kind: str, seen: WritingSeen, steps: int) -> None:
        if self._learns:
            self.costs.wrote(kind, seen, steps)

    def handed_over(self, kind: str, tokens: int, seconds: float) -> None:
        if self._learns:
            self.costs.handed_over(kind, tokens, seconds)

    def holds(self, worker: str, prefix: tuple[int, ...], room_tokens: float | None) -> None:
        self.prefixes.holds(worker, prefix, room_tokens)

    def reused(self, unread: int, cached: int) -> None:
        self.demand.reused(unread, cached)

    def held(self, worker: str, prefix: tuple[int, ...], prompt_tokens: int) -> int:
        return self.prefixes.held_tokens(worker, prefix, prompt_tokens)

    def told(self, worker: str, held_tokens: int, cached_tokens: int) -> None:
        self.prefixes.told(worker, held_tokens, cached_tokens)

    def forget(self, worker: str) -> None:
        self.prefixes.forget(worker)
        self._reading.pop(worker, None)

    def reading_of(self, worker: str, at: float, read_tokens: int) -> float:
        """Prompt tokens a second that it has read lately; `read_tokens` is its sum by now."""
        before = self._reading.get(worker)
        if before is None or read_tokens < before.read_tokens:
            before = self._reading[worker] = Reading(at, read_tokens)
        elif at > before.at:
            now = (read_tokens - before.read_tokens) / (at - before.at)
            before.tokens_s += 0.3 * (now - before.tokens_s)
            before.at, before.read_tokens = at, read_tokens
        return before.tokens_s

    def priors(self) -> dict[str, CostPrior]:
        return self.costs.learnt()

    def remember(self) -> msgspec.Raw:
        record = _Record(
            self.costs.remember(), self.demand.remember(), self.prefixes.remember(), self.is_one_pool, self.looks, self._reading
        )
        return msgspec.Raw(msgspec.json.encode(record))

    def recall(self, learnt: msgspec.Raw) -> None:
        """Raises `UserError` where that is nothing this version has remembered."""
        try:
            record = _DECODER.decode(learnt)
        except (msgspec.DecodeError, UnicodeDecodeError) as wrong:
            raise UserError(f"the journal's snapshot is broken: {wrong}") from wrong
        self.costs.recall(record.costs)
        self.demand.recall(record.demand)
        self.prefixes.recall(record.prefixes)
        self.is_one_pool = record.is_one_pool
        self.looks = record.looks
        self._reading = record.reading


_: type[Learner] = Learning
