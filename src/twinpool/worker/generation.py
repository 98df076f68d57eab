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
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol

import aiohttp
import msgspec

from twinpool.errors import BadRequestError, HandleError, Reason, RequestError, UnavailableError, UpstreamError
from twinpool.worker.asked import Asked
from twinpool.worker.engine import TOKEN_BYTES, Engine, packed, unpacked
from twinpool.worker.handles import HandleLedger
from twinpool.worker.metrics import WorkerMetrics
from twinpool.worker.openai_shapes import Finished, Usage
from twinpool.worker.pull import Pulled, kv_file_name, pull, release, tokens_in_file
from twinpool.worker.settings import WorkerSettings
from twinpool.worker.shared_memory import KvFolder
from twinpool.worker.signing import Handle, Signer
from twinpool.worker.slots import Slot, SlotPool, Ticket, reusable_tokens

_log = logging.getLogger(__name__)
_RELEASE_S = 5.0


class Handoff(msgspec.Struct, frozen=True):
    """What it took to get a prompt's KV here."""

    seconds: float
    kv_bytes: int
    transport: str


class Consumer(Protocol):
    """Whoever gets a request's events: a stream, or what adds up a whole answer."""

    def placed(self, handoff: Handoff) -> None:
        """The KV of a decode leg is in its slot."""

    async def event(self, choice: int, event: bytes) -> None: ...

    def finished(self, choice: int) -> Finished | None: ...


class Prompt(msgspec.Struct, frozen=True):
    tokens: bytes  # packed

    @property
    def count(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def kv(self) -> bytes:
        """What prefill computes: all but the last token, but not nothing."""
        return self.tokens[:-TOKEN_BYTES] or self.tokens

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.tokens).hexdigest()


class Generator:
    """The worker's parts, and the requests that run through them."""

    def __init__(
        self,
        settings: WorkerSettings,
        engine: Engine,
        folder: KvFolder,
        signer: Signer,
        incarnation: str,
        model_fingerprint: str,
    ) -> None:
        self.settings, self.engine, self.folder, self.signer = settings, engine, folder, signer
        self.incarnation, self.model_fingerprint = incarnation, model_fingerprint
        self.advertised = (settings.advertise_host or settings.host, settings.port)
        self.ledger = HandleLedger(settings.lease_s)
        self.pool = SlotPool(settings.slots, settings.queue_limit, engine.facts.reuse_tokens, engine.settle)
        self.metrics = WorkerMetrics(self.pool, self.ledger)
        self.peers = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False)
        self._kept: set[asyncio.Task[None]] = set()
        self._reaper: asyncio.TimerHandle | None = None

    async def close(self) -> None:
        if self._reaper is not None:
            self._reaper.cancel()
        if self._kept:
            await asyncio.wait(self._kept)
        await self.pool.settled()
        await self.peers.close()

    # -- prompts

    async def prompts(self, asked: Asked) -> list[Prompt]:
        """Raises `BadRequestError` for one that does not fit with what may follow it."""
        if asked.endpoint == "chat":
            text = await self.engine.chat_prompt(asked.rest)
            found = [Prompt(await self.engine.tokenize(text))]
        else:
            found = [
                Prompt(await self.engine.tokenize(prompt) if isinstance(prompt, str) else packed(list(prompt)))
                for prompt in asked.prompts
            ]
        context = self.engine.facts.context_tokens
        for prompt in found:
            if not prompt.count:
                raise BadRequestError("the prompt is empty", Reason.INVALID_VALUE)
            # a prefill leg's one token is not written here, the decode worker checks the client's own limit
            new = 1 if asked.makes_handle else asked.max_tokens or 1
            if prompt.count + new > context:
                raise BadRequestError(
                    f"this model's context is {context} tokens; the prompt has {prompt.count}"
                    + (f", and {asked.max_tokens} more were asked for" if asked.max_tokens else ""),
                    Reason.CONTEXT_LENGTH,
                    param="messages" if asked.endpoint == "chat" else "prompt",
                )
        return found

    # -- the prefill leg

    async def make_handle(self, asked: Asked) -> tuple[dict[str, Any], Usage]:
        """Reads the prompt and keeps its KV for whoever brings the handle."""
        (prompt,) = await self.prompts(asked)
        self._check_room(prompt)
        name = kv_file_name(handle_id := secrets.token_hex(16))
        async with self.pool.join(prompt.tokens) as ticket:
            slot = await ticket.slot(self.settings.queue_timeout_s)
            cached = await self._prefill(ticket, slot, prompt, asked)
            kv_bytes = await self._save(ticket, slot, prompt, name)
        handle = Handle(
            handle_id=handle_id,
            engine_id=self.incarnation,
            host=self.advertised[0],
            port=self.advertised[1],
            prompt_tokens=prompt.count,
            cached_tokens=cached,
            expires_at=round(time.time() + self.ledger.lease_s, 3),
            prompt_sha256=prompt.sha256,
            model=self.model_fingerprint,
        )
        self.ledger.hold(handle_id, self.signer.sign(handle), name, kv_bytes, time.monotonic())
        self._set_reaper()
        return self.signer.write(handle), Usage(prompt.count, 0, cached)

    def forget_handle(self, handle_id: str) -> None:
        """Nobody will read the answer that carried it."""
        try:
            held = self.ledger.release(handle_id, time.monotonic())
        except HandleError:
            return  # claimed or over already
        if held is not None:
            self.folder.remove(held.file_name)
        self._set_reaper()

    def _set_reaper(self) -> None:
        if self._reaper is not None:
            self._reaper.cancel()
        due = self.ledger.next_expiry()
        self._reaper = None
        if due is not None:
            self._reaper = asyncio.get_running_loop().call_later(max(due - time.monotonic(), 0.0), self._reap)

    def _reap(self) -> None:
        for held in self.ledger.expire(time.monotonic()):
            self.folder.remove(held.file_name)
        self._set_reaper()

    # -- everything else: all of a request here, or its decode leg

    async def run(self, asked: Asked, prompts: list[Prompt], arrived: float, consumer: Consumer) -> Usage:
        """Runs every choice to its end; its events go to the consumer as they come."""
        handle = self._checked_handle(asked, prompts)
        if len(prompts) * asked.choices == 1:
            cached = await self._run_prompt(asked, prompts[0], 0, handle, arrived, consumer)
        else:
            cached = await self._run_many(asked, prompts, handle, arrived, consumer)
        ends = [consumer.finished(index) for index in range(len(prompts) * asked.choices)]
        return Usage(sum(prompt.count for prompt in prompts), sum(end.completion_tokens for end in ends if end), cached)

    async def _run_many(
        self, asked: Asked, prompts: list[Prompt], handle: Handle | None, arrived: float, consumer: Consumer
    ) -> int:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._run_prompt(asked, prompt, index * asked.choices, handle, arrived, consumer))
                    for index, prompt in enumerate(prompts)
                ]
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        return sum(task.result() for task in tasks)

    async def _run_prompt(
        self, asked: Asked, prompt: Prompt, first: int, handle: Handle | None, arrived: float, consumer: Consumer
    ) -> int:
        """All choices of one prompt; how many of its tokens were cached."""
        if asked.choices == 1:
            return await self._first_choice(asked, prompt, first, handle, arrived, consumer, None)
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(self._first_choice(asked, prompt, first, handle, arrived, consumer, ready))
                for index in range(first + 1, first + asked.choices):
                    group.create_task(self._further_choice(asked, prompt, index, index - first, ready, consumer))
        finally:
            if ready.done() and not ready.cancelled():
                self.folder.remove(ready.result())
        return task.result()

    async def _first_choice(
        self,
        asked: Asked,
        prompt: Prompt,
        index: int,
        handle: Handle | None,
        arrived: float,
        consumer: Consumer,
        ready: asyncio.Future[str] | None,
    ) -> int:
        """The choice that prefills or takes the handoff. With `ready`, the others get a file of the KV through it."""
        async with self.pool.join(prompt.tokens) as ticket:
            if handle is None:
                slot = await ticket.slot(self.settings.queue_timeout_s)
                cached = await self._prefill(ticket, slot, prompt, asked)
                if ready is not None:
                    self._check_room(prompt)
                    name = kv_file_name(secrets.token_hex(16))
                    await self._save(ticket, slot, prompt, name)
                    ready.set_result(name)
            else:
                slot, pulled = await self._take_over(ticket, handle, asked, prompt, keep=ready is not None)
                cached = handle.cached_tokens
                seconds = time.monotonic() - arrived
                self.metrics.handoff_seconds.observe(seconds)
                consumer.placed(Handoff(seconds, pulled.kv_bytes, pulled.transport))
                if ready is not None:
                    ready.set_result(pulled.file_name)
            await self._write(ticket, slot, asked, prompt, index, 0, consumer)
        return cached

    async def _further_choice(
        self, asked: Asked, prompt: Prompt, index: int, nth: int, ready: asyncio.Future[str], consumer: Consumer
    ) -> None:
        name = await asyncio.shield(ready)
        async with self.pool.join(prompt.tokens, next_in_line=True) as ticket:
            slot = await ticket.slot()  # without a deadline: the request runs, and the slots' holders end
            await self._restore(ticket, slot, prompt, name)
            await self._write(ticket, slot, asked, prompt, index, nth, consumer)

    # -- steps

    async def _prefill(self, ticket: Ticket, slot: Slot, prompt: Prompt, asked: Asked) -> int:
        """Reads the prompt into the slot; how many of its tokens were there already."""
        facts, kv = self.engine.facts, prompt.kv
        cached = reusable_tokens(slot.prompt, prompt.tokens, facts.reuse_tokens) if asked.use_cache else 0
        computed = [0]
        held, slot.prompt = slot.prompt, b""
        try:
            async with _engine_at_work(ticket):
                if cached:
                    await self._cut_back(slot, held, kv, cached)
                await self.engine.prefill(slot.number, kv, keep=bool(cached), computed=computed)
        finally:
            self.metrics.prompt_tokens_computed.inc(computed[0])
        self.metrics.prompt_tokens_cached.inc(cached)
        slot.prompt = prompt.tokens
        return cached

    async def _cut_back(self, slot: Slot, held: bytes, wanted: bytes, tokens: int) -> None:
        """Leaves the slot with exactly the first `tokens` of the prompt, plus one token that neither prompt has
        there."""
        at = tokens * TOKEN_BYTES
        taken = {unpacked(prompt[at : at + TOKEN_BYTES])[0] for prompt in (held, wanted) if len(prompt) > at}
        other = next(token for token in range(3) if token not in taken)
        self.metrics.prompt_tokens_computed.inc(
            await self.engine.prefill(slot.number, wanted[:at] + packed([other]), keep=True)
        )

    async def _save(self, ticket: Ticket, slot: Slot, prompt: Prompt, name: str) -> int:
        expected = self.engine.facts.kv_bytes(len(prompt.kv) // TOKEN_BYTES)
        try:
            async with _engine_at_work(ticket):
                written = await self.engine.save(slot.number, name)
            if written < expected:
                raise UnavailableError(f"only {written} of {expected} bytes of KV could be kept", retry_after_s=1)
        except BaseException:
            self._keep(self._remove_when_settled(slot.number, name))  # llama.cpp may still be writing it
            raise
        return written

    async def _remove_when_settled(self, slot: int, name: str) -> None:
        try:
            await self.engine.settle(slot)
        finally:
            self.folder.remove(name)

    async def _restore(self, ticket: Ticket, slot: Slot, prompt: Prompt, name: str) -> None:
        slot.prompt = b""
        async with _engine_at_work(ticket):
            await self.engine.restore(slot.number, name)
        slot.prompt = prompt.tokens

    async def _write(
        self, ticket: Ticket, slot: Slot, asked: Asked, prompt: Prompt, index: int, nth: int, consumer: Consumer
    ) -> None:
        """The last prompt token and the answer."""
        body = _body(asked, prompt, slot.number, nth, self.engine.facts.context_tokens)
        path = "/v1/chat/completions" if asked.endpoint == "chat" else "/v1/completions"
        async with _engine_at_work(ticket), self.engine.stream(path, body) as events:
            async for event in events:
                await consumer.event(index, event)
        end = consumer.finished(index)
        if end is None:
            raise UpstreamError("the engine's stream ended before its answer did")
        self.metrics.prompt_tokens_computed.inc(end.computed_prompt_tokens)
        self.metrics.generation_tokens.inc(end.completion_tokens)
        if end.computed_prompt_tokens > 1:
            _log.error("the engine computed %d prompt tokens again: its tokens are not ours", end.computed_prompt_tokens)

    # -- the handoff

    def _checked_handle(self, asked: Asked, prompts: list[Prompt]) -> Handle | None:
        """Everything that can be known before anybody is asked. The handle stays good if this raises."""
        if asked.handle is None:
            return None
        handle = self.signer.read(asked.handle)
        if handle.model != self.model_fingerprint:
            raise HandleError("this KV handle was made with another model, engine or number of slots", Reason.HANDLE_FOREIGN)
        if handle.prompt_sha256 != prompts[0].sha256 or handle.prompt_tokens != prompts[0].count:
            raise BadRequestError(
                "this KV handle was made for another prompt", Reason.INVALID_VALUE, param="kv_transfer_params"
            )
        return handle

    async def _take_over(
        self, ticket: Ticket, handle: Handle, asked: Asked, prompt: Prompt, *, keep: bool
    ) -> tuple[Slot, Pulled]:
        """Pulls the KV while the ticket waits, and puts it into its slot. The file goes, unless it is to be kept for
        more choices."""
        params = asked.handle or {}
        try:
            pulled = await pull(
                self.peers,
                handle,
                params,
                self.folder,
                offer_shared_memory=self.settings.shared_memory,
                timeout_s=self.settings.pull_timeout_s,
            )
        except HandleError:
            raise  # it has an end already
        except BaseException:  # above all a client that has gone, maybe in order to release the handle
            self._keep(self._release(handle, params["twinpool_signature"]))
            raise
        self.metrics.handoff_bytes.labels("in", pulled.transport).inc(pulled.kv_bytes)
        kept = False
        try:
            if tokens_in_file(self.folder.file(pulled.file_name)) != prompt.kv:
                raise UpstreamError("the KV handed over is another prompt's", Reason.HANDOFF_FAILED)
            slot = await ticket.slot(self.settings.queue_timeout_s)
            try:
                await self._restore(ticket, slot, prompt, pulled.file_name)
            except BadRequestError as error:  # llama.cpp's word for a file it does not like; the client has done nothing wrong
                raise UpstreamError(f"the KV handed over is not good here: {error}", Reason.HANDOFF_FAILED) from None
            slot.prompt = (
                b""  # never reused: the colocated run that proves a handoff right must not start from that handoff's KV
            )
            kept = keep
        finally:
            if not kept:
                self.folder.remove(pulled.file_name)
        self.metrics.prompt_tokens_handed_over.inc(len(prompt.kv) // TOKEN_BYTES)
        return slot, pulled

    async def _release(self, handle: Handle, signature: str) -> None:
        try:
            await release(self.peers, handle, signature, _RELEASE_S)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            _log.warning("handle %s is left to its lease: %s", handle.handle_id, error)
        finally:
            self.folder.remove(kv_file_name(handle.handle_id))  # a claim on its way may still have moved it here

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)

    def _check_room(self, prompt: Prompt) -> None:
        needed, free = self.engine.facts.kv_bytes(prompt.count), self.folder.free_bytes()
        if needed > free:
            raise UnavailableError(
                f"the KV of this prompt takes {needed} bytes of {self.folder.path.parent}, {free} are free", retry_after_s=1
            )


@asynccontextmanager
async def _engine_at_work(ticket: Ticket) -> AsyncIterator[None]:
    """Marks the slot as one to be waited for, should this be left by an error or a cancellation."""
    ticket.dropped = True
    yield
    ticket.dropped = False


def _body(asked: Asked, prompt: Prompt, slot: int, nth: int, context_tokens: int) -> dict[str, Any]:
    """What llama.cpp is asked for one choice."""
    body = {
        **asked.rest,
        "id_slot": slot,
        "cache_prompt": True,  # the slot holds all but the last token of exactly this prompt
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": min(asked.max_tokens or context_tokens, context_tokens - prompt.count),
    }
    if asked.endpoint == "completions":
        body["prompt"] = unpacked(prompt.tokens)
    if asked.timings:
        body["timings_per_token"] = True
    if asked.seed is not None:
        body["seed"] = (asked.seed + nth) % 2**32
    if asked.logprobs is not None:
        top = max(asked.logprobs, 1)  # 0 would turn them off
        body |= {"logprobs": True, "top_logprobs": top} if asked.endpoint == "chat" else {"logprobs": top}
    return body


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
