"""A `StepEngine` behind the embedded worker's routes: its identity, and chat completions with the two legs of a handoff.

A prompt says how long it and its answer are; `prompt_of` writes it, four letters a token.
"""

import asyncio
from typing import Any

import msgspec
from tests.agreement.step_engine import Sequence, StepEngine
from tests.agreement.virtual_time import in_turn

from twinpool.core.model import WorkerFacts
from twinpool.http1 import Request, Responder, Server, serve
from twinpool.profile import Profile
from twinpool.sim.fleet import Kind
from twinpool.sim.link import Ports, handed_over_at

LEG_HEADER = b"x-leg"
"""Which of all legs this is, counted as they are sent. Some go by a connection that has to be made first."""

_JSON = [(b"content-type", b"application/json")]
_STREAM = (b"content-type", b"text/event-stream")
_CHARS_PER_TOKEN = 4


def prompt_of(number: int, prompt_tokens: int, output_tokens: int) -> str:
    return f"{output_tokens} tokens for {number}: ".ljust(prompt_tokens * _CHARS_PER_TOKEN, "x")


def word_of(prompt: str, number: int) -> str:
    """The token with that number, from 1, of the answer to such a prompt: nobody else's."""
    return f"{prompt.partition(':')[0].split()[-1]}.{number} "


class _Message(msgspec.Struct):
    content: str


class _Body(msgspec.Struct):
    messages: list[_Message]
    kv_transfer_params: dict[str, Any] = {}


class EngineService:
    """One worker of the fleet. `peers` are all of them, by name."""

    def __init__(self, facts: WorkerFacts, kind: Kind, engine: StepEngine, dispatch_s: float) -> None:
        self.facts = facts
        self.peers: dict[str, EngineService] = {}
        self._profile: Profile = kind.profile
        self._latency_s = self._profile.handoff_latency_ms / 1e3
        self._engine = engine
        self._dispatch_s = dispatch_s
        self._ports = Ports.of(self._profile.handoff_bytes_per_s)
        self._held: dict[str, int] = {}
        self._server: Server
        self._steps: asyncio.Task[None]

    async def start(self) -> None:
        self._server = await serve(self._handle, host="127.0.0.1", port=0)
        self._steps = asyncio.get_running_loop().create_task(self._engine.run())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.port}"

    async def close(self) -> None:
        if self._held:
            raise RuntimeError(f"{self.facts.worker} still holds {len(self._held)} prompts")
        self._steps.cancel()
        await asyncio.gather(self._steps, return_exceptions=True)
        await self._server.close()

    async def _handle(self, request: Request, responder: Responder) -> None:
        if request.path == "/twinpool/identity":
            responder.send(200, _JSON, self._identity())
            return
        body = msgspec.json.decode(request.body, type=_Body)
        content = body.messages[0].content
        prompt_tokens, output_tokens = len(content) // _CHARS_PER_TOKEN, int(content.partition(" ")[0])
        await self._arrive(int(request.header(LEG_HEADER) or 0))
        kv = body.kv_transfer_params
        if kv.get("do_remote_decode"):
            await self._read(request, responder, prompt_tokens)
        else:
            await self._write(responder, content, prompt_tokens, output_tokens, kv)

    async def _arrive(self, leg: int) -> None:
        """Those that are sent at one moment come in the order in which they were sent, to whichever engines."""
        await asyncio.sleep(self._dispatch_s)
        await in_turn(leg)

    def _identity(self) -> bytes:
        facts = self.facts
        return msgspec.json.encode(
            {
                "engine": "steps",
                "engine_version": "1",
                "incarnation": facts.incarnation,
                "model": facts.models[0],
                "slots": facts.slots,
                "context_tokens": facts.context_tokens,
                "lease_s": facts.lease_s,
                "continues": facts.continues,
            }
        )

    async def _read(self, request: Request, responder: Responder, prompt_tokens: int) -> None:
        done = asyncio.get_running_loop().create_future()
        self._engine.submit(Sequence(prompt_tokens, 1, on_read=lambda: done.set_result(None)))
        await done
        name = (request.header(b"x-request-id") or b"").decode()
        self._held[name] = prompt_tokens
        handle = {"do_remote_prefill": True, "remote_engine_id": self.facts.worker, "remote_request_id": name}
        answer = {"choices": [], "usage": _usage(prompt_tokens, 1), "kv_transfer_params": handle}
        responder.send(200, _JSON, msgspec.json.encode(answer))

    async def _write(
        self, responder: Responder, content: str, prompt_tokens: int, output_tokens: int, kv: dict[str, Any]
    ) -> None:
        done = asyncio.get_running_loop().create_future()

        def token(number: int) -> None:
            if not responder.started:
                responder.start(200, [_STREAM, *headers])
            said = {"content": word_of(content, number)}
            responder.write(_event({"choices": [{"index": 0, "delta": said, "finish_reason": None}]}))
            if number == output_tokens:
                responder.write(_event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
                responder.write(_event({"choices": [], "usage": _usage(prompt_tokens, output_tokens)}))
                responder.write(b"data: [DONE]\n\n")
                done.set_result(None)

        sequence = Sequence(prompt_tokens, output_tokens, on_token=token)
        headers: list[tuple[bytes, bytes]] = []
        if kv.get("do_remote_prefill"):
            headers.append((b"x-twinpool-handoff-s", b"%.9f" % await self._fetch(kv)))
            self._engine.join(sequence)
        else:
            self._engine.submit(sequence)
        await done
        responder.finish()

    async def _fetch(self, kv: dict[str, Any]) -> float:
        """Pull the KV of a handle; how long that took, seconds."""
        loop = asyncio.get_running_loop()
        source = self.peers[kv["remote_engine_id"]]
        tokens = source._held.pop(kv["remote_request_id"])
        began = loop.time()
        ends = handed_over_at(began, tokens * self._profile.kv_bytes_per_token, source._ports, self._ports, self._latency_s)
        await asyncio.sleep(ends - began)
        source._engine.free(tokens)
        return loop.time() - began


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def _event(what: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode({"id": "x", "object": "chat.completion.chunk", "model": "m", **what})
