"""Which prompts' KV this engine holds for others, and what became of it.

    held ──pulled once──► consumed
      ├────release()────► released
      └────lease over───► expired

Leases are looked at when someone asks; no timer runs.
"""

import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

BLOCK_TOKENS = 16


class HandleState(StrEnum):
    """What became of a handle."""

    HELD = "held"
    CONSUMED = "consumed"
    RELEASED = "released"
    EXPIRED = "expired"


@dataclass(slots=True)
class Handle:
    """KV of one prompt."""

    request_id: str
    prompt: str
    tokens: int
    readable_at: float
    expires_at: float
    state: HandleState = HandleState.HELD

    @property
    def blocks(self) -> int:
        return -(-self.tokens // BLOCK_TOKENS)


class Ledger:
    """The handles of one incarnation. `now` is a monotonic clock in seconds."""

    def __init__(self, engine_id: str, now: Callable[[], float]) -> None:
        self.engine_id = engine_id
        self.misuses = 0
        """Pulls of handles that were not held: each made somebody talk garbage."""
        self.pulls_after_expiry = 0
        self._now = now
        self._handles: dict[str, Handle] = {}

    def hold(self, prompt: str, tokens: int, *, lease_s: float, readable_after_s: float) -> Handle:
        now = self._now()
        handle = Handle(secrets.token_hex(8), prompt, tokens, now + readable_after_s, now + lease_s)
        self._handles[handle.request_id] = handle
        return handle

    def pull(self, engine_id: str, request_id: str) -> Handle | None:
        """The KV, once. None: it was never held, or is no longer. A handle that cannot be read yet stays held; look at
        `readable_in_s` first."""
        self.expire()
        handle = self._handles.get(request_id) if engine_id == self.engine_id else None
        if handle is None or handle.state is not HandleState.HELD:
            self.misuses += 1
            self.pulls_after_expiry += handle is not None and handle.state is HandleState.EXPIRED
            return None
        handle.state = HandleState.CONSUMED
        return handle

    def readable_in_s(self, engine_id: str, request_id: str) -> float:
        handle = self._handles.get(request_id) if engine_id == self.engine_id else None
        return max(0.0, handle.readable_at - self._now()) if handle else 0.0

    def release(self, request_id: str) -> bool:
        self.expire()
        handle = self._handles.get(request_id)
        if handle is None or handle.state is not HandleState.HELD:
            return False
        handle.state = HandleState.RELEASED
        return True

    def expire(self, *, all_now: bool = False) -> None:
        """End the leases that are over, or every one."""
        now = self._now()
        for handle in self._handles.values():
            if handle.state is HandleState.HELD and (all_now or handle.expires_at <= now):
                handle.state = HandleState.EXPIRED

    def count(self, state: HandleState) -> int:
        self.expire()
        return sum(handle.state is state for handle in self._handles.values())

    @property
    def held(self) -> int:
        return self.count(HandleState.HELD)

    @property
    def held_blocks(self) -> int:
        self.expire()
        return sum(handle.blocks for handle in self._handles.values() if handle.state is HandleState.HELD)

    def report(self) -> dict[str, Any]:
        """What `GET /ledger` answers."""
        self.expire()
        counts = Counter(handle.state for handle in self._handles.values())
        return {
            "engine_id": self.engine_id,
            **{state.value: counts[state] for state in HandleState},
            "held_blocks": self.held_blocks,
            "misuses": self.misuses,
        }
