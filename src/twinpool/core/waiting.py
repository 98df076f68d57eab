"""The router's queue: one a model, first come first served. A request that must be tried again goes to the head."""

from collections import deque
from collections.abc import Iterator

from twinpool.core.requests import Request


class Waiting:
    """Requests that wait, in order."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[Request]] = {}  # only those that are not empty

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Request]:
        """All of them; the caller may remove as it goes."""
        return iter([request for queue in self._queues.values() for request in queue])

    def append(self, request: Request) -> None:
        self._queues.setdefault(request.facts.model, deque()).append(request)

    def put_first(self, request: Request) -> None:
        self._queues.setdefault(request.facts.model, deque()).appendleft(request)

    def remove(self, request: Request) -> None:
        queue = self._queues[request.facts.model]
        queue.remove(request)
        if not queue:
            del self._queues[request.facts.model]

    def models(self) -> list[str]:
        return list(self._queues)

    def head(self, model: str) -> Request | None:
        """Whose turn it is."""
        queue = self._queues.get(model)
        return queue[0] if queue else None
