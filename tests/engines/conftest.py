"""An address that answers every request with one page."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from twinpool.http1 import Limits, Request, Responder, serve

Page = Callable[..., Awaitable[str]]


@pytest.fixture
async def http_page() -> AsyncIterator[Page]:
    """`url = await http_page(status, body, **headers)`"""
    async with AsyncExitStack() as stack:

        async def start(status: int, body: bytes, **headers: str) -> str:
            async def answer(request: Request, responder: Responder) -> None:
                responder.send(status, [(name.encode(), value.encode()) for name, value in headers.items()], body)

            server = await serve(answer, host="127.0.0.1", port=0, limits=Limits())
            stack.push_async_callback(server.close)
            return f"http://127.0.0.1:{server.port}"

        yield start
