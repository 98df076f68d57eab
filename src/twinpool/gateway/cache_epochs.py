"""Whether what a decode engine keeps of earlier prompts may still be used.

An engine that reads KV from a handle also puts it into its own prefix cache, under the prompt's name. Read too late, that KV is
somebody else's: to throw the answer away is not enough, for the same prompt, or one that begins alike, is from then on answered
from it, in time, under HTTP 200, over a new handle or with none (vLLM 0.32, run). No route of a stock engine empties its cache.
But requests share cached prompts only under the same `cache_salt`. So a worker has epochs, and each after the first a salt:

    epoch 0, no salt ──a late read, or one that nobody can judge──► epoch 1, salt ──► epoch 2, another salt ──► …

What was cached in an earlier epoch is never used again, and ages out. A leg whose lease ends before its first token is looked
at then and not only at its end, so that what is cached falsely is not there for long. And nobody is given any of it before:
while such a leg is not judged, it casts its doubt on every other answer of the same epoch, however well in time that was read.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import NamedTuple

from twinpool.gateway.relay import Doubt

_COUNTED_S = 1.0  # after the end of a lease, until an engine has said so in its metrics


class Epoch(NamedTuple):
    """What a leg that was sent to that worker may use of its cache: all that stands under this salt."""

    worker: str
    salt: str | None


class Watch:
    """Over one decode leg whose answer is not judged yet."""

    def __init__(self, epochs: "CacheEpochs", epoch: Epoch, doubt: Doubt, trusted_until: float, lease_ends_by: float) -> None:
        self.epoch = epoch
        self.doubt = doubt
        self._epochs = epochs
        self._trusted_until = trusted_until
        self._lease_ends_by = lease_ends_by
        self._has_ended = False
        self._set_timer(lease_ends_by + _COUNTED_S)

    def believed(self) -> None:
        """Its first token may be believed, and so may what the engine has cached."""
        self._timer.cancel()
        self._epochs.drop(self)

    def doubted(self) -> None:
        """It cannot be believed, and what the engine has cached of it must not be used."""
        self._timer.cancel()
        self._epochs.begin_anew(self.epoch)

    def ended(self, at: float) -> None:
        """It ended without having been judged. If the lease still ran then, all was read in time, or nothing was. Else it may
        have been read since anybody looked."""
        if at < self._trusted_until:
            self.believed()
        elif not self._has_ended:
            self._has_ended = True
            self._timer.cancel()
            self._set_timer(max(self._lease_ends_by, at) + _COUNTED_S)

    def _set_timer(self, at: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(max(at - monotonic(), 0.0), self._look)

    def _look(self) -> None:
        if not self._epochs.is_closed:
            self.doubt.find_out(monotonic(), self._found_out)

    def _found_out(self, may_be_believed: bool) -> None:
        if not may_be_believed:
            self._epochs.begin_anew(self.epoch)
        elif self._has_ended:
            self._epochs.drop(self)


class CacheDoubt:
    """The doubt about one answer, `own` of which is about its own handle, where it has one. Others are about the handles that
    were read in the same epochs: there it may have found, cached, what one of those read too late."""

    def __init__(self, epochs: "CacheEpochs", used: Sequence[Epoch], own: Doubt | None) -> None:
        self._epochs = epochs
        self._used = used
        self._own = own

    def is_safe(self, first_token: float) -> bool:
        own_is_safe = self._own is None or self._own.is_safe(first_token)
        return own_is_safe and all(map(self._epochs.is_current, self._used)) and not self._others(first_token)

    def find_out(self, first_token: float, then: Callable[[bool], None]) -> None:
        """Calls `then` once: with False as soon as one cannot be believed, with True when all can."""
        if not all(map(self._epochs.is_current, self._used)):
            asyncio.get_running_loop().call_soon(then, False)
            return
        asked = self._others(first_token)
        waiting = len(asked) + 1

        def found_out(epoch: Epoch | None, may_be_believed: bool) -> None:
            nonlocal waiting
            if not may_be_believed and epoch is not None:
                self._epochs.begin_anew(epoch)
            if waiting > 0:
                waiting = waiting - 1 if may_be_believed else 0
                if waiting == 0:
                    then(may_be_believed)

        for watch in asked:
            watch.doubt.find_out(first_token, partial(found_out, watch.epoch))
        if self._own is None or self._own.is_safe(first_token):
            asyncio.get_running_loop().call_soon(found_out, None, True)
        else:
            self._own.find_out(first_token, partial(found_out, None))

    def _others(self, first_token: float) -> list[Watch]:
        """Those that may have read too late by now."""
        return [
            watch
            for epoch in self._used
            for watch in self._epochs.watches(epoch)
            if watch.doubt is not self._own and not watch.doubt.is_safe(first_token)
        ]


class CacheEpochs:
    """The epoch of each worker."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.is_closed = False
        self._say = say
        self._salts: dict[str, str] = {}
        self._watches: dict[str, dict[Watch, None]] = {}  # of each worker, in the order in which they were sent

    def close(self) -> None:
        """Nothing more is looked for."""
        self.is_closed = True

    def salt_of(self, worker: str) -> str | None:
        """What every request to that worker carries now; None in its first epoch."""
        return self._salts.get(worker)

    def epoch_of(self, worker: str) -> Epoch:
        return Epoch(worker, self._salts.get(worker))

    def is_current(self, epoch: Epoch) -> bool:
        return self._salts.get(epoch.worker) == epoch.salt

    def begin_anew(self, epoch: Epoch) -> None:
        """What was cached in that epoch is not used again; nothing, where that was said already. The salt is random: another
        gateway may have had epochs of its own."""
        if not self.is_current(epoch):
            return
        self._salts[epoch.worker] = f"twinpool-{secrets.token_hex(8)}"
        self._watches.pop(epoch.worker, None)  # they were of this epoch, and nobody uses it any more
        self._say(f"what {epoch.worker} has cached is not used again: it may have read KV after its lease had ended")

    def forget(self, worker: str) -> None:
        """It left, or its engine is a new one with an empty cache."""
        self._salts.pop(worker, None)
        self._watches.pop(worker, None)

    def watch(self, worker: str, doubt: Doubt, trusted_until: float, lease_ends_by: float) -> Watch:
        """Ask, soon after the lease's end, whether it ended unread; unless the leg is judged before. The lease ends between the
        two times: within them nobody knows."""
        watch = Watch(self, self.epoch_of(worker), doubt, trusted_until, lease_ends_by)
        self._watches.setdefault(worker, {})[watch] = None
        return watch

    def watches(self, epoch: Epoch) -> Sequence[Watch]:
        """Over the legs of that epoch that are not judged yet."""
        return [watch for watch in self._watches.get(epoch.worker, ()) if watch.epoch == epoch]

    def drop(self, watch: Watch) -> None:
        """It is judged."""
        self._watches.get(watch.epoch.worker, {}).pop(watch, None)
