"""One request to an engine and its answer.

    sent ──on_head──► body ──on_end──► over
      └───────┬────────┘ └on_body┘
              └─ on_lost (once, and then nothing) or abort() (then nothing at all)

The receiver's methods are called from inside `data_received`; they may call `abort`, `pause` and `resume`.
"""

from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from twinpool.http1.lost import UpstreamLost

if TYPE_CHECKING:
    from twinpool.http1.engine_connection import EngineConnection


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an engine listens, and what every request to it must carry: its key. The same address is the same origin."""

    host: str
    port: int
    tls: bool = False
    headers: tuple[tuple[bytes, bytes], ...] = field(default=(), repr=False, compare=False)
    authority: bytes = field(init=False, repr=False, compare=False)  # for the host header

    def __post_init__(self) -> None:
        host = f"[{self.host}]" if ":" in self.host else self.host
        object.__setattr__(self, "authority", f"{host}:{self.port}".encode("idna" if not host.isascii() else "ascii"))

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority.decode()}"


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long to wait for an engine, each from where the one before ended. None: for ever. The whole exchange has no
    deadline here: cancel the task, or `abort`."""

    connect_s: float | None = 5.0
    first_byte_s: float | None = 300.0  # request sent to the answer's whole head: holds a queue and a prefill
    idle_s: float | None = 60.0  # silence inside a body; time that we paused does not count


class Receiver(Protocol):
    """Who takes an answer."""

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Header names in lower case; framing headers included, `Responder.start` leaves them out."""

    def on_body(self, data: bytes) -> None: ...
    def on_end(self) -> None: ...
    def on_lost(self, error: UpstreamLost) -> None: ...


class Exchange:
    """A request that is under way. Leaving its `with` block aborts what has not ended."""

    __slots__ = ("_connection", "is_reused")

    def __init__(self, connection: "EngineConnection", *, is_reused: bool) -> None:
        self._connection: EngineConnection | None = connection
        self.is_reused = is_reused

    @property
    def is_over(self) -> bool:
        """Ended, lost or aborted."""
        return self._connection is None

    def abort(self) -> None:
        """Close the socket, which is how an engine learns that nobody waits. The receiver hears nothing more. Does nothing
        to an exchange that is over."""
        if self._connection is not None:
            self._connection.abort()

    def pause(self) -> None:
        """Stop reading: the engine is held back by its own full socket. Its end is not noticed meanwhile."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        if self._connection is not None:
            self._connection.resume()

    def detach(self) -> None:
        """For the connection: this exchange is over."""
        self._connection = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()
