"""Gives handles back to the prefill workers that hold them, and reports whether each was freed.

The embedded worker frees a handle on `DELETE`; the signature in the handle is the permission. An engine without such a route
frees it when it was read: so a decode worker reads it, writes one token and has it thrown away. Where nobody may read it any
more, the lease ends it, and the controller counts it as orphaned until then.
"""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

import msgspec

from twinpool.core import events as on
from twinpool.handoff import nixl
from twinpool.handoff.body import Fields, salted
from twinpool.http1 import Origin, Pool, UpstreamLost

_FREED = frozenset({200, 204, 404, 409, 410})
"""Freed now, or gone already: spent, expired or unknown, P holds nothing."""


class _Handle(msgspec.Struct):
    """The two fields of the embedded worker's handle that a release needs; other engines' handles lack `twinpool`."""

    remote_request_id: str | None = None
    twinpool_signature: str | None = None


class Read(NamedTuple):
    """Who reads a handle to have it freed, and the client's request that it belongs to."""

    worker: Origin
    path: str
    fields: Fields


class Releases:
    """The releases under way, one task each."""

    def __init__(self, pool: Pool, timeout_s: float, feed: Callable[[on.Event], None]) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self._feed = feed
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, request: str, attempt: int, worker: Origin, handle: msgspec.Raw, read: Read | None = None) -> None:
        task = asyncio.get_running_loop().create_task(self._release(request, attempt, worker, handle, read))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait for those under way: each has its own deadline."""
        await asyncio.gather(*self._tasks)

    async def _release(self, request: str, attempt: int, worker: Origin, handle: msgspec.Raw, read: Read | None) -> None:
        freed = False
        asked = msgspec.json.decode(handle, type=_Handle)
        if asked.twinpool_signature is not None:
            target = f"/v1/kv/{asked.remote_request_id}"
            headers = [(b"x-twinpool-signature", asked.twinpool_signature.encode())]
            try:
                answer = await self._pool.fetch(
                    worker, "DELETE", target, headers, timeout_s=self._timeout_s, is_idempotent=True
                )
                freed = answer.status in _FREED
            except UpstreamLost:
                pass  # reported as not freed
        elif read is not None:
            # Nothing that is read here is for anybody, and it may be late: nobody shares what the engine caches of it.
            fields = salted(read.fields, f"dropped {request} {attempt}")
            freed = await self._read(handle, read._replace(fields=fields))
        self._feed(on.HandleReleased(at=monotonic(), request=request, attempt=attempt, freed=freed))

    async def _read(self, handle: msgspec.Raw, read: Read) -> bool:
        body = nixl.read_and_drop_body(read.fields, handle)
        headers = [(b"content-type", b"application/json")]
        try:
            answer = await self._pool.fetch(read.worker, "POST", read.path, headers, body, timeout_s=self._timeout_s)
        except UpstreamLost:
            return False
        return answer.status == 200
