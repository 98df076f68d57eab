"""The router's queue: one line a model, in which turns are shared (`core.line`). A request that must be tried again goes to the
head.

Streams that must go on elsewhere have a lane of their own, before the others: they may wait for one of the few workers that can
continue them, and must not hold up those whom any worker can serve.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import takewhile
from operator import attrgetter
from typing import NamedTuple

from twinpool.core.line import Line, LineRecord
from twinpool.core.requests import Request


class Lane(NamedTuple):
    """Those that wait for the same workers."""

    model: str
    is_begun: bool


_IS_BEGUN = attrgetter("is_begun")

WaitingRecord = list[tuple[Lane, LineRecord]]
"""Its part of a snapshot, lanes in the order in which they came to be."""


class Waiting:
    """Requests that wait, in order."""

    def __init__(self, record: WaitingRecord | None = None, requests: Mapping[str, Request] | None = None) -> None:
        """`record` is what `remember` gave, `requests` has those that it names."""
        # only those that are not empty
        self._lines: dict[Lane, Line] = {lane: Line(line, requests) for lane, line in record or ()}
        self._count = sum(1 for _ in self)

    def remember(self) -> WaitingRecord:
        return [(lane, line.remember()) for lane, line in self._lines.items()]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        """All of them; the caller may remove as it goes."""
        return iter([request for line in self._lines.values() for request in line])

    def append(self, request: Request) -> None:
        self._line_of(request).append(request)
        self._count += 1

    def put_first(self, request: Request) -> None:
        self._line_of(request).put_first(request)
        self._count += 1

    def remove(self, request: Request, given_tokens: int | None = None) -> None:
        """It leaves, or is served: then `given_tokens` of its prompt must be read."""
        lane = Lane(request.facts.model, request.is_begun)
        line = self._lines[lane]
        line.remove(request, given_tokens)
        self._count -= 1
        if not line:
            del self._lines[lane]

    def lanes(self) -> list[Lane]:
        """Begun answers first: a client looks at half of one."""
        return sorted(self._lines, key=_IS_BEGUN, reverse=True)

    def first(self, lane: Lane, count: int) -> list[Request]:
        """Whose turn it is, and who comes next."""
        line = self._lines.get(lane)
        return [] if line is None else line.first(count)

    def ahead_of(self, request: Request) -> int:
        """Prompt tokens of those whose turn is before."""
        return sum(other.prompt_tokens for other in takewhile(lambda other: other is not request, self._line_of(request)))

    def who_yields_to(self, newcomer: Request) -> Request | None:
        """Who should leave a full queue for one that has just come: the last of whoever has most in it, where that is more than
        the newcomer's tenant would have; else the last of its own tenant, where its turn is after the newcomer's."""
        held: Counter[str] = Counter()
        for line in self._lines.values():
            for tenant, count in line.waiting():
                held[tenant] += count
        tenant = newcomer.facts.tenant
        most, count = max(held.items(), key=lambda found: (found[1], found[0]), default=(tenant, 0))
        if count > held[tenant] + 1:
            return self._last_of(most)
        last = self._last_of(tenant)
        return last if last is not None and last.turn > newcomer.turn else None

    def _last_of(self, tenant: str) -> Request | None:
        found = [last for line in self._lines.values() if (last := line.last_of(tenant)) is not None]
        return max(found, key=lambda request: (request.turn, request.id), default=None)

    def _line_of(self, request: Request) -> Line:
        lane = Lane(request.facts.model, request.is_begun)
        line = self._lines.get(lane)
        if line is None:
            line = self._lines[lane] = Line()
        return line
