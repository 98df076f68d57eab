"""Requests to engines: a pool of idle connections, an exchange at a time on each, and whole answers for who wants them.

**What is sent twice.** `request` sends once, always. A connection that served before may be closed by the engine at the
very moment it is used again (uvicorn, and so vLLM, closes after 5 s of silence); what was sent then is lost, and nobody can
tell whether it was done. So a loss says whether it was such a connection (`UpstreamLost.is_reused`), connections are not
used again after `keep_alive_s`, well below the engines', and only `fetch(…, is_idempotent=True)` tries again, once, on a new
connection. A decode leg, whose handle may be presented once, never is.

There is no bound on connections: admission is decided elsewhere, and to wait here would be a queue that nobody sees.
"""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from twinpool.http1.engine_connection import EngineConnection
from twinpool.http1.exchange import Deadlines, Exchange, Origin, Receiver
from twinpool.http1.framing import Headers, request_head
from twinpool.http1.lost import Loss, UpstreamLost

__all__ = ["Deadlines", "Exchange", "Origin", "Pool", "Receiver", "Response"]


@dataclass(frozen=True, slots=True)
class Response:
    """A whole answer."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def header(self, name: bytes) -> bytes | None:
        """The first value under that lower-case name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


class Pool:
    """Connections to engines. Used from one event loop; belongs to no loop before its first request."""

    def __init__(
        self, *, keep_alive_s: float = 3.0, max_idle_per_origin: int = 1024, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        self._keep_alive_s = keep_alive_s
        self._max_idle_per_origin = max_idle_per_origin
        self._ssl_context = ssl_context
        self._open: set[EngineConnection] = set()
        self._idle: dict[Origin, dict[EngineConnection, None]] = {}  # an ordered set: who has rested longest comes first
        self._timer: asyncio.TimerHandle | None = None
        self._on_closed: asyncio.Event | None = None
        self._is_closed = False
        self.on_idle_lost: Callable[[Origin], None] = lambda origin: None
        """Called when an engine closes a connection that rests: it may be gone."""

    @property
    def connections(self) -> int:
        """Open sockets, idle ones included."""
        return len(self._open)

    @property
    def idle_connections(self) -> int:
        return sum(map(len, self._idle.values()))

    async def request(
        self,
        origin: Origin,
        method: str,
        target: str,
        headers: Headers,
        body: bytes,
        receiver: Receiver,
        deadlines: Deadlines = Deadlines(),  # noqa: B008  frozen
        *,
        is_fresh: bool = False,
    ) -> Exchange:
        """Send a request, once; returns when it is on its way. What comes back goes to `receiver`. Raises UpstreamLost if
        there is no connection to be had; from then on losses go to the receiver, and the caller must see to it that the
        exchange ends: `with exchange:`, or `abort`. `is_fresh`: on a new connection."""
        if self._is_closed:
            raise UpstreamLost(Loss.CLOSED_BY_US, str(origin))
        if origin.headers:
            headers = (*origin.headers, *headers)
        head = request_head(method, target, origin.authority, headers, len(body))
        connection = None if is_fresh else self._take_idle(origin)
        if connection is None:
            connection = await self._connect(origin, deadlines.connect_s)
        return connection.send(head, body, receiver, deadlines, is_head_request=method == "HEAD")

    async def fetch(
        self,
        origin: Origin,
        method: str,
        target: str,
        headers: Headers = (),
        body: bytes = b"",
        *,
        timeout_s: float,
        max_bytes: int = 32 << 20,
        deadlines: Deadlines | None = None,
        is_idempotent: bool = False,
    ) -> Response:
        """A whole answer within `timeout_s`, or UpstreamLost. Cancelling the caller closes the socket. `is_idempotent`: may
        be done twice, so a connection that turns out to have been closed already is replaced, once."""
        collector = _Collector(asyncio.get_running_loop().create_future(), max_bytes)
        deadlines = deadlines or Deadlines(connect_s=timeout_s, first_byte_s=None, idle_s=None)
        headers = tuple(headers)
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    return await self._collect(origin, method, target, headers, body, collector, deadlines, is_fresh=False)
                except UpstreamLost as lost:
                    if not (is_idempotent and lost.is_reused and lost.loss is Loss.CLOSED_BEFORE_HEAD):
                        raise
                collector = _Collector(asyncio.get_running_loop().create_future(), max_bytes)
                return await self._collect(origin, method, target, headers, body, collector, deadlines, is_fresh=True)
        except TimeoutError:
            raise UpstreamLost(collector.timeout_means(), str(origin), f"{timeout_s:g} s in all") from None

    async def _collect(
        self,
        origin: Origin,
        method: str,
        target: str,
        headers: Headers,
        body: bytes,
        collector: "_Collector",
        deadlines: Deadlines,
        *,
        is_fresh: bool,
    ) -> Response:
        with await self.request(origin, method, target, headers, body, collector, deadlines, is_fresh=is_fresh) as exchange:
            collector.exchange = exchange
            return await collector.future

    async def close(self) -> None:
        """Close every connection; receivers of what is under way are told CLOSED_BY_US. Returns when none is left."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._idle.clear()
        for connection in list(self._open):
            connection.lose(Loss.CLOSED_BY_US)
        self._on_closed = asyncio.Event()
        while self._open:
            self._on_closed.clear()
            await self._on_closed.wait()

    # For the connections

    def opened(self, connection: EngineConnection) -> None:
        self._open.add(connection)
        if self._is_closed:
            connection.close()

    def closed(self, connection: EngineConnection) -> None:
        self._open.discard(connection)
        idle = self._idle.get(connection.origin)
        if idle and connection in idle:  # we take it out before we close it: so the engine has
            del idle[connection]
            self.on_idle_lost(connection.origin)
        if self._on_closed is not None:
            self._on_closed.set()

    def rests(self, connection: EngineConnection) -> None:
        """A connection has nothing to do."""
        if self._is_closed:
            connection.close()
            return
        idle = self._idle.setdefault(connection.origin, {})
        idle[connection] = None
        if len(idle) > self._max_idle_per_origin:
            self._close_first(idle)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._keep_alive_s, self._close_old)

    def _take_idle(self, origin: Origin) -> EngineConnection | None:
        idle = self._idle.get(origin)
        if not idle:
            return None
        youngest = asyncio.get_running_loop().time() - self._keep_alive_s
        while idle:
            connection, _ = idle.popitem()  # rested least: the least likely to be closed by the engine
            if connection.is_closed:
                continue
            if connection.idle_since > youngest:
                return connection
            connection.close()
        return None

    async def _connect(self, origin: Origin, connect_s: float | None) -> EngineConnection:
        loop = asyncio.get_running_loop()
        connection = EngineConnection(self, origin, loop)
        try:
            async with asyncio.timeout(connect_s):
                await loop.create_connection(lambda: connection, origin.host, origin.port, ssl=self._tls(origin))
        except asyncio.CancelledError:
            connection.give_up()
            raise
        except TimeoutError:
            connection.give_up()
            raise UpstreamLost(Loss.CONNECT_TIMEOUT, str(origin)) from None
        except OSError as error:
            raise UpstreamLost(Loss.CONNECT, str(origin), error.strerror or str(error)) from error
        if connection.is_closed:
            raise UpstreamLost(Loss.CLOSED_BY_US if self._is_closed else Loss.CONNECT, str(origin))
        return connection

    def _tls(self, origin: Origin) -> ssl.SSLContext | None:
        if not origin.tls:
            return None
        if self._ssl_context is None:
            self._ssl_context = ssl.create_default_context()
        return self._ssl_context

    def _close_old(self) -> None:
        """Runs while anything rests."""
        self._timer = None
        loop = asyncio.get_running_loop()
        oldest = loop.time() - self._keep_alive_s
        for origin, idle in list(self._idle.items()):
            while idle and next(iter(idle)).idle_since <= oldest:
                self._close_first(idle)
            if not idle:
                del self._idle[origin]
        if self._idle and not self._is_closed:
            self._timer = loop.call_later(self._keep_alive_s / 2, self._close_old)

    @staticmethod
    def _close_first(idle: dict[EngineConnection, None]) -> None:
        connection = next(iter(idle))
        del idle[connection]
        connection.close()


class _Collector:
    """Receives a whole answer into a future."""

    def __init__(self, future: asyncio.Future[Response], max_bytes: int) -> None:
        self.future = future
        self.exchange: Exchange | None = None
        self._max_bytes = max_bytes
        self._status: int | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []
        self._bytes = 0

    def timeout_means(self) -> Loss:
        if self.exchange is None:
            return Loss.CONNECT_TIMEOUT
        return Loss.HEAD_TIMEOUT if self._status is None else Loss.IDLE_TIMEOUT

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._status, self._headers = status, headers

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)
        self._bytes += len(data)
        if self._bytes > self._max_bytes and self.exchange is not None and not self.exchange.is_over:
            self.exchange.abort()
            self._fail(UpstreamLost(Loss.TOO_LARGE, "answer", f"over {self._max_bytes} bytes"))

    def on_end(self) -> None:
        if not self.future.done():
            self.future.set_result(Response(self._status or 0, self._headers, b"".join(self._parts)))

    def on_lost(self, error: UpstreamLost) -> None:
        self._fail(error)

    def _fail(self, error: UpstreamLost) -> None:
        if not self.future.done():
            self.future.set_exception(error)
