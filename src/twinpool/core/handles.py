"""The handles that prefill workers hold for us: from the answer that granted one until it is spent, freed or expired.

A handle can outlive its request. Its worker is told to free it; where nobody confirms that, it is an orphan until its lease
ends.
"""

from collections.abc import Callable, Collection

from twinpool.core.lifecycle import HANDLE_ENDS, HANDLE_TABLE, HandleMove, HandleState, Story
from twinpool.core.model import WorkerFacts

Key = tuple[str, int]
"""Request and attempt."""


class _Handle:
    __slots__ = ("expires", "story", "worker")

    def __init__(self, key: Key, worker: WorkerFacts, expires: float) -> None:
        self.worker = worker
        self.expires = expires
        self.story = Story(f"handle of {key[0]}, attempt {key[1]}", HANDLE_TABLE, HandleState.HELD)


class Handles:
    """Every handle that has not ended, by request and attempt."""

    def __init__(self) -> None:
        self._handles: dict[Key, _Handle] = {}

    def hold(self, key: Key, worker: WorkerFacts, expires: float) -> None:
        self._handles[key] = _Handle(key, worker, expires)

    def send(self, key: Key) -> None:
        """D is told of it now."""
        self._handles[key].story.move(HandleMove.SEND)

    def spend(self, key: Key) -> None:
        """D has written a token, so it has read the KV. Nothing, where the attempt holds no handle."""
        handle = self._handles.pop(key, None)
        if handle is not None:
            handle.story.move(HandleMove.READ)

    def release(self, key: Key) -> str | None:
        """The worker that must free it; None where there is nothing to free."""
        handle = self._handles.get(key)
        if handle is None or not handle.story.can(HandleMove.RELEASE):
            return None
        handle.story.move(HandleMove.RELEASE)
        return handle.worker.worker

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

    def expire_of(self, is_gone: Callable[[WorkerFacts], bool]) -> None:
        """End the handles of engines that are gone: their memory went with them."""
        for key, handle in list(self._handles.items()):
            if is_gone(handle.worker):
                self._expire(key, handle)

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

    def _expire(self, key: Key, handle: _Handle) -> None:
        handle.story.move(HandleMove.EXPIRE)
        del self._handles[key]
