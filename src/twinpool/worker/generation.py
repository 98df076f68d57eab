"""One request's work on the engine: read the prompt (or take its KV), then write.

    prompt ──► KV of all its tokens but the last, in a slot ──► last token, and every new one
                 prefill here, or a handoff, or another choice's

**Why the last prompt token is a step of its own, always.** llama.cpp's arithmetic rounds by the shape of the batch. A
decode worker cannot but compute the last prompt token alone; a plain colocated request computes it within a batch.
Measured with the default model (Q8_0, temperature 0, 48 new tokens, prompts of 70 to 300 tokens), the two then wrote
different texts for two prompts out of three. So every path here has the same two steps, and differs only in how the
KV came into the slot: handed-over, colocated and n>1 answers are equal by construction. The price is one decode step
for what had been one more token of a batch: 5 to 10 ms of a prefill of 0.1 to 30 s.

**Why prefixes are reused in blocks.** For the same reason: a prompt that goes on from a cached prefix is cut into
batches elsewhere than a cold one. Reuse is therefore cut back to where a cold prefill would have cut, and generated
tokens (computed one at a time) are never reused as prompt. Cutting back costs one step: a token that nobody has,
written where the reuse is to end.

All this holds on an engine that is not computing for others at the same time; batches shared with other streams have
other shapes.
"""

import asyncio
import secrets
import time
from typing import Protocol

import msgspec

from twinpool.errors import RequestError
from twinpool.worker.asked import Asked
from twinpool.worker.handing_over import HandingOver
from twinpool.worker.openai_shapes import Usage
from twinpool.worker.prompt import Prompt
from twinpool.worker.pull import kv_file_name
from twinpool.worker.settings import WorkerSettings
from twinpool.worker.signing import Handle
from twinpool.worker.slots import SlotPool
from twinpool.worker.steps import Listener, Steps


class Handoff(msgspec.Struct, frozen=True):
    """What it took to get a prompt's KV here."""

    seconds: float
    kv_bytes: int
    transport: str


class Consumer(Listener, Protocol):
    """Whoever gets a request's events: a stream, or what adds up a whole answer."""

    def placed(self, handoff: Handoff) -> None:
        """The KV of a decode leg is in its slot."""


class Request(msgspec.Struct, frozen=True):
    """One request, with its prompts read and its handle checked."""

    asked: Asked
    prompts: list[Prompt]
    handle: Handle | None
    arrived: float
    consumer: Consumer


class Generator:
    """Runs whole requests and decode legs."""

    def __init__(self, settings: WorkerSettings, steps: Steps, pool: SlotPool, handing_over: HandingOver) -> None:
        self._settings, self._steps, self._pool, self._handing_over = settings, steps, pool, handing_over

    async def run(self, request: Request) -> Usage:
        """Runs every choice to its end; its events go to the consumer as they come."""
        asked, prompts, consumer = request.asked, request.prompts, request.consumer
        if len(prompts) * asked.choices == 1:
            cached = await self._first_choice(request, 0, None)
        else:
            cached = await self._run_many(request)
        ends = [consumer.finished(index) for index in range(len(prompts) * asked.choices)]
        written = sum(end.completion_tokens for end in ends if end)
        return Usage(sum(prompt.count for prompt in prompts), written, cached)

    async def _run_many(self, request: Request) -> int:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._run_prompt(request, nth)) for nth in range(len(request.prompts))]
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        return sum(task.result() for task in tasks)

    async def _run_prompt(self, request: Request, nth: int) -> int:
        """All choices of one prompt; how many of its tokens were cached."""
        if request.asked.choices == 1:
            return await self._first_choice(request, nth, None)
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(self._first_choice(request, nth, ready))
                for choice in range(1, request.asked.choices):
                    group.create_task(self._further_choice(request, nth, choice, ready))
        finally:
            if ready.done() and not ready.cancelled():
                self._steps.folder.remove(ready.result())
        return task.result()

    async def _first_choice(self, request: Request, nth: int, ready: asyncio.Future[str] | None) -> int:
        """The choice that prefills or takes the handoff. With `ready`, the others get a file of the KV through it."""
        asked, prompt, handle = request.asked, request.prompts[nth], request.handle
        async with self._pool.join(prompt.tokens) as ticket:
            if handle is None:
                slot = await ticket.slot(self._settings.queue_timeout_s)
                cached = await self._steps.prefill(ticket, slot, prompt, asked)
                if ready is not None:
                    self._steps.check_room(prompt)
                    name = kv_file_name(secrets.token_hex(16))
                    await self._steps.save(ticket, slot, prompt, name)
                    ready.set_result(name)
            else:
                slot, pulled = await self._handing_over.take_over(ticket, handle, prompt, keep=ready is not None)
                cached = handle.cached_tokens
                seconds = time.monotonic() - request.arrived
                self._steps.metrics.handoff_seconds.observe(seconds)
                request.consumer.placed(Handoff(seconds, pulled.kv_bytes, pulled.transport))
                if ready is not None:
                    ready.set_result(pulled.file_name)
            await self._steps.write(ticket, slot, asked, prompt, nth * asked.choices, 0, request.consumer)
        return cached

    async def _further_choice(self, request: Request, nth: int, choice: int, ready: asyncio.Future[str]) -> None:
        asked, prompt = request.asked, request.prompts[nth]
        name = await asyncio.shield(ready)
        async with self._pool.join(prompt.tokens, next_in_line=True) as ticket:
            slot = await ticket.slot()  # without a deadline: the request runs, and the slots' holders end
            await self._steps.restore(ticket, slot, prompt, name)
            await self._steps.write(ticket, slot, asked, prompt, nth * asked.choices + choice, choice, request.consumer)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """A request has one answer: the first of its own errors, else whatever it was."""
    flat: list[BaseException] = []
    pending: list[BaseException] = [errors]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending = [*error.exceptions, *pending]
        else:
            flat.append(error)
    return next((error for error in flat if isinstance(error, RequestError)), flat[0])
