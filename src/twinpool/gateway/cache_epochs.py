"""Whether what a decode engine keeps of earlier prompts may still be used.

An engine that reads KV from a handle also puts it into its own prefix cache, under the prompt's name. Read too late, that KV is
somebody else's: to throw the answer away is not enough, for the same prompt, or one that begins alike, is from then on answered
from it, in time, under HTTP 200, over a new handle or with none (vLLM 0.32, run). No route of a stock engine empties its cache.
But requests share cached prompts only under the same `cache_salt`. So a worker has epochs, and each after the first a salt:

    epoch 0, no salt ──a late read, or one that nobody can judge──► epoch 1, salt ──► epoch 2, another salt ──► …

What was cached in an earlier epoch is never used again, and ages out. A leg whose lease ends before its first token is looked
at then and not only at its end, so that what is cached falsely is not used for long by others.
"""

import asyncio
import secrets
from collections.abc import Callable
from time import monotonic

from twinpool.gateway.relay import Doubt

_COUNTED_S = 1.0  # after the end of a lease, until an engine has said so in its metrics


class Watch:
    """Over one decode leg whose answer is not judged yet."""

    def __init__(self, timer: asyncio.TimerHandle, trusted_until: float) -> None:
        self._timer = timer
        self._trusted_until = trusted_until

    def believed(self) -> None:
        """Its first token may be believed, and so may what the engine has cached."""
        self._timer.cancel()

    def ended(self, at: float) -> None:
        """It ended without having been judged. If the lease still ran then, all was read in time, or nothing was."""
        if at < self._trusted_until:
            self._timer.cancel()


class CacheEpochs:
    """The epoch of each worker. `margin_s` is how long before the end of a lease a first token ceases to be safe."""

    def __init__(self, margin_s: float, say: Callable[[str], None]) -> None:
        self._margin_s = margin_s
        self._say = say
        self._salts: dict[str, str] = {}
        self._is_closed = False

    def close(self) -> None:
        """Nothing more is looked for."""
        self._is_closed = True

    def salt_of(self, worker: str) -> str | None:
        """What every request to that worker carries now; None in its first epoch."""
        return self._salts.get(worker)

    def begin_anew(self, worker: str) -> None:
        """What it has cached so far is not used again. The salt is random: another gateway may have had epochs of its own."""
        self._salts[worker] = f"twinpool-{secrets.token_hex(8)}"
        self._say(f"what {worker} has cached is not used again: it may have read KV after its lease had ended")

    def forget(self, worker: str) -> None:
        """It left, or its engine is a new one with an empty cache."""
        self._salts.pop(worker, None)

    def watch(self, worker: str, doubt: Doubt, trusted_until: float) -> Watch:
        """Ask, soon after the lease's end, whether it ended unread; unless the leg is judged before."""

        def then(may_be_believed: bool) -> None:
            if not may_be_believed:
                self.begin_anew(worker)

        def look() -> None:
            if not self._is_closed:
                doubt.find_out(monotonic(), then)

        wait_s = trusted_until + self._margin_s + _COUNTED_S - monotonic()
        timer = asyncio.get_running_loop().call_later(max(wait_s, 0.0), look)
        return Watch(timer, trusted_until)
