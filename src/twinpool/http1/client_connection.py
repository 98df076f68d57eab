"""One client's connection: reads requests, serves them one at a time, in order.

         first byte         head read          body read           answer finished
    IDLE ─────────► HEAD ─────────────► BODY ─────────────► SERVING ─────────► IDLE, or closed
     │               │                   │                     │
     │ keep_alive_s  │ header_timeout_s  │ body_timeout_s      │ the client leaves: the handler's task is cancelled
     ▼               │ malformed         │ over the cap        ▼
    closed           └──────► LINGER ◄───┘                   closed

LINGER: a refusal was written and our side is shut; what the client still sends is thrown away for a while. To close at
once would make the kernel answer those bytes with a reset, and the client would lose the refusal it has not read yet.

While a request is served, bytes behind it are kept raw and unparsed (`_ahead`), up to a bound at which the socket is left
alone. A client that ends its side has left: to serve half-closed clients and to notice departed ones exclude each other.
"""

import asyncio
from collections import deque
from enum import Enum, auto
from time import monotonic
from typing import TYPE_CHECKING, cast

from httptools import (
    HttpParserCallbackError,
    HttpParserError,
    HttpParserInvalidURLError,
    HttpParserUpgrade,
    HttpRequestParser,
    parse_url,
)

from twinpool.errors import BadRequestError, Reason, RequestError, RequestTimeoutError, TooLargeError, UnavailableError
from twinpool.http1.messages import Limits, Request
from twinpool.http1.responder import Responder

if TYPE_CHECKING:
    from twinpool.http1.server import Server

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class _Reading(Enum):
    """Where in a message the parser stands."""

    NOTHING = auto()
    HEAD = auto()
    BODY = auto()


class ClientConnection(asyncio.Protocol):
    """See the module's picture. Callbacks whose names start with `on_` are called by the parser."""

    def __init__(self, server: "Server", limits: Limits) -> None:
        self._server = server
        self._limits = limits
        self._parser = HttpRequestParser(self)
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)  # set before anything can be read

        self._reading = _Reading.NOTHING
        self._read_at = 0.0  # when the bytes now being parsed came in
        self._arrived_at = 0.0
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._bare_bytes = 0  # read since the message last got on: bounds heads, trailers and chunk extensions
        self._wants_continue = False
        self._keeps_alive_next = True

        self._requests: deque[tuple[Request, bool, bool]] = deque()  # read, not yet served; keeps alive; is HTTP/1.0
        self._refusal: RequestError | None = None  # to be answered after those, and then no more
        self._is_last = False  # nothing behind the requests read so far is wanted
        self._ahead: list[bytes] = []
        self._ahead_bytes = 0
        self._ahead_at = 0.0

        self._responder: Responder | None = None
        self._keeps_alive = True
        self._task: asyncio.Task[None] | None = None
        self._lingers = False
        self._is_closed = False
        self._is_draining = False
        self._write_paused_at: float | None = None
        self._due_at: float | None = None  # when `check` has something to do

    # The transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        self._server.opened(self)
        self._due_at = monotonic() + self._limits.keep_alive_s
        if self._server.connections > self._limits.max_connections:
            self._refuse(UnavailableError("too many connections", Reason.QUEUE_FULL, retry_after_s=1))
            self._advance()

    def data_received(self, data: bytes) -> None:
        if self._responder is None and not self._requests:
            self._read(data, monotonic())
            return
        if self._is_last or self._refusal is not None:
            return
        if not self._ahead:
            self._ahead_at = monotonic()
        self._ahead.append(data)
        self._ahead_bytes += len(data)
        if self._ahead_bytes > self._limits.max_pipelined_bytes:
            self._transport.pause_reading()

    def eof_received(self) -> None:
        if self._responder is not None or self._requests:
            self._cut()  # close() alone would first wait until a departed client has read everything
        # the transport closes itself once what was written has gone

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closed = True
        self._cancel_handler()
        self._requests.clear()
        self._ahead.clear()
        self._server.closed(self)

    def pause_writing(self) -> None:
        self._write_paused_at = monotonic()
        responder = self._responder
        if responder is not None:
            responder.is_paused = True
            if responder.on_pause is not None:
                responder.on_pause()

    def resume_writing(self) -> None:
        self._write_paused_at = None
        responder = self._responder
        if responder is None:
            self._advance()
            return
        responder.is_paused = False
        if responder.on_resume is not None:
            responder.on_resume()

    # Reading

    def _read(self, data: bytes, read_at: float) -> None:
        self._read_at = read_at
        self._bare_bytes += len(data)
        if self._is_last or self._refusal is not None:
            if self._bare_bytes > 4 * self._limits.max_body_bytes:
                self._cut()
            return
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:  # the request itself is whole, and is answered in HTTP/1.1
            self._is_last = True
        except HttpParserCallbackError:  # ours
            self._cut()
            raise
        except HttpParserError as error:
            if not self._is_last:
                self._refuse(BadRequestError(f"malformed HTTP: {error}"))
        if self._bare_bytes > self._limits.max_header_bytes and self._reading is not _Reading.NOTHING:
            self._refuse(BadRequestError("the headers are too long"))
        self._advance()

    def on_message_begin(self) -> None:
        self._reading = _Reading.HEAD
        self._arrived_at = self._read_at
        self._due_at = self._read_at + self._limits.header_timeout_s
        self._target = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading is _Reading.HEAD:  # not a trailer
            self._headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        self._reading = _Reading.BODY
        self._body = []
        self._body_bytes = 0
        self._keeps_alive_next = self._parser.should_keep_alive()
        self._check_head(self._parser.get_http_version())
        self._bare_bytes = 0

    def _check_head(self, version: str) -> None:
        """What the parser lets pass and a server must not."""
        hosts = 0
        for name, value in self._headers:
            if name == b"host":
                hosts += 1
            elif name == b"transfer-encoding" and (value.lower() != b"chunked" or version != "1.1"):
                self._refuse(BadRequestError("of the transfer encodings, only chunked is understood"))
            elif name == b"content-length" and int(value) > self._limits.max_body_bytes:
                self._refuse_body()
            elif name == b"expect" and version == "1.1":
                self._wants_continue = value.lower() == b"100-continue"
        if version not in ("1.1", "1.0"):
            self._refuse(BadRequestError(f"HTTP/{version} is not spoken here"))
        elif hosts > 1 or (version == "1.1" and not hosts):
            self._refuse(BadRequestError("a request has one host header"))
        if self._bare_bytes > self._limits.max_header_bytes:  # perhaps: it counts what came behind the head, too
            head_bytes = len(self._target) + sum(len(name) + len(value) + 4 for name, value in self._headers)
            if head_bytes > self._limits.max_header_bytes:
                self._refuse(BadRequestError("the headers are too long"))

    def on_body(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._bare_bytes = 0
        self._wants_continue = False
        self._body_bytes += len(data)
        if self._body_bytes > self._limits.max_body_bytes:
            self._refuse_body()
            return
        self._body.append(data)

    def on_message_complete(self) -> None:
        if self._refusal is not None:
            return
        self._reading = _Reading.NOTHING
        self._bare_bytes = 0
        self._wants_continue = False
        method = self._parser.get_method()
        target = self._target.decode("ascii")
        if method == b"CONNECT":
            self._refuse(BadRequestError("this is not a proxy"))
            return
        request = Request(
            method=method.decode("ascii"),
            target=target,
            path=_path(target),
            headers=tuple(self._headers),
            body=b"".join(self._body),
            arrived_at=self._arrived_at,
        )
        self._body = []
        keeps_alive = self._keeps_alive_next and not self._parser.should_upgrade()
        self._is_last = not keeps_alive
        self._requests.append((request, keeps_alive, self._parser.get_http_version() == "1.0"))

    # Serving

    def _advance(self) -> None:
        """Do what comes next, if it is time for it."""
        if self._responder is not None or self._write_paused_at is not None or self._lingers or self._is_closed:
            return
        if self._requests:
            request, self._keeps_alive, is_http10 = self._requests.popleft()
            self._due_at = None
            self._responder = Responder(self, self._transport, is_head=request.method == "HEAD", is_http10=is_http10)
            self._task = self._server.spawn(request, self._responder)
        elif self._refusal is not None:
            self._send_refusal(self._refusal)
        elif self._is_last or (self._is_draining and self._reading is _Reading.NOTHING and not self._ahead):
            self._transport.close()
            self._due_at = monotonic() + self._limits.write_timeout_s
        elif self._ahead:
            data = b"".join(self._ahead)
            if self._ahead_bytes > self._limits.max_pipelined_bytes:
                self._transport.resume_reading()
            self._ahead.clear()
            self._ahead_bytes = 0
            self._read(data, self._ahead_at)
        else:
            self._wait_for_more()

    def _wait_for_more(self) -> None:
        if self._reading is _Reading.NOTHING:
            self._due_at = monotonic() + self._limits.keep_alive_s
        elif self._reading is _Reading.BODY:
            self._due_at = monotonic() + self._limits.body_timeout_s
            if self._wants_continue:
                self._wants_continue = False
                self._transport.write(_CONTINUE)
        elif self._due_at is None:  # part of a head was read together with a request that has been served since
            self._due_at = monotonic() + self._limits.header_timeout_s

    def closes_after_answer(self) -> bool:
        return not self._keeps_alive or self._is_draining

    def date(self) -> bytes:
        return self._server.date_line

    def answer_over(self, *, reusable: bool) -> None:
        if self._is_closed or self._lingers:
            return
        self._responder = self._task = None
        if not reusable:
            self._requests.clear()
            self._is_last = True
        elif not self._keeps_alive:
            self._is_last = True
        self._advance()

    def _refuse_body(self) -> None:
        self._body = []
        self._refuse(TooLargeError(f"the body is larger than {self._limits.max_body_bytes} bytes"))

    def _refuse(self, error: RequestError) -> None:
        if self._refusal is None:
            self._refusal = error

    def _send_refusal(self, error: RequestError) -> None:
        self._keeps_alive = False
        self._lingers = True
        self._reading = _Reading.NOTHING
        self._headers, self._body = [], []
        Responder(self, self._transport, is_head=False, is_http10=False).refuse(error, self._server.refusal_headers())
        self._due_at = monotonic() + self._limits.linger_s
        if self._transport.can_write_eof():
            self._transport.write_eof()

    # Endings

    def check(self, now: float) -> None:
        """Called now and then by the server: acts on deadlines that have passed."""
        if self._write_paused_at is not None and now - self._write_paused_at > self._limits.write_timeout_s:
            self._cut()
        if self._due_at is None or now < self._due_at or self._is_closed:
            return
        self._due_at = None
        if self._lingers or self._transport.is_closing():
            self._cut()
        elif self._reading is _Reading.NOTHING:
            self._transport.close()
            self._due_at = now + self._limits.write_timeout_s
        else:
            self._refuse(RequestTimeoutError("the rest of the request did not come"))
            self._advance()

    def drain(self) -> None:
        """Serve what has arrived, then close."""
        self._is_draining = True
        self._advance()

    def cut(self) -> None:
        """Close now, whatever is under way."""
        self._cut()

    def _cut(self) -> None:
        self._cancel_handler()
        self._requests.clear()
        self._transport.abort()

    def _cancel_handler(self) -> None:
        if self._responder is not None:
            self._responder.lose()
            self._responder = None
        if self._task is not None:
            self._task.cancel()
            self._task = None


def _path(target: str) -> str:
    if not target.startswith("/"):  # absolute form, which every server must take (RFC 9112, 3.2.2), or `*`
        try:
            return (parse_url(target.encode()).path or b"/").decode()
        except HttpParserInvalidURLError:
            return target
    return target.partition("?")[0]
