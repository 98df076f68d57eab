"""Every test here runs on uvloop, which serves, and on asyncio's own loop, which some will embed."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import uvloop

from twinpool.http1 import Handler, Limits, Pool, Request, Responder, Server, serve


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Any]:
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


class Wire:
    """A client that sends what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)

    async def send_apart(self, *parts: bytes) -> None:
        """In as many packets."""
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()
            await asyncio.sleep(0)

    async def read(self, size: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(size), 5)

    async def until(self, mark: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(mark), 5)

    async def rest(self) -> bytes:
        return await asyncio.wait_for(self.reader.read(), 5)

    async def answer(self) -> tuple[int, dict[bytes, bytes], bytes]:
        """One answer that has a length."""
        head = await self.until(b"\r\n\r\n")
        start, *lines = head.split(b"\r\n")[:-2]
        headers = {name: value for name, _, value in (line.partition(b": ") for line in lines)}
        assert len(headers) == len(lines), head
        return int(start.split()[1]), headers, await self.read(int(headers.get(b"content-length", 0)))

    async def closed(self) -> bool:
        """Waits for the peer's end."""
        try:
            return await self.rest() == b""
        except ConnectionError:
            return True


Connect = Callable[[Server], Awaitable[Wire]]
Serve = Callable[..., Awaitable[Server]]


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    """Ends what a test began, and sees that nothing is left of it."""
    async with AsyncExitStack() as stack:
        yield stack
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    assert not tasks


@pytest.fixture
def start(stack: AsyncExitStack) -> Serve:
    async def start(handler: Handler, **limits: Any) -> Server:
        server = await serve(handler, host="127.0.0.1", port=0, limits=Limits(**limits))
        stack.push_async_callback(server.close)
        return server

    return start


@pytest.fixture
def connect(stack: AsyncExitStack) -> Connect:
    async def connect(server: Server) -> Wire:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        stack.callback(writer.close)
        return Wire(reader, writer)

    return connect


@pytest.fixture
async def pool(stack: AsyncExitStack) -> Pool:
    pool = Pool()
    stack.push_async_callback(pool.close)
    return pool


@pytest.fixture
def until() -> Callable[[Callable[[], Any]], Awaitable[None]]:
    """Waits for a condition on plain state."""

    async def until(condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    return until


@pytest.fixture
def engine(stack: AsyncExitStack) -> Callable[..., Any]:
    """An upstream that answers with raw bytes: called with the connection's number and what it may read and write."""

    async def engine(script: Callable[[int, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> int:
        count = 0
        tasks = set()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal count
            count += 1
            tasks.add(asyncio.current_task())
            try:
                await script(count, reader, writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()
                tasks.discard(asyncio.current_task())

        server = await asyncio.start_server(accept, "127.0.0.1", 0)

        async def stop() -> None:
            server.close()
            running = list(tasks)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

        stack.push_async_callback(stop)
        return server.sockets[0].getsockname()[1]

    return engine


@pytest.fixture
def echo() -> Handler:
    async def echo(request: Request, responder: Responder) -> None:
        responder.send(200, [(b"x-path", request.path.encode())], request.body)

    return echo
