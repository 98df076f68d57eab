"""The answer to one request, written straight into the client's socket.

    waiting ──start()──► open ──finish()──► over          `send` is start, write and finish at once
                          │ └──write()──┐
                          │◄────────────┘                 the client leaves, or abort(): over, and truncated

Framing is chosen by `start`: a length when one is given, chunks otherwise, or the connection's end for HTTP/1.0. Calls
after the client left do nothing; the handler is being cancelled then.
"""

import asyncio
import socket
import struct
from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

import msgspec

from twinpool.errors import RequestError
from twinpool.http1.framing import LAST_CHUNK, Headers, answer_headers, chunk, status_line


class _Framing(Enum):
    LENGTH = auto()
    CHUNKED = auto()
    UNTIL_CLOSE = auto()
    NO_BODY = auto()


class AnswerOwner(Protocol):
    """What a responder needs of its connection."""

    def closes_after_answer(self) -> bool: ...
    def answer_over(self, *, reusable: bool) -> None: ...
    def date(self) -> bytes: ...


class Responder:
    """Writes one answer. Every method is synchronous; `write` is called straight from an upstream's `data_received`."""

    __slots__ = (
        "_chunked",
        "_framing",
        "_is_head",
        "_is_http10",
        "_left_bytes",
        "_owner",
        "is_over",
        "is_paused",
        "on_pause",
        "on_resume",
        "started",
        "transport",
    )

    def __init__(self, owner: AnswerOwner, transport: asyncio.Transport, *, is_head: bool, is_http10: bool) -> None:
        self._owner = owner
        self.transport = transport
        """For fakes that must misbehave below HTTP."""
        self._is_head = is_head
        self._is_http10 = is_http10
        self._framing: _Framing | None = None
        self._chunked = False  # open and chunked: the one question that `write` asks on the hot path
        self._left_bytes = 0
        self.started = False
        self.is_over = False
        """The answer is finished, cut, or has nobody to go to."""
        self.is_paused = False
        """The client reads more slowly than we write: hold the upstream back."""
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None

    def start(self, status: int, headers: Headers, *, length: int | None = None) -> None:
        """Write the head. Framing headers among `headers` are left out. ValueError, with nothing written, for a header
        that holds a line break."""
        if self.started:
            raise RuntimeError("this answer has started already")
        lines = answer_headers(headers)
        if self.is_over:
            return
        self.started = True
        framing, header = self._choose_framing(status, length)
        self._framing = framing
        self._chunked = framing is _Framing.CHUNKED
        self._left_bytes = length or 0
        if self._owner.closes_after_answer() or framing is _Framing.UNTIL_CLOSE:
            header += b"connection: close\r\n"
        elif self._is_http10:
            header += b"connection: keep-alive\r\n"
        self.transport.write(b"%b%b%b%b\r\n" % (status_line(status), lines, self._owner.date(), header))

    def write(self, data: bytes) -> None:
        """One piece of the body, as one chunk."""
        if self._chunked:
            if data:  # an empty chunk would end the body
                self.transport.write(chunk(data))
            return
        if self.is_over or not data:
            return
        if self._framing is None:
            raise RuntimeError("start() comes before write()")
        if self._framing is _Framing.NO_BODY:
            return
        if self._framing is _Framing.LENGTH:
            self._left_bytes -= len(data)
            if self._left_bytes < 0:
                self.abort()
                raise RuntimeError("the body is longer than the length it was announced with")
        self.transport.write(data)

    def finish(self) -> None:
        """The body is complete. A body shorter than its length is cut, not finished."""
        if self.is_over:
            return
        if self._framing is None:
            raise RuntimeError("start() comes before finish()")
        if self._framing is _Framing.LENGTH and self._left_bytes:
            self.abort()
            return
        if self._chunked:
            self.transport.write(LAST_CHUNK)
        self._end(reusable=self._framing is not _Framing.UNTIL_CLOSE)

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer."""
        self.start(status, headers, length=len(body))
        self.write(body)
        self.finish()

    def refuse(self, error: RequestError, more_headers: Headers = ()) -> None:
        """A whole answer: the error's status and envelope."""
        headers = [(b"content-type", b"application/json"), *more_headers]
        if error.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % error.retry_after_s))
        self.send(error.status, headers, msgspec.json.encode(error.envelope()))

    def abort(self) -> None:
        """Cut the answer so that the client sees it is cut. What was written before still goes out, where the framing
        shows the cut; an answer that only the connection's end delimits is reset."""
        if self.is_over:
            return
        if self._framing is _Framing.UNTIL_CLOSE:
            reset(self.transport)
        self._end(reusable=False)

    def lose(self) -> None:
        """For the connection: nobody listens any more."""
        self._chunked = False
        self.is_over = True
        self.on_pause = self.on_resume = None

    def _end(self, *, reusable: bool) -> None:
        self.lose()
        self._owner.answer_over(reusable=reusable)

    def _choose_framing(self, status: int, length: int | None) -> tuple[_Framing, bytes]:
        if status < 200 or status in (204, 304):
            return _Framing.NO_BODY, b""
        if length is not None:
            framing, header = _Framing.LENGTH, b"content-length: %d\r\n" % length
        elif self._is_http10:
            framing, header = _Framing.UNTIL_CLOSE, b""
        else:
            framing, header = _Framing.CHUNKED, b"transfer-encoding: chunked\r\n"
        return (_Framing.NO_BODY if self._is_head else framing), header


def reset(transport: asyncio.Transport) -> None:
    """Close with RST in place of FIN, so that the peer cannot take the end for a proper one."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
