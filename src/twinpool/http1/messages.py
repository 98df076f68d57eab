"""What a handler is given, and what a client may use up before it gets there."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from twinpool.http1.responder import Responder


class Request(msgspec.Struct, frozen=True, gc=False):
    """One whole request. `target` is as it came (`/a?b=c`), `path` is what stands before the `?`, not unquoted."""

    method: str
    target: str
    path: str
    headers: tuple[tuple[bytes, bytes], ...]  # names in lower case, in the order they came
    body: bytes
    arrived_at: float  # time.monotonic() when its first byte was read

    def header(self, name: bytes) -> bytes | None:
        """The first value under that lower-case name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


Handler = Callable[[Request, "Responder"], Awaitable[None]]
"""Runs as one task a request, which is cancelled at once when the client goes away before its answer is finished."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may use up. The time limits are kept to within a quarter, or a second where that is less."""

    max_body_bytes: int = 32 << 20  # a chat with a few images in it
    max_header_bytes: int = 64 << 10  # a head; a trailer or a chunk extension may be as long
    max_connections: int = 10_000
    max_pipelined_bytes: int = 64 << 10  # read ahead while a request is served; then the socket is left alone
    write_buffer_bytes: int = 64 << 10  # unread by the client: above it, `Responder.on_pause`
    header_timeout_s: float = 10.0  # first byte to the end of the head
    body_timeout_s: float = 30.0  # silence inside a body
    keep_alive_s: float = 75.0  # silence between requests; longer than a load balancer's usual 60 s
    write_timeout_s: float = 60.0  # a client that takes nothing
    linger_s: float = 5.0  # for a refused client to finish sending and read the refusal
