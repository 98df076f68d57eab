"""One request, from its body to its last byte.

decide ─► Reply: as scripted
  └─────► Default: understand ─► pull KV, or read the prompt ─► say it, token by token or whole
"""

import asyncio
from collections.abc import Iterator
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from twinpool.engines.scripted.answers import GARBAGE, Text, chat_logprobs, prompt_tokens, text_logprobs
from twinpool.engines.scripted.ledger import BLOCK_TOKENS
from twinpool.engines.scripted.request import Objection, understand
from twinpool.engines.scripted.script import Default, End, Recorded, Reply, error_envelope
from twinpool.http1.lost import UpstreamLost
from twinpool.http1.responder import Responder, reset

if TYPE_CHECKING:
    from twinpool.engines.scripted.engine import ScriptedEngine

_GARBAGE_TEXT = Text(tuple(f" {GARBAGE}.{index}" for index in range(7)), "stop", 7)
_encode = msgspec.json.encode


async def serve_completion(engine: "ScriptedEngine", recorded: Recorded, responder: Responder) -> None:
    """Answer as the script decides; the scripts' delays happen here."""
    decision = engine.script.decide(recorded)
    if isinstance(decision, Reply):
        if decision.pulls_kv and recorded.takes_over:
            await engine.pull(recorded.kv_transfer_params or {})
        await play(engine, decision, recorded, responder)
        return
    try:
        await _Serving(engine, recorded, responder, decision).run()
    except Objection as objection:
        recorded.status = objection.status
        body = error_envelope(objection.status, objection.message, objection.kind, objection.param)
        responder.send(objection.status, [(b"content-type", b"application/json")], _encode(body))


async def play(engine: "ScriptedEngine", reply: Reply, recorded: Recorded, responder: Responder) -> None:
    """A scripted reply."""
    await engine.pause(reply.head_delay_s)
    recorded.status = reply.status
    if reply.chunks is None:
        responder.start(reply.status, reply.headers, length=len(reply.body))
        responder.write(reply.body)
    elif not reply.is_raw:
        responder.start(reply.status, reply.headers)
    for delay_s, chunk in reply.chunks or ():
        await engine.pause(delay_s)
        await asyncio.sleep(0)  # each in a packet of its own; and an endless reply must end when the client leaves
        while responder.is_paused:
            await writable(responder)
        if reply.is_raw:
            responder.transport.write(chunk)
        else:
            responder.write(chunk)
    await end(reply.end, responder, is_raw=reply.is_raw)


async def end(how: End, responder: Responder, *, is_raw: bool = False) -> None:
    if how is End.HANG:
        await asyncio.get_running_loop().create_future()  # until the client leaves, which cancels this
    elif how is End.RESET:
        await _flushed(responder)
        reset(responder.transport)
        responder.abort()
    elif how is End.CLOSE or is_raw:
        responder.abort()
    else:
        responder.finish()


async def writable(responder: Responder) -> None:
    """Until the client has read some of what it has."""
    resumed = asyncio.Event()
    responder.on_resume = resumed.set
    await resumed.wait()


async def _flushed(responder: Responder) -> None:
    """A reset drops what has not been sent yet, and no event tells when it has: it takes a turn or two of the loop."""
    for _ in range(100):
        if not responder.transport.get_write_buffer_size() or responder.transport.is_closing():
            return
        await asyncio.sleep(0)


class _Serving:
    """The engine's own answer to one request."""

    def __init__(self, engine: "ScriptedEngine", recorded: Recorded, responder: Responder, but: Default) -> None:
        self._engine = engine
        self._script = engine.script
        self._recorded = recorded
        self._responder = responder
        self._but = but
        self._pulled_tokens = 0
        self._handoff_took_s = 0.0

    async def run(self) -> None:
        is_chat = self._recorded.path.endswith("/chat/completions")
        try:
            asked = self._asked = understand(self._recorded.body, is_chat=is_chat, script=self._script)
        except Objection:
            if self._recorded.takes_over and not self._script.is_embedded:
                await self._engine.let_go(self._recorded.kv_transfer_params or {})
            raise
        self._id = f"{'chatcmpl' if is_chat else 'cmpl'}-{self._engine.next_id()}"
        await self._engine.pause(self._but.delay_s)
        self._prompt_tokens = sum(map(prompt_tokens, asked.prompts))
        texts = await self._take_over() if asked.takes_over else None
        if texts is None:
            computed = self._prompt_tokens
            await self._engine.pause(self._script.prefill_s_per_token * computed)
            self._engine.computed_prompt_tokens += computed
            texts = [self._text(prompt, choice) for prompt in asked.prompts for choice in range(asked.n)]
        if self._script.caches_prompts:
            is_garbage = self._engine.cached.setdefault(self._cached_as(asked.prompts[0]), texts[0] is _GARBAGE_TEXT)
            texts = [_GARBAGE_TEXT] * len(texts) if is_garbage else texts
        self._engine.prompt_tokens += self._prompt_tokens
        if asked.streams:
            await self._stream(texts)
        else:
            await self._whole(texts)

    def _text(self, prompt: str, choice: int) -> Text:
        room = self._script.max_model_tokens - prompt_tokens(prompt)
        return self._asked.text(prompt, choice, self._script.answer_tokens, room)

    # The handoff

    async def _take_over(self) -> list[Text] | None:
        """What the pulled KV makes this engine say, whatever its own prompt is. None: read the prompt after all."""
        kv = self._asked.kv
        peer = f"{kv.get('remote_host')}:{kv.get('remote_port')}"
        began = monotonic()
        await self._engine.pause(self._script.handoff_s)
        try:
            if peer in self._script.poisoned_peers:
                raise ConnectionError(f"the pair with {peer} is poisoned")
            pulled = await self._engine.pull(kv)
        except (ConnectionError, UpstreamLost, TypeError, ValueError) as error:
            self._engine.failed_transfers += 1
            if self._script.load_failure == "recompute":
                return None
            raise Objection(f"KV load failed: {error}", status=500, kind="InternalServerError") from error
        if pulled.is_unreadable:
            raise Objection("kv_not_ready", status=503, kind="ServiceUnavailable")
        if pulled.prompt is None:
            return [_GARBAGE_TEXT] * self._asked.n
        self._handoff_took_s = monotonic() - began
        self._count_pulled(pulled.tokens)
        if peer in self._script.garbled_peers:
            return [_GARBAGE_TEXT] * self._asked.n
        garbage = [_GARBAGE_TEXT] * (self._asked.n - 1)  # the first choice has spent the handle
        return [self._text(pulled.prompt, 0), *garbage]

    def _cached_as(self, prompt: str) -> tuple[str | None, str]:
        return self._recorded.body.get("cache_salt"), prompt

    def _count_pulled(self, tokens: int) -> None:
        """The last token of a prompt is computed here all the same. A prompt in the engine's own cache is not read from P."""
        engine, prompt = self._engine, self._asked.prompts[0]
        engine.computed_prompt_tokens += 1
        if self._script.caches_prompts and self._cached_as(prompt) in engine.cached:
            return
        self._pulled_tokens = tokens
        engine.pulled_tokens += tokens
        engine.pulls += 1
        engine.pulled_bytes += -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS * self._script.bytes_per_token
        engine.pulled_s += self._handoff_took_s

    def _handoff_headers(self) -> list[tuple[bytes, bytes]]:
        """What the embedded worker says of a handoff."""
        if not (self._pulled_tokens and self._script.is_embedded and self._script.tells_handoff):
            return []
        moved = self._pulled_tokens * self._script.bytes_per_token
        return [(b"x-twinpool-handoff-s", b"%.6f" % self._handoff_took_s), (b"x-twinpool-handoff-bytes", b"%d" % moved)]

    def _handle(self) -> dict[str, Any]:
        """What prefill adds to its answer."""
        if not self._asked.hands_over or self._but.handle == "absent" or self._script.connector == "none":
            return {}
        if not isinstance(self._but.handle, str):
            return {"kv_transfer_params": self._but.handle}
        prompt = self._asked.prompts[0]
        return {"kv_transfer_params": self._engine.hold(prompt, prompt_tokens(prompt))}

    # The answer

    async def _whole(self, texts: list[Text]) -> None:
        for _ in range(max(text.shown_tokens for text in texts)):
            await self._engine.step()
        self._engine.generated_tokens += sum(text.shown_tokens for text in texts)
        if self._but.end is not End.END:
            await end(self._but.end, self._responder, is_raw=True)
            return
        answer = self._envelope("chat.completion" if self._asked.is_chat else "text_completion")
        answer["choices"] = [self._whole_choice(index, text) for index, text in enumerate(texts)]
        answer["usage"] = self._usage(sum(text.shown_tokens for text in texts))
        answer |= self._handle()
        self._recorded.status = 200
        self._responder.send(200, [(b"content-type", b"application/json"), *self._handoff_headers()], _encode(answer))

    def _whole_choice(self, index: int, text: Text) -> dict[str, Any]:
        content = "".join(text.tokens)
        choice: dict[str, Any] = {"index": index, "finish_reason": self._but.finish_reason or text.finish_reason}
        choice["logprobs"] = self._logprobs(list(enumerate(text.tokens)), 0)
        if self._asked.is_chat:
            choice["message"] = {"role": "assistant", "content": content}
        else:
            choice["text"] = content
        return choice

    async def _stream(self, texts: list[Text]) -> None:
        self._recorded.status = 200
        self._responder.start(200, [(b"content-type", b"text/event-stream; charset=utf-8"), *self._handoff_headers()])
        for sent, (waits, event) in enumerate(self._events(texts)):
            if sent == self._but.stops_after_events:
                break
            if waits:
                await self._engine.step()
            while self._responder.is_paused:
                await writable(self._responder)
            self._responder.write(b"data: %b\n\n" % (event if isinstance(event, bytes) else _encode(event)))
        else:
            self._responder.finish()
            return
        await end(self._but.end, self._responder)

    def _events(self, texts: list[Text]) -> Iterator[tuple[bool, Any]]:
        """Each event, and whether a step of the model comes before it."""
        asked = self._asked
        if asked.is_chat:
            for index in range(len(texts)):
                yield False, self._event(index, {"role": "assistant", "content": ""}, None, 0)
        done = 0
        offsets = [0] * len(texts)
        for position in range(max(len(text.tokens) for text in texts)):
            waits = True
            for index, text in enumerate(texts):
                if position < len(text.tokens):
                    token = text.tokens[position]
                    done += 1
                    self._engine.generated_tokens += 1
                    event = self._event(index, {"content": token}, None, done)
                    event["choices"][0]["logprobs"] = self._logprobs([(position, token)], offsets[index])
                    offsets[index] += len(token)
                    yield waits, event
                    waits = False
        for index, text in enumerate(texts):
            yield False, self._event(index, {}, self._but.finish_reason or text.finish_reason, done)
        if asked.includes_usage:
            event = self._envelope("chat.completion.chunk" if asked.is_chat else "text_completion")
            yield False, event | {"choices": [], "usage": self._usage(done)}
        yield False, b"[DONE]"

    def _event(self, index: int, delta: dict[str, str], finish_reason: str | None, done: int) -> dict[str, Any]:
        event = self._envelope("chat.completion.chunk" if self._asked.is_chat else "text_completion")
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": finish_reason}
        if self._asked.is_chat:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        event["choices"] = [choice]
        if self._asked.usage_in_every_event:
            event["usage"] = self._usage(done)
        return event

    def _logprobs(self, tokens: list[tuple[int, str]], offset: int) -> dict[str, Any] | None:
        if self._asked.logprobs is None:
            return None
        if self._asked.is_chat:
            return chat_logprobs(tokens, self._asked.logprobs)
        return text_logprobs(tokens, self._asked.logprobs, offset)

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": 1_700_000_000, "model": self._asked.model}

    def _usage(self, completion_tokens: int) -> dict[str, Any]:
        cached = max(self._pulled_tokens - 1, 0)  # vLLM's decode side calls the tokens it pulled cached
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
            **self._but.usage,
        }
