"""The worker process: its routes, its start and its end.

    /v1/chat/completions  /v1/completions     whole requests, prefill legs and decode legs, as each body says
    /v1/kv/<handle>/claim  /v1/kv/<handle>     the handoff between workers; releasing (DELETE)
    /v1/models  /twinpool/identity  /health  /metrics

The same worker does prefill, decode or both; roles are the gateway's business.
"""

import asyncio
import functools
import json
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from prometheus_client import exposition

import twinpool
from twinpool.errors import (
    BadRequestError,
    NotFoundError,
    Reason,
    RequestError,
    RequestTimeoutError,
    TooLargeError,
    UnavailableError,
    UserError,
)
from twinpool.worker import memory
from twinpool.worker.asked import Asked, Endpoint, parse
from twinpool.worker.engine import Engine
from twinpool.worker.generation import Generator, Request
from twinpool.worker.gguf_header import fingerprint, read_header
from twinpool.worker.handing_over import HandingOver, Place
from twinpool.worker.handles import HandleLedger
from twinpool.worker.metrics import WorkerMetrics
from twinpool.worker.openai_shapes import prefill_answer, whole_answer
from twinpool.worker.prompt import Prompt, read_prompts
from twinpool.worker.pull import SHARED_MEMORY, SIGNATURE_HEADER, TCP, Claim, Moved
from twinpool.worker.sending import StreamedAnswer, WholeAnswer
from twinpool.worker.settings import WorkerSettings
from twinpool.worker.shared_memory import KvFolder
from twinpool.worker.signing import Signer
from twinpool.worker.slots import SlotPool
from twinpool.worker.steps import Steps

_log = logging.getLogger(__name__)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_BACKLOG = 1024
_CLOSE_S = 5.0  # draining is over by then: what is left is cancelled, and a long step is not waited for


def run(settings: WorkerSettings) -> None:
    """Runs a worker until SIGTERM or SIGINT (or the parent's end, see `exit_with_fd`), then ends the process. A
    failed start raises `UserError`."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until it serves: nobody waits for a model to be loaded
    if settings.cores and hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, settings.cores)  # before llama.cpp makes its threads: they inherit it
        except OSError:
            raise UserError(f"this process may not use the cores {list(settings.cores)}") from None
    if settings.advertise_host is None and settings.host in ("0.0.0.0", "::"):  # noqa: S104 no address to reach it by
        raise UserError(f"--host {settings.host} needs --advertise-host: the address at which decode workers reach this one")
    model = Path(settings.model_path)
    memory.check(settings, read_header(model), model)
    listening = _bind(settings)
    settings = msgspec.structs.replace(settings, port=listening.getsockname()[1])
    incarnation = secrets.token_hex(16)
    folder = KvFolder(incarnation)
    try:
        memory.check_shared(settings, read_header(model), folder)
        engine = Engine(settings, folder.path, _threads(settings))
        _runner()(_serve(settings, engine, folder, listening, incarnation))
    finally:
        folder.close()
    sys.stdout.flush()
    os._exit(0)  # llama.cpp's threads may be within a long step: nobody waits for them


def _runner() -> Callable[[Any], None]:
    try:
        import uvloop  # not on Windows
    except ImportError:
        return asyncio.run
    return uvloop.run


def _threads(settings: WorkerSettings) -> int:
    if settings.threads:
        return settings.threads
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return len(settings.cores or ()) or os.cpu_count() or 1


def _bind(settings: WorkerSettings) -> socket.socket:
    """Before the model is loaded: a port in use is told at once."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((settings.host, settings.port))
    except OSError as error:
        listening.close()
        raise UserError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; choose another --port, or 0 for any"
        ) from None
    return listening


async def _serve(
    settings: WorkerSettings, engine: Engine, folder: KvFolder, listening: socket.socket, incarnation: str
) -> None:
    await engine.open()
    model = await asyncio.to_thread(fingerprint, Path(settings.model_path))
    signer = Signer(settings.handoff_secret or secrets.token_hex(32))
    # saved KV is one build's own format, and has a part for each slot: a worker reads only what one with as many wrote
    kind = f"{model}/{engine.facts.version}/{engine.facts.kv_bytes_per_token}/{settings.slots}"
    place = Place(incarnation, settings.advertise_host or settings.host, settings.port, kind)
    worker = Worker(settings, engine, folder, signer, place)
    runner = web.AppRunner(worker.application(), handler_cancellation=True, access_log=None, shutdown_timeout=_CLOSE_S)
    await runner.setup()
    await web.SockSite(runner, listening, backlog=_BACKLOG).start()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, functools.partial(_stop_or_exit, stop, folder))
    if settings.exit_with_fd is not None:
        loop.add_reader(settings.exit_with_fd, functools.partial(_parent_gone, settings.exit_with_fd, folder))
    url = f"http://{_in_url(settings.host)}:{settings.port}"
    ready = {"event": "ready", "url": url, "incarnation": incarnation}
    print(json.dumps(ready), flush=True)  # noqa: T201 the parent reads it
    await stop.wait()
    await worker.drain()
    try:
        async with asyncio.timeout(_CLOSE_S):
            await runner.cleanup()
            await worker.close()
            await engine.close()
    except TimeoutError:
        _log.warning("ending with work unfinished")


def _stop_or_exit(stop: asyncio.Event, folder: KvFolder) -> None:
    """The first signal drains, the second ends."""
    if stop.is_set():
        folder.close()
        os._exit(1)
    stop.set()


def _parent_gone(descriptor: int, folder: KvFolder) -> None:
    if os.read(descriptor, 1):
        return
    folder.close()
    os._exit(0)


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class _KvFile(web.FileResponse):
    """A file of KV on its way to another machine. However that ends, the file is gone afterwards."""

    def __init__(self, folder: KvFolder, name: str, *, within_s: float) -> None:
        super().__init__(folder.file(name), headers={"content-type": "application/octet-stream"})
        self._folder, self._name, self._within_s = folder, name, within_s

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Sends it, the body included."""
        try:
            async with asyncio.timeout(self._within_s):
                return await super().prepare(request)
        except TimeoutError:
            raise ConnectionError("the decode worker reads too slowly") from None
        finally:
            self._folder.remove(self._name)


class Worker:
    """The routes."""

    def __init__(self, settings: WorkerSettings, engine: Engine, folder: KvFolder, signer: Signer, place: Place) -> None:
        self._settings, self._engine, self._folder, self._signer, self._place = settings, engine, folder, signer, place
        self._ledger = HandleLedger(settings.lease_s)
        self._pool = SlotPool(settings.slots, settings.queue_limit, engine.facts.reuse_tokens, engine.settle)
        self._metrics = WorkerMetrics(self._pool, self._ledger)
        self._steps = Steps(engine, folder, self._metrics)
        self._handing_over = HandingOver(settings, place, signer, self._steps, self._pool, self._ledger)
        self._generator = Generator(settings, self._steps, self._pool, self._handing_over)
        self._started = int(time.time())
        self._draining = False
        self._running = 0
        self._changed = asyncio.Event()

    def application(self) -> web.Application:
        application = web.Application(middlewares=[self._answer_errors], client_max_size=self._settings.max_body_bytes)
        application.on_response_prepare.append(self._sign)
        application.add_routes(
            [
                web.post("/v1/chat/completions", functools.partial(self._complete, "chat")),
                web.post("/v1/completions", functools.partial(self._complete, "completions")),
                web.post("/v1/kv/{handle}/claim", self._claim),
                web.delete("/v1/kv/{handle}", self._release),
                web.get("/v1/models", self._models),
                web.get("/twinpool/identity", self._identity),
                web.get("/version", self._identity),
                web.get("/health", self._health),
                web.get("/metrics", self._show_metrics),
            ]
        )
        return application

    async def close(self) -> None:
        await self._steps.close()
        await self._pool.settled()
        await self._handing_over.close()

    async def drain(self) -> None:
        """No new work; returns when what runs has ended and every handle too, or the time is over."""
        self._draining = True
        until = time.monotonic() + self._settings.drain_timeout_s
        while self._running or len(self._ledger):
            left = until - time.monotonic()
            if left <= 0:
                break
            due = self._ledger.next_expiry()
            self._changed.clear()
            try:
                async with asyncio.timeout(left if due is None else min(left, max(due - time.monotonic(), 0) + 0.05)):
                    await self._changed.wait()
            except TimeoutError:
                continue  # a lease may have ended

    # -- generating

    async def _complete(self, endpoint: Endpoint, request: web.Request) -> web.StreamResponse:
        arrived = time.monotonic()
        raw = await self._body(request)
        if self._draining:
            raise UnavailableError("this worker is draining", Reason.DRAINING, retry_after_s=1)
        asked = parse(endpoint, raw, self._settings.model_name)
        self._running += 1
        leg = "prefill" if asked.makes_handle else "decode" if asked.handle else "whole"
        status = "cancelled"
        try:
            response = await self._answer(asked, arrived, request)
            status = str(response.status)
        except RequestError as error:
            status = str(error.status)
            raise
        finally:
            self._running -= 1
            self._changed.set()
            self._metrics.requests.labels(leg, status).inc()
        return response

    async def _answer(self, asked: Asked, arrived: float, request: web.Request) -> web.StreamResponse:
        prompts = await read_prompts(self._engine, asked)
        if asked.makes_handle:
            return await self._answer_prefill_leg(asked, prompts[0], request)
        handle = self._handing_over.checked(asked, prompts[0])
        count = len(prompts) * asked.choices
        if asked.stream:
            streamed = StreamedAnswer(asked, request, count)
            try:
                await streamed.end(await self._generator.run(Request(asked, prompts, handle, arrived, streamed)))
            except RequestError as error:
                if not streamed.started:
                    raise
                await streamed.fail(error)
            return streamed.response
        whole = WholeAnswer(asked, count)
        usage = await self._generator.run(Request(asked, prompts, handle, arrived, whole))
        return _json(whole_answer(asked, whole.kept(), whole.choices(), usage), whole.headers)

    async def _answer_prefill_leg(self, asked: Asked, prompt: Prompt, request: web.Request) -> web.StreamResponse:
        handle, usage = await self._handing_over.make_handle(asked, prompt)
        transfer = self._signer.write(handle)
        response = _json(prefill_answer(asked, self._settings.model_name, int(time.time()), usage, transfer))
        try:
            await response.prepare(request)
            await response.write_eof()
        except BaseException:
            self._handing_over.forget(handle)
            raise
        return response

    # -- the handoff

    async def _claim(self, request: web.Request) -> web.StreamResponse:
        try:
            claim = msgspec.json.decode(await self._body(request), type=Claim)
        except msgspec.DecodeError as error:
            raise BadRequestError(f"not a claim: {error}") from None
        held = self._handing_over.claim(request.match_info["handle"], claim)
        self._changed.set()
        out = self._metrics.handoff_bytes
        if (
            self._settings.shared_memory
            and claim.shared_folder
            and self._folder.give(held.file_name, claim.shared_folder, claim.marker)
        ):
            out.labels("out", SHARED_MEMORY).inc(held.kv_bytes)
            return _json(Moved(SHARED_MEMORY, held.kv_bytes))
        out.labels("out", TCP).inc(held.kv_bytes)
        return _KvFile(self._folder, held.file_name, within_s=self._settings.pull_timeout_s)

    async def _release(self, request: web.Request) -> web.StreamResponse:
        self._handing_over.release(request.match_info["handle"], request.headers.get(SIGNATURE_HEADER, ""))
        self._changed.set()
        return web.Response(status=204)

    # -- operations

    async def _models(self, request: web.Request) -> web.StreamResponse:
        model = {
            "id": self._settings.model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "twinpool",
            "max_model_len": self._engine.facts.context_tokens,
        }
        return _json({"object": "list", "data": [model]})

    async def _identity(self, request: web.Request) -> web.StreamResponse:
        facts, settings = self._engine.facts, self._settings
        return _json(
            {
                "kind": "twinpool-worker",
                "version": twinpool.__version__,
                "engine": "llama.cpp",
                "engine_version": facts.version,
                "incarnation": self._place.incarnation,
                "model": settings.model_name,
                "model_fingerprint": self._place.kv_kind,
                "context_tokens": facts.context_tokens,
                "slots": settings.slots,
                "lease_s": settings.lease_s,
                "batch_tokens": settings.batch_tokens,
                "kv_bytes_per_token": facts.kv_bytes_per_token,
                "continues": True,
                "reuse_block_tokens": facts.reuse_tokens,
                "draining": self._draining,
            }
        )

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return _json({"status": "draining" if self._draining else "ok"})

    async def _show_metrics(self, request: web.Request) -> web.StreamResponse:
        # the plain format: in OpenMetrics a gauge and a counter must not share twinpool_worker_kv_handles
        body = exposition.generate_latest(self._metrics.registry)
        return web.Response(body=body, headers={"content-type": exposition.CONTENT_TYPE_PLAIN_0_0_4})

    # -- around all of them

    async def _body(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                return await request.read()
        except TimeoutError:
            raise RequestTimeoutError(f"the request's body did not come within {self._settings.body_timeout_s:g} s") from None

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except RequestError as error:
            return _refuse(error)
        except web.HTTPRequestEntityTooLarge:
            return _refuse(TooLargeError(f"the body is over {self._settings.max_body_bytes} bytes"))
        except web.HTTPException as error:
            missing = NotFoundError(
                f"{request.method} {request.path}: {error.reason}",
                Reason.METHOD_NOT_ALLOWED if error.status == 405 else Reason.NO_SUCH_ROUTE,
            )
            missing.status = error.status
            return _refuse(missing)
        except ConnectionError:
            raise  # the client has gone
        except Exception:
            _log.exception("%s %s failed", request.method, request.path)
            return _refuse(RequestError("the worker failed; its log says more"))

    async def _sign(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers["x-twinpool-incarnation"] = self._place.incarnation


def _json(answer: Any, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json", headers=headers)


def _refuse(error: RequestError) -> web.Response:
    response = _json(error.envelope())
    response.set_status(error.status)
    if error.retry_after_s is not None:
        response.headers["retry-after"] = str(error.retry_after_s)
    return response
