"""Listens, keeps the tasks of running requests, sweeps deadlines, and ends in order."""

import asyncio
import ssl as tls
from collections.abc import Callable
from email.utils import formatdate
from time import monotonic

from twinpool.errors import RequestError
from twinpool.http1.client_connection import ClientConnection
from twinpool.http1.framing import Headers
from twinpool.http1.messages import Handler, Limits, Request
from twinpool.http1.responder import Responder

__all__ = ["Handler", "Limits", "Request", "Responder", "Server", "serve"]

_BACKLOG = 2048  # a thousand clients may connect in one turn of the loop


async def serve(
    handler: Handler,
    *,
    host: str,
    port: int,
    limits: Limits | None = None,
    ssl: tls.SSLContext | None = None,
    refusal_headers: Callable[[], Headers] = tuple,
) -> "Server":
    """Listen; port 0 takes a free one. OSError if the address cannot be had. `refusal_headers` gives what goes with an answer
    that no handler gives: to half a request, to one that is too large or is no HTTP."""
    loop = asyncio.get_running_loop()
    server = Server(handler, limits or Limits(), loop, refusal_headers)
    server.listen(await loop.create_server(server.connection, host, port, ssl=ssl, backlog=_BACKLOG))
    return server


class Server:
    """One listening address. Runs each request in a task of its own, to which it keeps a strong reference."""

    def __init__(
        self, handler: Handler, limits: Limits, loop: asyncio.AbstractEventLoop, refusal_headers: Callable[[], Headers]
    ) -> None:
        self.refusal_headers = refusal_headers
        self._handler = handler
        self._limits = limits
        self._loop = loop
        self._connections: set[ClientConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._on_change: Callable[[], None] | None = None  # woken when a connection or a task has ended
        spans = (limits.header_timeout_s, limits.body_timeout_s, limits.keep_alive_s, limits.write_timeout_s)
        self._sweep_s = min(1.0, min(*spans, limits.linger_s) / 4)
        self._sweep()

    @property
    def port(self) -> int:
        return self._port

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._connections)

    async def close(self, drain_s: float = 0.0) -> None:
        """Stop accepting; let requests that have arrived end within `drain_s`, their answers saying `connection: close`;
        then cancel what is left. Returns when no connection and no task is left."""
        self._is_closing = True
        self._listener.close()
        for connection in list(self._connections):
            connection.drain()
        await self._wait(drain_s)
        for connection in list(self._connections):
            connection.cut()
        for task in self._tasks:
            task.cancel()
        await self._wait(None)
        await self._listener.wait_closed()
        self._timer.cancel()

    # For the connections

    def connection(self) -> ClientConnection:
        return ClientConnection(self, self._limits)

    def listen(self, listener: asyncio.Server) -> None:
        self._listener = listener
        self._port: int = listener.sockets[0].getsockname()[1]

    def opened(self, connection: ClientConnection) -> None:
        self._connections.add(connection)
        if self._is_closing:
            connection.drain()

    def closed(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        self._changed()

    def spawn(self, request: Request, responder: Responder) -> asyncio.Task[None]:
        task = self._loop.create_task(self._run(request, responder))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._changed()

    async def _run(self, request: Request, responder: Responder) -> None:
        try:
            await self._handler(request, responder)
            if not responder.started and not responder.is_over:
                raise RuntimeError("the handler gave no answer")
        except RequestError as error:
            if not responder.started:
                responder.refuse(error, self.refusal_headers())
        except Exception as error:  # a bug of the handler's: the client gets an answer, the loop's handler the story
            if not responder.started:
                responder.refuse(RequestError("internal error"), self.refusal_headers())
            self._loop.call_exception_handler(
                {"message": f"the handler of {request.method} {request.path} failed", "exception": error}
            )
        finally:
            responder.abort()  # nothing, if the answer is finished

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change()

    async def _wait(self, at_most_s: float | None) -> None:
        """Until neither a connection nor a task is left."""
        changed = asyncio.Event()
        self._on_change = changed.set
        try:
            async with asyncio.timeout(at_most_s):
                while self._connections or self._tasks:
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            pass
        finally:
            self._on_change = None

    def _sweep(self) -> None:
        now = monotonic()
        self.date_line = b"date: %b\r\n" % formatdate(usegmt=True).encode()
        for connection in list(self._connections):
            connection.check(now)
        self._timer = self._loop.call_later(self._sweep_s, self._sweep)
