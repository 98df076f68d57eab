"""Those that wait for the same workers, in the order of their turns.

A tenant's requests go by the time they came, with a head start for each step of priority: whoever waits longer than that is
not overtaken any more. Between tenants turns are shared by work, in prompt tokens, whatever each has waiting (start-time fair
queueing): a tenant's next request is due when the line has given everybody who waits as much as the tenant has had.

    due = max(the line's least due, due of the tenant's last + its work)

Where all requests are one tenant's and of one priority, that is first come, first served. What the tenants have had is
forgotten when nobody waits: then nobody was kept waiting by it."""

from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from heapq import heappop, heapreplace
from itertools import islice
from typing import NamedTuple

import msgspec

from twinpool.core.requests import Request

_LEAST_WORK_TOKENS = 64
"""Of one request: the shortest prompt takes a step too, and a place among those that are written."""

_TENANTS_KEPT = 64  # that do not wait, and have had more than the others: beyond, those who were caught up with are let go


class LineRecord(msgspec.Struct, frozen=True):
    """A line's part of a snapshot: ids of requests, in order, and by tenant what each has had."""

    again: list[str]
    queues: list[tuple[str, list[str]]]
    is_shared: bool
    due: list[tuple[str, float]]
    had: list[tuple[str, float]]


class _Head(NamedTuple):
    """A tenant that waits, and when its next request is due: `due` in work, ties by when that came."""

    due: float
    turn: float
    tenant: str


class Line:
    """As long as one tenant alone waits, only its queue is kept: nobody is to be weighed against it."""

    def __init__(self, record: LineRecord | None = None, requests: Mapping[str, Request] | None = None) -> None:
        """`record` is what `remember` gave, `requests` has those that it names."""
        self._again: deque[Request] = deque()
        self._queues: dict[str, deque[Request]] = {}  # by tenant; only those that are not empty
        self._is_shared = False  # two have waited at once since the line was empty
        self._heads: list[_Head] = []  # one a queue where it is shared, sorted
        self._had: dict[str, float] = {}  # by tenants that do not wait: up to where in the line's work they were served
        if record is not None and requests is not None:
            self._again.extend(requests[name] for name in record.again)
            self._queues = {tenant: deque(requests[name] for name in names) for tenant, names in record.queues}
            self._is_shared = record.is_shared
            self._heads = sorted(_Head(due, self._queues[tenant][0].turn, tenant) for tenant, due in record.due)
            self._had = dict(record.had)

    def remember(self) -> LineRecord:
        return LineRecord(
            again=[request.id for request in self._again],
            queues=[(tenant, [request.id for request in queue]) for tenant, queue in self._queues.items()],
            is_shared=self._is_shared,
            due=[(head.tenant, head.due) for head in self._heads],
            had=list(self._had.items()),
        )

    def __bool__(self) -> bool:
        return bool(self._queues or self._again)

    def __iter__(self) -> Iterator[Request]:
        """By turns, as they would be if each were served when it is due. The line must not change meanwhile."""
        yield from self._again
        if len(self._queues) < 2:
            for queue in self._queues.values():
                yield from queue
            return
        heads = self._heads.copy()  # sorted, which is a heap too
        rest = {tenant: iter(queue) for tenant, queue in self._queues.items()}
        ahead = {tenant: next(queue) for tenant, queue in rest.items()}
        while heads:
            due, _, tenant = heads[0]
            request = ahead[tenant]
            following = next(rest[tenant], None)
            if following is None:
                heappop(heads)
            else:
                ahead[tenant] = following
                heapreplace(heads, _Head(due + _work(request.prompt_tokens), following.turn, tenant))
            yield request

    def first(self, count: int) -> list[Request]:
        """Whose turn it is, and who comes next."""
        if len(self._queues) == 1 and not self._again:
            (queue,) = self._queues.values()
            return list(islice(queue, count))
        return list(islice(self, count))

    def waiting(self) -> Iterable[tuple[str, int]]:
        """The tenants, and how many requests of each wait for the first time."""
        return ((tenant, len(queue)) for tenant, queue in self._queues.items())

    def last_of(self, tenant: str) -> Request | None:
        """Of a tenant's that wait for the first time, the one whose turn is last."""
        queue = self._queues.get(tenant)
        return queue[-1] if queue else None

    def append(self, request: Request) -> None:
        tenant = request.facts.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            if self._queues and not self._is_shared:
                self._share()
            self._queues[tenant] = deque((request,))
            if self._is_shared:
                now = self._heads[0].due if self._heads else 0.0
                insort(self._heads, _Head(max(now, self._had.pop(tenant, 0.0)), request.turn, tenant))
        elif queue[-1].turn <= request.turn:
            queue.append(request)
        else:
            insort(queue, request, key=_turn)
            if self._is_shared and queue[0] is request:
                head = self._take_head(tenant)
                insort(self._heads, head._replace(turn=request.turn))

    def put_first(self, request: Request) -> None:
        request.is_again = True
        self._again.appendleft(request)

    def remove(self, request: Request, given_tokens: int | None = None) -> None:
        """It leaves, or is served: then `given_tokens` of its prompt must be read. What is tried again has had its turn."""
        if request.is_again:
            request.is_again = False
            self._again.remove(request)
            return
        tenant = request.facts.tenant
        queue = self._queues[tenant]
        is_first = queue[0] is request
        queue.remove(request)
        if not queue:
            del self._queues[tenant]
        if self._is_shared and (is_first or given_tokens is not None):
            due = self._take_head(tenant).due + (0 if given_tokens is None else _work(given_tokens))
            self._go_on(tenant, queue, due)

    def _share(self) -> None:
        """Another tenant comes."""
        self._is_shared = True
        self._heads = [_Head(0.0, queue[0].turn, tenant) for tenant, queue in self._queues.items()]

    def _take_head(self, tenant: str) -> _Head:
        n = next(n for n, head in enumerate(self._heads) if head.tenant == tenant)
        return self._heads.pop(n)

    def _go_on(self, tenant: str, queue: deque[Request], due: float) -> None:
        """The tenant's next one is due then; where it has none, that is remembered until the others have had as much."""
        if queue:
            insort(self._heads, _Head(due, queue[0].turn, tenant))
        elif not self._heads:
            self._is_shared = False
            self._had = {}
        elif due > self._heads[0].due:
            self._had[tenant] = due
            if len(self._had) > _TENANTS_KEPT:
                now = self._heads[0].due
                self._had = {tenant: had for tenant, had in self._had.items() if had > now}


def _work(tokens: int) -> int:
    return max(_LEAST_WORK_TOKENS, tokens)


def _turn(request: Request) -> float:
    return request.turn
