"""The handles that prefill workers hold for us: from the answer that granted one until it is spent, freed or expired.

A handle can outlive its request. Its worker is told to free it; where nobody confirms that, it is an orphan until its lease
ends.
"""

from collections.abc import Callable, Collection, Iterable

import msgspec

from twinpool.core.lifecycle import HANDLE_ENDS, HandleMove, HandleState, HandleStory
from twinpool.core.model import Incarnation

Key = tuple[str, int]
"""Request and attempt."""


# members under names of this module: through its class each takes 0.2 µs on Python 3.11, several dozen times a request
_HELD, _SEND, _READ = HandleState.HELD, HandleMove.SEND, HandleMove.READ


class Handle(msgspec.Struct, eq=False):
    key: Key
    worker: Incarnation
    expires: float
    story: HandleStory


class Handles:
    """Every handle that has not ended, by request and attempt."""

    def __init__(self, handles: Iterable[Handle] = ()) -> None:
        self._handles = {handle.key: handle for handle in handles}

    def remember(self) -> list[Handle]:
        """Its part of a snapshot."""
        return list(self._handles.values())

    def hold(self, key: Key, worker: Incarnation, expires: float) -> None:
        story = HandleStory(f"handle of {key[0]}, attempt {key[1]}", _HELD)
        self._handles[key] = Handle(key, worker, expires, story)

    def send(self, key: Key) -> None:
        """D is told of it now."""
        self._handles[key].story.move(_SEND)

    def spend(self, key: Key) -> None:
        """D has written a token, so it has read the KV. Nothing, where the attempt holds no handle."""
        handle = self._handles.pop(key, None)
        if handle is not None:
            handle.story.move(_READ)

    def release(self, key: Key) -> tuple[str, bool] | None:
        """The worker that must free it, and whether a D was told of it; None where there is nothing to free."""
        handle = self._handles.get(key)
        if handle is None or not handle.story.can(HandleMove.RELEASE):
            return None
        was_sent = handle.story.state is HandleState.SENT
        handle.story.move(HandleMove.RELEASE)
        return handle.worker.worker, was_sent

    def released(self, key: Key, *, freed: bool) -> float | None:
        """What came of a release; when its lease ends, where it is an orphan now."""
        handle = self._handles.get(key)
        if handle is None or handle.story.state is not HandleState.RELEASING:
            return None
        if freed:
            handle.story.move(HandleMove.CONFIRM)
            del self._handles[key]
            return None
        handle.story.move(HandleMove.LOSE)
        return handle.expires

    def expire_orphans(self, at: float) -> float | None:
        """End the orphans whose lease is over; when the next one's will be."""
        left: list[float] = []
        for key, handle in list(self._handles.items()):
            if handle.story.state is not HandleState.ORPHANED:
                continue
            if handle.expires > at:
                left.append(handle.expires)
                continue
            self._expire(key, handle)
        return min(left, default=None)

    def expire_of(self, is_gone: Callable[[Incarnation], bool]) -> None:
        """End the handles of engines that are gone: their memory went with them."""
        for key, handle in list(self._handles.items()):
            if is_gone(handle.worker):
                self._expire(key, handle)

    def any_on(self, worker: str) -> bool:
        return any(handle.worker.worker == worker for handle in self._handles.values())

    def by_state(self) -> dict[HandleState, int]:
        counts: dict[HandleState, int] = {}
        for handle in self._handles.values():
            counts[handle.story.state] = counts.get(handle.story.state, 0) + 1
        return counts

    def validate(self, current: Collection[Key]) -> None:
        """Raise `AssertionError` where one has ended and is here, or D was told of one for an attempt that is not current."""
        for key, handle in self._handles.items():
            if handle.story.state in HANDLE_ENDS:
                raise AssertionError(f"handle {key} has ended and is still here")
            if handle.story.state is HandleState.SENT and key not in current:
                raise AssertionError(f"handle {key} is nobody's")

    def _expire(self, key: Key, handle: Handle) -> None:
        handle.story.move(HandleMove.EXPIRE)
        del self._handles[key]
