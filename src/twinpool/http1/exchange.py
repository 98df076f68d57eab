"""One request to an engine and its answer; and the connection that carries one exchange after the other.

    Exchange:          sent ──on_head──► body ──on_end──► over
                         └───────┬────────┘ └on_body┘
                                 └─ on_lost (once, and then nothing) or abort() (then nothing at all)

    EngineConnection:  busy with an exchange ──whole answer, keep-alive──► idle in the pool ──► busy …
                                 └──────── anything else ───────► closed

The receiver's methods are called from inside `data_received`; they may call `abort`, `pause` and `resume`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, cast

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpResponseParser

from twinpool.http1.lost import Loss, UpstreamLost

if TYPE_CHECKING:
    from twinpool.http1.client import Pool

_MAX_HEAD_BYTES = 64 << 10
_GRACE_S = 0.001
_IDLE_TICKS = 10  # so a silence is noticed up to a tenth late


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an engine listens."""

    host: str
    port: int
    tls: bool = False
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


class EngineConnection(asyncio.Protocol):
    """See the module's picture. `on_…` methods are the parser's callbacks."""

    def __init__(self, pool: "Pool", origin: Origin, loop: asyncio.AbstractEventLoop) -> None:
        self.origin = origin
        self.idle_since = 0.0
        self.is_closed = False
        self._pool = pool
        self._loop = loop
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._parser = HttpResponseParser(self)
        self._served = 0
        self._exchange: Exchange | None = None
        self._receiver: Receiver | None = None
        self._deadlines = Deadlines()
        self._timer: asyncio.TimerHandle | None = None
        self._deliver: Callable[[bytes], None] = _ignore  # the receiver's on_body, while it wants to hear
        self._sent_at = 0.0
        self._is_overdue = False
        self._was_heard = False  # since the timer looked last
        self._quiet_ticks = 0
        self._has_head = False
        self._is_head_request = False
        self._is_interim = False
        self._ends_with_connection = False
        self._can_be_reused = False
        self._is_paused = False
        self._head_bytes = 0
        self._headers: list[tuple[bytes, bytes]] = []

    def send(self, head: bytes, body: bytes, receiver: Receiver, deadlines: Deadlines, *, is_head_request: bool) -> Exchange:
        """Begin an exchange on this idle connection."""
        exchange = self._exchange = Exchange(self, is_reused=self._served > 0)
        self._served += 1
        self._receiver = receiver
        self._deliver = receiver.on_body
        self._deadlines = deadlines
        self._is_head_request = is_head_request
        self._has_head = False
        self._can_be_reused = False
        self._ends_with_connection = False
        self._head_bytes = 0
        self._is_overdue = False
        self._was_heard = False
        self._quiet_ticks = 0
        self._sent_at = self._loop.time()
        if body:
            self._transport.writelines((head, body))
        else:
            self._transport.write(head)
        self._arm(deadlines.first_byte_s)
        return exchange

    def abort(self) -> None:
        self._forget()
        self.close()

    def close(self) -> None:
        self.is_closed = True
        self._transport.abort()

    def pause(self) -> None:
        if not self._is_paused and not self.is_closed:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused and not self.is_closed:
            self._is_paused = False
            self._was_heard = True
            self._transport.resume_reading()

    def lose(self, loss: Loss, detail: str = "") -> None:
        """Tell the receiver, once, and close."""
        receiver, exchange = self._receiver, self._exchange
        self.abort()
        if receiver is not None and exchange is not None:
            receiver.on_lost(UpstreamLost(loss, str(self.origin), detail, is_reused=exchange.is_reused))

    # The transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._pool.opened(self)

    def data_received(self, data: bytes) -> None:
        if not self._has_head:
            if self._receiver is None:  # bytes that nobody asked for: do not take them for the next answer
                self.close()
                return
            self._head_bytes += len(data)
        self._was_heard = True
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._refuse(error)
        if self._exchange is None or not self._has_head:
            self._after_feeding()

    def _refuse(self, error: HttpParserError | HttpParserUpgrade) -> None:
        if isinstance(error, HttpParserCallbackError):
            self.lose(Loss.PROTOCOL, "the receiver failed")
            raise (error.__context__ or error) from None
        self.lose(Loss.PROTOCOL, "it switched protocols" if isinstance(error, HttpParserUpgrade) else str(error))

    def _after_feeding(self) -> None:
        if self._exchange is None:
            if not self.is_closed:
                self._rest()
        elif not self._has_head and self._head_bytes > _MAX_HEAD_BYTES:
            self.lose(Loss.PROTOCOL, "the head is too long")

    def eof_received(self) -> None:
        if self._receiver is None:
            return
        if self._ends_with_connection:
            self.on_message_complete()
        elif self._has_head:
            self.lose(Loss.TRUNCATED)
        else:
            self.lose(Loss.CLOSED_BEFORE_HEAD)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        if self._receiver is not None:
            loss = Loss.RESET_MID_BODY if self._has_head else Loss.CLOSED_BEFORE_HEAD
            self.lose(loss, str(exc) if exc else "")
        self._pool.closed(self)

    # The parser's side

    def on_message_begin(self) -> None:
        self._headers = []
        if self._receiver is None:  # a second answer behind the one that was asked for
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # not a trailer
            self._headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        receiver = self._receiver
        if receiver is None:
            return
        status = self._parser.get_status_code()
        self._is_interim = status < 200
        if self._is_interim:
            return
        self._has_head = True
        self._can_be_reused = self._parser.should_keep_alive() and not self._is_head_request
        names = {name for name, _ in self._headers}
        has_body = status not in (204, 304) and not self._is_head_request
        self._ends_with_connection = has_body and b"content-length" not in names and b"transfer-encoding" not in names
        receiver.on_head(status, self._headers)
        if self._is_head_request:  # the parser would wait for a body
            self.on_message_complete()

    def on_body(self, data: bytes) -> None:
        self._deliver(data)

    def on_message_complete(self) -> None:
        receiver = self._receiver
        if receiver is None:
            return
        if self._is_interim:
            self._is_interim = False
            self._headers = []
            return
        self._forget()
        if not self._can_be_reused:
            self.close()
        receiver.on_end()

    def _rest(self) -> None:
        """The answer is whole: back to the pool, if all of the request has gone, too."""
        if self._transport.get_write_buffer_size() or self._transport.is_closing():
            self.close()
            return
        if self._is_paused:
            self.resume()
        self.idle_since = self._loop.time()
        self._pool.rests(self)

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._exchange is not None:
            self._exchange.detach()
        self._exchange = self._receiver = None
        self._deliver = _ignore
        self._has_head = False

    # Deadlines. One timer an exchange, which looks now and then: to set one anew with each byte would cost more than to relay
    # it. Silence in a body is counted in ticks, so that a stall of our own loop, with bytes unread in the socket, is not taken
    # for the engine's.

    def _arm(self, left_s: float | None) -> None:
        idle_s = self._deadlines.idle_s
        tick_s = None if idle_s is None else idle_s / _IDLE_TICKS
        spans = [span for span in (left_s, tick_s) if span is not None]
        self._timer = self._loop.call_later(min(spans), self._check_deadlines) if spans else None

    def _check_deadlines(self) -> None:
        left_s = None
        if self._has_head:
            self._quiet_ticks = 0 if self._was_heard or self._is_paused else self._quiet_ticks + 1
            self._was_heard = False
            if self._quiet_ticks >= _IDLE_TICKS:
                self.lose(Loss.IDLE_TIMEOUT, f"{self._deadlines.idle_s:g} s")
                return
        elif self._deadlines.first_byte_s is not None:
            left_s = self._sent_at + self._deadlines.first_byte_s - self._loop.time()
            if left_s <= 0:
                if self._is_overdue:
                    self.lose(Loss.HEAD_TIMEOUT, f"{self._deadlines.first_byte_s:g} s")
                    return
                self._is_overdue = True  # the loop may have stalled, too: one more turn
                left_s = _GRACE_S
        self._arm(left_s)


def _ignore(data: bytes) -> None:
    pass
