"""Who gets which of llama.cpp's slots, and who waits.

    join ──► waiting ──slot free──► holding ──leave──► (settling) ──► slot free
                └──leave──► gone

A request joins the queue with a `Ticket`, at once and without waiting, or is refused; the ticket's slot comes in
order. A ticket is the only thing that gives a slot back, exactly once, whatever way its request ends. If the request
was dropped while llama.cpp worked on it, the slot comes back when llama.cpp has let go.

Of several free slots a request gets the one that holds most of its prompt, else the one unused for longest. What a
slot holds is reused in whole blocks, and only what prefill computed, so that an answer never depends on what happened
to be cached (see `generation`).
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from twinpool.errors import OverloadedError, UnavailableError, UpstreamError
from twinpool.worker.engine import TOKEN_BYTES

_log = logging.getLogger(__name__)


class Slot:
    """One of llama.cpp's, with the last prompt whose KV it got (packed token ids; empty if that is not known)."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.prompt = b""
        self.used_at = 0.0


def reusable_tokens(held: bytes, wanted: bytes, block_tokens: int) -> int:
    """How many tokens of the prompt `wanted` a slot that holds the prompt `held` need not compute: whole blocks. The
    last token of each is no part of it: prefill does not compute that one. At least one token is left to prefill."""
    block = block_tokens * TOKEN_BYTES
    most = min(len(held) - TOKEN_BYTES, len(wanted) - 2 * TOKEN_BYTES) // block
    for count in range(most):
        start = count * block
        if held[start : start + block] != wanted[start : start + block]:
            return count * block_tokens
    return max(most, 0) * block_tokens


class SlotPool:
    def __init__(self, slots: int, queue_limit: int, block_tokens: int, settle: Callable[[int], Awaitable[None]]) -> None:
        self.size = slots
        self._queue_limit = queue_limit
        self._block_tokens = block_tokens
        self._settle = settle
        self._free = [Slot(number) for number in range(slots)]
        self._queue: deque[Ticket] = deque()
        self._settling: set[asyncio.Task[None]] = set()
        self._busy_s, self._busy_since = 0.0, None

    _busy_since: float | None

    @property
    def running(self) -> int:
        return self.size - len(self._free)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def busy_s(self) -> float:
        """Seconds in which at least one slot was taken."""
        now = 0.0 if self._busy_since is None else time.monotonic() - self._busy_since
        return self._busy_s + now

    def join(self, wanted: bytes, *, next_in_line: bool = False) -> "Ticket":
        """A place in the queue for a prompt; with `next_in_line` (the further choices of a request that runs) in
        front, whatever the limit. Raises `OverloadedError`."""
        if not next_in_line and not self._free and len(self._queue) >= self._queue_limit:
            raise OverloadedError(f"{len(self._queue)} requests wait already; try again later", retry_after_s=1)
        ticket = Ticket(self, wanted)
        self._queue.appendleft(ticket) if next_in_line else self._queue.append(ticket)
        self._serve()
        return ticket

    async def settled(self) -> None:
        """Returns when no slot is being waited for any more."""
        while self._settling:
            await asyncio.wait(self._settling)

    def _serve(self) -> None:
        while self._free and self._queue:
            ticket = self._queue.popleft()
            slot = max(self._free, key=lambda slot: (self._reusable(slot, ticket), -slot.used_at, -slot.number))
            self._free.remove(slot)
            if self._busy_since is None:
                self._busy_since = time.monotonic()
            ticket._grant(slot)

    def _reusable(self, slot: Slot, ticket: "Ticket") -> int:
        return reusable_tokens(slot.prompt, ticket.wanted, self._block_tokens)

    def _forget(self, ticket: "Ticket") -> None:
        self._queue.remove(ticket)

    def _return(self, slot: Slot, *, dropped: bool) -> None:
        if not dropped:
            self._put_back(slot)
            return
        task = asyncio.create_task(self._put_back_when_settled(slot))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _put_back_when_settled(self, slot: Slot) -> None:
        slot.prompt = b""
        try:
            await self._settle(slot.number)
        except UpstreamError as error:  # the next request on this slot will say so too
            _log.error("slot %d: %s", slot.number, error)
        finally:
            self._put_back(slot)

    def _put_back(self, slot: Slot) -> None:
        slot.used_at = time.monotonic()
        self._free.append(slot)
        if not self.running and self._busy_since is not None:
            self._busy_s += time.monotonic() - self._busy_since
            self._busy_since = None
        self._serve()


class Ticket:
    """``async with pool.join(prompt) as ticket: slot = await ticket.slot(timeout_s)``."""

    def __init__(self, pool: SlotPool, wanted: bytes) -> None:
        self.wanted = wanted
        self.dropped = False
        """Set while llama.cpp works on the slot: leaving then means it must be waited for."""
        self._pool = pool
        self._slot: Slot | None = None
        self._granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left = False

    async def slot(self, timeout_s: float | None = None) -> Slot:
        """Raises `UnavailableError` if none comes in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._granted)
        except TimeoutError:
            raise UnavailableError(f"no slot came free within {timeout_s:g} s", retry_after_s=1) from None
        assert self._slot is not None  # noqa: S101 granted
        return self._slot

    def leave(self) -> None:
        if self._left:
            raise RuntimeError("a ticket was given back twice")
        self._left = True
        if self._slot is None:
            self._granted.cancel()
            self._pool._forget(self)
            return
        slot, self._slot = self._slot, None
        self._pool._return(slot, dropped=self.dropped)

    def _grant(self, slot: Slot) -> None:
        self._slot = slot
        self._granted.set_result(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()
