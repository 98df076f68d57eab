"""A connection to an engine, which carries one exchange after the other.

    busy with an exchange ──whole answer, keep-alive──► idle in the pool ──► busy …
            └──────── anything else ───────► closed

Of a stream the parser sees the head and the last chunk. In between an event is usually a chunk, and a chunk comes alone in one
read: that is recognised by its size line, and handed on (`_at_chunk`). Whatever comes otherwise goes through the parser.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpResponseParser

from twinpool.http1.exchange import Deadlines, Exchange, Origin, Receiver
from twinpool.http1.lost import Loss, UpstreamLost

if TYPE_CHECKING:
    from twinpool.http1.client import Pool

_MAX_HEAD_BYTES = 64 << 10
_SIZES = {line % size: size for size in range(1, 4096) for line in (b"%x", b"%X")}
_IDLE_TICKS = 10  # so a silence is noticed up to a tenth late
_GRACE_S = 0.001


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
        self._is_chunked = False
        self._in_chunk = False  # the parser has read a chunk's size, and not yet its end
        self._at_chunk = False  # what comes next is a chunk from its beginning
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

    def give_up(self) -> None:
        """Nobody waits for the connection that is being made. uvloop does not report the loss of one that was made already."""
        self.is_closed = True
        if self._transport is not None:
            self._transport.abort()
            self._pool.closed(self)

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
        if self.is_closed:
            self._transport.abort()
            return
        self._pool.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._at_chunk:  # the usual case: an event is a chunk and comes alone; the parser need not see it
            end = data.find(b"\r\n", 1, 5)
            size = _SIZES.get(data[:end])
            if size is not None and len(data) == end + size + 4 and data.endswith(b"\r\n"):
                self._was_heard = True
                self._hand_over(data[end + 2 : -2])
                return
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
        # A line that the parser has only part of ends in CR or before it; one that it has whole begins or ends a chunk.
        self._at_chunk = self._is_chunked and not self._in_chunk and data.endswith(b"\r\n")

    def _hand_over(self, data: bytes) -> None:
        try:
            self._deliver(data)
        except Exception:
            self.lose(Loss.PROTOCOL, "the receiver failed")
            raise

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
        self._is_chunked = b"transfer-encoding" in names
        self._in_chunk = False
        receiver.on_head(status, self._headers)
        if self._is_head_request:  # the parser would wait for a body
            self.on_message_complete()

    def on_body(self, data: bytes) -> None:
        self._deliver(data)

    def on_chunk_header(self) -> None:
        self._in_chunk = True

    def on_chunk_complete(self) -> None:
        self._in_chunk = False

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
        self._has_head = self._is_chunked = self._at_chunk = False

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
