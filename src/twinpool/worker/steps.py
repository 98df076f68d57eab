"""What is done with a slot: prefill into it, save it, restore it, write from it.

Every step marks its ticket while llama.cpp works, so that a slot whose request was dropped is waited for.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol

from twinpool.errors import Reason, UnavailableError, UpstreamError
from twinpool.worker.asked import Asked
from twinpool.worker.continuing import OtherwiseError, as_first, body_behind, replay, skip_sent, writes_again
from twinpool.worker.engine import TOKEN_BYTES, Engine, packed, unpacked
from twinpool.worker.metrics import WorkerMetrics
from twinpool.worker.openai_shapes import Finished
from twinpool.worker.prompt import Prompt
from twinpool.worker.shared_memory import KvFolder
from twinpool.worker.slots import Slot, Ticket, reusable_tokens

_log = logging.getLogger(__name__)


class Listener(Protocol):
    """Whoever gets a choice's events."""

    async def event(self, choice: int, event: bytes) -> None: ...

    def finished(self, choice: int) -> Finished | None: ...


class Steps:
    def __init__(self, engine: Engine, folder: KvFolder, metrics: WorkerMetrics) -> None:
        self.engine, self.folder, self.metrics = engine, folder, metrics
        self._kept: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        if self._kept:
            await asyncio.wait(self._kept)

    async def prefill(self, ticket: Ticket, slot: Slot, prompt: Prompt, asked: Asked) -> int:
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

    async def save(self, ticket: Ticket, slot: Slot, prompt: Prompt, name: str) -> int:
        expected = self.engine.facts.kv_bytes(len(prompt.kv) // TOKEN_BYTES)
        try:
            async with _engine_at_work(ticket):
                written = await _to_its_end(self.engine.save(slot.number, name))
            if written < expected:
                raise _no_room(f"only {written} of {expected} bytes of KV could be kept")
        except UpstreamError as error:
            self.folder.remove(name)
            raise _no_room(f"the KV could not be kept: {error.message}") from error
        except BaseException:
            self.folder.remove(name)
            raise
        return written

    async def restore(self, ticket: Ticket, slot: Slot, prompt: Prompt, name: str) -> None:
        slot.prompt = b""
        async with _engine_at_work(ticket):
            await _to_its_end(self.engine.restore(slot.number, name))
        slot.prompt = prompt.tokens

    async def write(
        self, ticket: Ticket, slot: Slot, asked: Asked, prompt: Prompt, index: int, nth: int, listener: Listener
    ) -> None:
        """The last prompt token and the answer."""
        body = _body(asked, prompt, slot.number, nth, self.engine.facts.context_tokens)
        path = "/v1/chat/completions" if asked.endpoint == "chat" else "/v1/completions"
        async with _engine_at_work(ticket):
            if asked.sent is None:
                await self._pass_on(path, body, index, listener)
            else:
                await self._write_rest(path, body, asked, asked.sent, prompt, listener)
        end = listener.finished(index)
        if end is None:
            raise UpstreamError("the engine's stream ended before its answer did")
        self.metrics.prompt_tokens_computed.inc(end.computed_prompt_tokens)
        self.metrics.generation_tokens.inc(end.completion_tokens)
        if end.computed_prompt_tokens > 1:
            _log.error("the engine computed %d prompt tokens again: its tokens are not ours", end.computed_prompt_tokens)

    async def _pass_on(self, path: str, body: dict[str, Any], index: int, listener: Listener) -> None:
        async with self.engine.stream(path, body) as events:
            async for event in events:
                await listener.event(index, event)

    async def _write_rest(
        self, path: str, body: dict[str, Any], asked: Asked, sent: str, prompt: Prompt, listener: Listener
    ) -> None:
        """What comes behind the text that another engine wrote; see `continuing`."""
        slot = body["id_slot"]
        if writes_again(asked):
            try:
                async with self.engine.stream(path, body) as events:
                    async for event in skip_sent(events, sent):
                        await listener.event(0, event)
            except OtherwiseError:
                await self.engine.settle(slot)
            else:
                return
        tokens = await replay(self.engine, slot, prompt, sent)
        async with self.engine.stream("/v1/completions", body_behind(body, prompt, tokens)) as events:
            async for event in events:
                await listener.event(0, as_first(event, asked, len(tokens)))

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)

    def check_room(self, prompt: Prompt) -> None:
        needed, free = self.engine.facts.kv_bytes(prompt.count), self.folder.free_bytes()
        if needed > free:
            raise _no_room(f"the KV of this prompt takes {needed} bytes of {self.folder.path.parent}, {free} are free")


def _no_room(message: str) -> UnavailableError:
    """Nothing can be handed over now; one worker could still do all of the request."""
    return UnavailableError(message, Reason.HANDOFF_FAILED, retry_after_s=1)


async def _to_its_end(copying: Coroutine[Any, Any, int]) -> int:
    """A copy of KV is not left half-way by a client that leaves: llama.cpp might still make it when its file was removed, or
    when its slot is somebody else's. It takes milliseconds, behind at most one step."""
    task = asyncio.ensure_future(copying)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # whatever it is, its request has gone
        raise


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
