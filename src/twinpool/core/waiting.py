"""The router's queue: one a model, first come first served. A request that must be tried again goes to the head.

Streams that must go on elsewhere have a lane of their own, before the others: they may wait for one of the few workers that can
continue them, and must not hold up those whom any worker can serve.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from twinpool.core.requests import Request


class Lane(NamedTuple):
    """Those that wait for the same workers."""

    model: str
    is_begun: bool


class Waiting:
    """Requests that wait, in order."""

    def __init__(self, queues: Iterable[Iterable[str]] = (), requests: Mapping[str, Request] | None = None) -> None:
        """`queues` is what `remember` gave, `requests` has those that it names."""
        self._queues: dict[Lane, deque[Request]] = {}  # only those that are not empty
        for queue in queues:
            for name in queue:
                self.append((requests or {})[name])

    def remember(self) -> list[list[str]]:
        """Its part of a snapshot: who waits, a list a lane, in order."""
        return [[request.id for request in queue] for queue in self._queues.values()]

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Request]:
        """All of them; the caller may remove as it goes."""
        return iter([request for queue in self._queues.values() for request in queue])

    def append(self, request: Request) -> None:
        self._queues.setdefault(_lane(request), deque()).append(request)

    def put_first(self, request: Request) -> None:
        self._queues.setdefault(_lane(request), deque()).appendleft(request)

    def remove(self, request: Request) -> None:
        lane = _lane(request)
        queue = self._queues[lane]
        queue.remove(request)
        if not queue:
            del self._queues[lane]

    def lanes(self) -> list[Lane]:
        """Begun answers first: a client looks at half of one."""
        return sorted(self._queues, key=lambda lane: not lane.is_begun)

    def first(self, lane: Lane, count: int) -> list[Request]:
        """Whose turn it is, and who comes next."""
        return list(islice(self._queues.get(lane, ()), count))


def _lane(request: Request) -> Lane:
    return Lane(request.facts.model, request.is_begun)
