"""How an answer gets to its client: as a stream, or whole."""

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from twinpool.errors import RequestError
from twinpool.worker.asked import Asked
from twinpool.worker.generation import Handoff
from twinpool.worker.openai_shapes import DONE, ChoiceEvents, Finished, Usage, WholeChoice, new_id, usage_event


def _headers(handoff: Handoff) -> dict[str, str]:
    """So that the gateway need not guess which part of the time to the first token was the handoff's."""
    return {
        "x-twinpool-handoff-s": f"{handoff.seconds:.6f}",
        "x-twinpool-handoff-bytes": str(handoff.kv_bytes),
        "x-twinpool-handoff-transport": handoff.transport,
    }


class StreamedAnswer:
    """Status and headers go out with llama.cpp's first event, so that its refusals still get a status of their own."""

    def __init__(self, asked: Asked, request: web.Request, choices: int) -> None:
        shared = new_id(asked) if choices > 1 else None
        self.response = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-cache"})
        self._asked, self._request = asked, request
        self._choices = [ChoiceEvents(asked, index, shared) for index in range(choices)]
        self._starting = asyncio.Lock()
        self.started = False

    def placed(self, handoff: Handoff) -> None:
        self.response.headers.update(_headers(handoff))

    async def event(self, choice: int, event: bytes) -> None:
        mended = self._choices[choice].mend(event)
        if mended is None:
            return
        if not self.started:
            await self._start()
        await self.response.write(mended)

    def finished(self, choice: int) -> Finished | None:
        return self._choices[choice].finished

    async def end(self, usage: Usage) -> None:
        if self._asked.include_usage:
            await self.response.write(usage_event(self._asked, self._choices[0].kept, usage))
        await self.response.write(DONE)
        await self.response.write_eof()

    async def fail(self, error: RequestError) -> None:
        """Too late for a status: an event says it, and no ``[DONE]`` follows."""
        await self.response.write(b"data: " + msgspec.json.encode(error.envelope()) + b"\n\n")
        await self.response.write_eof()

    async def _start(self) -> None:
        async with self._starting:
            if not self.started:
                await self.response.prepare(self._request)
                self.started = True


class WholeAnswer:
    def __init__(self, asked: Asked, choices: int) -> None:
        self.headers: dict[str, str] = {}
        self._choices = [WholeChoice(asked, index) for index in range(choices)]

    def placed(self, handoff: Handoff) -> None:
        self.headers = _headers(handoff)

    async def event(self, choice: int, event: bytes) -> None:
        self._choices[choice].add(event)

    def finished(self, choice: int) -> Finished | None:
        return self._choices[choice].events.finished

    def kept(self) -> dict[str, Any]:
        first = self._choices[0]
        return first.events.kept | ({"timings": first.timings} if first.timings else {})

    def choices(self) -> list[dict[str, Any]]:
        return [choice.whole() for choice in self._choices]
