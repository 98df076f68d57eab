"""The engine as its peers and its tests see it: an address, a life, what it was asked, what it holds.

stopped ──start()──► up ──stop()──► stopped        restart(): both; the same port, a new incarnation
"""

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from types import TracebackType
from typing import Any, Self, cast
from uuid import uuid4

import msgspec

from twinpool.engines.scripted import metrics, pages, remote
from twinpool.engines.scripted.ledger import Ledger
from twinpool.engines.scripted.script import Recorded, Script, error_envelope
from twinpool.engines.scripted.serving import serve_completion
from twinpool.http1.client import Pool
from twinpool.http1.exchange import Origin
from twinpool.http1.lost import UpstreamLost
from twinpool.http1.messages import Limits, Request
from twinpool.http1.responder import Responder
from twinpool.http1.server import Server, serve

_COMPLETIONS = ("/v1/chat/completions", "/v1/completions")
_OTHERS = frozenset(
    f"{prefix}/{name}"
    for prefix in ("", "/v1")
    for name in ("embeddings", "pooling", "classify", "rerank", "score", "tokenize", "detokenize")
)
_PULL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a prefill engine gave out. `prompt` is None where there was nothing to give."""

    prompt: str | None
    tokens: int
    is_unreadable: bool


class ScriptedEngine:
    """`async with ScriptedEngine(script) as engine: engine.url`. Everything here may be read at any time."""

    def __init__(self, script: Script | None = None, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.script = script or Script()
        self.host = host
        self.port = port
        self.incarnation = 0
        self.started_s = 0.0
        self.recorded: list[Recorded] = []
        """Completion requests, in the order they came; over all incarnations."""
        self.peak_running = 0
        self.pages: Counter[str] = Counter()
        """How often each other page was asked for: probes and scrapes."""
        self._server: Server | None = None
        self._tasks: dict[Recorded, asyncio.Task[None]] = {}
        self._reset_counts()

    def _reset_counts(self) -> None:
        self.ledger = Ledger(f"scripted-{uuid4()}", monotonic)
        self.running = 0
        self.prompt_tokens = 0
        self.computed_prompt_tokens = 0
        self.generated_tokens = 0
        self.pulled_tokens = 0
        self.pulls = 0
        self.pulled_bytes = 0
        self.pulled_s = 0.0
        self.cached: dict[tuple[str | None, str], bool] = {}  # by salt and prompt: whether what it has of it is garbage
        self.noticed_late_reads = 0
        self.failed_transfers = 0
        self._ids = 0

    # Life

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def address(self) -> str:
        """As in `Script.poisoned_peers`."""
        return f"{self.host}:{self.port}"

    @property
    def connections(self) -> int:
        return self._server.connections if self._server else 0

    async def start(self) -> None:
        """Listen, on the same port as before; a new incarnation, which knows no handle of the one before."""
        self.incarnation += 1
        self.started_s = self.incarnation + monotonic() % 1  # no other life of an engine at this address has the same
        self._reset_counts()
        self._pool = Pool()
        self._server = await serve(self._handle, host=self.host, port=self.port, limits=Limits(max_body_bytes=64 << 20))
        self.port = self._server.port

    async def stop(self) -> None:
        """Close every connection and wait for what runs to be cancelled. Does nothing to a stopped engine."""
        server, self._server = self._server, None
        if server is not None:
            await server.close()
            await self._pool.close()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    # For tests

    @property
    def last(self) -> Recorded:
        return self.recorded[-1]

    def requests(self, path: str = "") -> list[Recorded]:
        return [recorded for recorded in self.recorded if recorded.path.endswith(path)]

    @property
    def is_idle(self) -> bool:
        """Nothing runs and no handle is held: what every test should end with."""
        return self.running == 0 and self.ledger.held == 0

    # For serving

    async def pause(self, delay_s: float) -> None:
        if delay_s > 0:
            await asyncio.sleep(delay_s * self.script.time_scale)

    async def step(self) -> None:
        """Until the model has written one more token."""
        if self.script.steps is not None:
            await self.script.steps.acquire()
        else:
            await self.pause(self.script.token_interval_s)

    def next_id(self) -> str:
        self._ids += 1
        return f"{self.ledger.engine_id[-12:]}-{self._ids}"

    def hold(self, prompt: str, tokens: int) -> dict[str, Any]:
        """Keep a prompt's KV for another engine; vLLM's dictionary for it."""
        script = self.script
        handle = self.ledger.hold(
            prompt,
            tokens,
            lease_s=script.lease_s * script.time_scale,
            readable_after_s=script.kv_readable_after_s * script.time_scale,
        )
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(handle.blocks))],
            "remote_engine_id": self.ledger.engine_id,
            "remote_request_id": handle.request_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
            **({"twinpool_signature": f"signed {handle.request_id}"} if script.is_embedded else {}),
            **script.handle_extras,
        }

    def notice_late_reads(self) -> None:
        """While vLLM has nothing to do and holds nothing, it does not look at who read what: a late read is counted when its
        next request comes."""
        self.noticed_late_reads = self.ledger.pulls_after_expiry

    async def let_go(self, kv: dict[str, Any]) -> None:
        """Have the engine that a handle names free it, unread: what vLLM's decode side does where it rejects the request."""
        origin = Origin(str(kv.get("remote_host")), int(kv.get("remote_port") or 0))
        named = {"engine_id": kv.get("remote_engine_id"), "request_id": kv.get("remote_request_id")}
        body = msgspec.json.encode(named | {"frees": True})
        with suppress(UpstreamLost):
            await self._pool.fetch(origin, "POST", "/kv/pull", body=body, timeout_s=_PULL_TIMEOUT_S)

    async def pull(self, kv: dict[str, Any]) -> Pulled:
        """Fetch KV from the engine that a handle names. UpstreamLost if it cannot be reached."""
        origin = Origin(str(kv["remote_host"]), int(kv["remote_port"]))
        body = msgspec.json.encode(
            {
                "engine_id": kv.get("remote_engine_id"),
                "request_id": kv.get("remote_request_id"),
                "waits": self.script.unreadable_kv == "wait",
            }
        )
        response = await self._pool.fetch(origin, "POST", "/kv/pull", body=body, timeout_s=_PULL_TIMEOUT_S)
        return msgspec.json.decode(response.body, type=Pulled)

    # Routes

    async def _handle(self, request: Request, responder: Responder) -> None:
        key = self.script.api_key
        has_key = key is None or request.header(b"authorization") == f"Bearer {key}".encode()
        if not has_key and request.path != "/kv/pull":  # engines pull over a side channel, which knows no keys
            self._send(responder, 401, error_envelope(401, "Unauthorized", "AuthenticationError"))
        elif request.path in _COMPLETIONS and request.method == "POST":
            await self._complete(request, responder)
        elif request.path in _OTHERS and request.method == "POST":
            self._echo(request, responder)
        elif request.path == "/kv/pull":
            await self._give(request, responder)
        elif request.path.startswith("/v1/kv/") and request.method == "DELETE" and self.script.is_embedded:
            self._release(request, responder)
        elif request.path in ("/script", "/abort_request") and request.method == "POST":
            self._obey(request, responder)
        else:
            if self.script.pages_wait is not None:
                await self.script.pages_wait.wait()
            self._send_page(request, responder)

    async def _complete(self, request: Request, responder: Responder) -> None:
        recorded = self._record(request)
        ledger = self.ledger
        self.notice_late_reads()
        self.running += 1
        self.peak_running = max(self.peak_running, self.running)
        task = self._tasks[recorded] = cast(asyncio.Task[None], asyncio.current_task())
        try:
            await serve_completion(self, recorded, responder)
        except asyncio.CancelledError:
            if not recorded.was_aborted:
                recorded.disconnected_at = monotonic()
                raise
            task.uncancel()
            recorded.finished_at = monotonic()
            responder.abort()
        else:
            recorded.finished_at = monotonic()
        finally:
            del self._tasks[recorded]
            if ledger is self.ledger:  # not counted by an incarnation that never had it
                self.running -= 1

    def _record(self, request: Request) -> Recorded:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers}
        try:
            body = msgspec.json.decode(request.body)
        except msgspec.DecodeError:
            body = None
        request_id = headers.get("x-request-id")
        earlier = sum(one.headers.get("x-request-id") == request_id for one in self.recorded) if request_id else 0
        recorded = Recorded(
            method=request.method,
            path=request.path,
            headers=headers,
            body=body,
            raw=request.body,
            arrived_at=request.arrived_at,
            attempt=1 + earlier,
            incarnation=self.incarnation,
        )
        self.recorded.append(recorded)
        return recorded

    def _echo(self, request: Request, responder: Responder) -> None:
        """What an engine makes of a request that decodes nothing is none of the tests' business: it says what it was asked."""
        recorded = self._record(request)
        recorded.status, recorded.finished_at = 200, monotonic()
        self._send(responder, 200, {"object": "echo", "route": request.path, "asked": recorded.body})

    async def _give(self, request: Request, responder: Responder) -> None:
        """The prefill side of a pull."""
        wanted = msgspec.json.decode(request.body)
        ledger, engine_id, request_id = self.ledger, str(wanted["engine_id"]), str(wanted["request_id"])
        if wanted.get("frees"):
            if engine_id == ledger.engine_id:
                ledger.release(request_id)
            self._send(responder, 200, {})
            return
        wait_s = ledger.readable_in_s(engine_id, request_id)
        if wait_s and not wanted["waits"]:
            self._send(responder, 200, Pulled(None, 0, is_unreadable=True))
            return
        if wait_s:
            await asyncio.sleep(wait_s)
        handle = ledger.pull(engine_id, request_id)
        pulled = Pulled(handle.prompt, handle.tokens, is_unreadable=False) if handle else Pulled(None, 0, is_unreadable=False)
        self._send(responder, 200, pulled)

    def _release(self, request: Request, responder: Responder) -> None:
        """204 whatever became of the handle, as from the embedded worker."""
        handle = request.path.rpartition("/")[2]
        if request.header(b"x-twinpool-signature") != f"signed {handle}".encode():
            self._send(responder, 403, error_envelope(403, "this KV handle's signature is wrong", "handle_error"))
            return
        self.ledger.release(handle)
        responder.send(204, [], b"")

    def _obey(self, request: Request, responder: Responder) -> None:
        try:
            order = msgspec.json.decode(request.body)
            if request.path == "/script":
                remote.change(self.script, order)
            else:
                self._abort(str(order["rid"]))
        except (msgspec.DecodeError, remote.OrderError, KeyError, TypeError) as error:
            self._send(responder, 400, error_envelope(400, str(error)))
        else:
            self._send(responder, 200, {})

    def _abort(self, prefix: str) -> None:
        for recorded, task in list(self._tasks.items()):
            rid = recorded.body.get("rid") if isinstance(recorded.body, dict) else None
            if isinstance(rid, str) and rid.startswith(prefix):
                recorded.was_aborted = True
                task.cancel()

    def _send_page(self, request: Request, responder: Responder) -> None:
        self.pages[request.path] += 1
        match request.path:
            case "/health":
                responder.send(self.script.health_status, [], b"")
            case "/v1/models":
                self._send(responder, 200, pages.models(self.script))
            case "/metrics" if self.script.kind in ("vllm", "sglang"):
                responder.send(200, [(b"content-type", b"text/plain; version=0.0.4")], metrics.render(self))
            case "/version" if self.script.kind == "vllm":
                self._send(responder, 200, {"version": self.script.version})
            case "/server_info" if self.script.kind == "sglang":
                self._send(responder, 200, pages.server_info(self.script))
            case "/props" if self.script.kind == "llama.cpp":
                self._send(responder, 200, pages.props(self.script))
            case "/twinpool/identity" if self.script.is_embedded:
                self._send(responder, 200, pages.identity(self.script, self.ledger.engine_id))
            case "/ledger":
                self._send(responder, 200, self.ledger.report())
            case "/recorded":
                self._send(responder, 200, self.recorded)
            case _:
                self._send(responder, 404, error_envelope(404, "Not Found", "NotFoundError"))

    def _send(self, responder: Responder, status: int, value: Any) -> None:
        responder.send(status, [(b"content-type", b"application/json")], msgspec.json.encode(value))
