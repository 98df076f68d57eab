"""The gateway: its two ports, and everything behind them put together."""

import asyncio
import ipaddress
import os
import resource
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
from aiohttp import web

from twinpool.assemble import build_controller
from twinpool.config import BalanceMode, Config, Declared, RoutingPolicy
from twinpool.core.law import Law
from twinpool.core.lifecycle import WorkerState
from twinpool.core.model import Role
from twinpool.engines.asking import Trouble
from twinpool.errors import (
    BadRequestError,
    NotFoundError,
    Reason,
    RequestError,
    UnavailableError,
    UserError,
)
from twinpool.gateway.access_log import AccessLog
from twinpool.gateway.admin import Admin
from twinpool.gateway.beginnings import Beginnings
from twinpool.gateway.calls import ClientRequest
from twinpool.gateway.ceilings import check_ceilings
from twinpool.gateway.driver import Driver
from twinpool.gateway.journal import Journal
from twinpool.gateway.learnt_file import Learnt, LearntKeeper, read_learnt
from twinpool.gateway.membership import Member, Membership
from twinpool.gateway.metrics import Metrics
from twinpool.gateway.openai import read_call
from twinpool.gateway.routes import ROUTES, Endpoint, why_unsupported
from twinpool.gateway.senders import Senders
from twinpool.http1 import Limits, Pool, Request, Responder, Server, serve

_JSON = [(b"content-type", b"application/json")]
_OWN_FILES = 64  # ports, logs, probes, workers' pipes
_FEWEST_FILES = 256
_ONE_MODEL = "/v1/models/"
_TEXT = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
_MAX_WIRE_ID = 128
_ADMIN_LINGER_S = 0.5  # for a refused body; the framework's ten seconds outlast our own end
_PASSED_HEADERS = frozenset({b"traceparent", b"tracestate"})
"""All that engines get of a client's headers: no credential, nothing that could steer one."""


class Gateway:
    """One gateway. `start`, `attach` workers, and `close` at the end; everything on the running event loop. `engine_key` is for
    engines that join over the admin port."""

    def __init__(
        self,
        config: Config,
        *,
        api_keys: frozenset[str] = frozenset(),
        admin_token: str | None = None,
        engine_key: str | None = None,
        journal: Path | None = None,
        access_log: Path | None = None,
        learnt: Path | None = None,
        say: Callable[[str], None] = lambda news: None,
        pool: Pool | None = None,
    ) -> None:
        """`say` is given news for the person who watches, a line each. `learnt`: where what is learnt of engines is kept for
        the next start. `pool` has the connections to engines, and ends with the gateway."""
        self._config = config
        self._senders = Senders(api_keys, client_priorities=config.server.client_priorities)
        self._pool = pool if pool is not None else Pool()
        learns = config.balance.mode is not BalanceMode.OFF or config.routing.policy is RoutingPolicy.LEAST_COST
        known = read_learnt(learnt, say) if learnt is not None and learns else Learnt()
        law = Law(
            objectives=config.objectives,
            balance=config.balance,
            learns=learns,
            priors=known.costs,
            prompt_lengths=known.prompt_lengths,
        )
        controller = build_controller(config.routing, law=law)
        self._metrics = Metrics(controller, config.objectives)
        self._driver = Driver(
            controller,
            self._pool,
            config.timeouts,
            self._metrics,
            Journal(journal, config.routing, law, config.journal, controller.remember) if journal is not None else None,
            AccessLog(access_log, config.access_log) if access_log is not None else None,
            expose_route=config.server.expose_route,
        )
        self._driver.say = say
        self._beginnings = Beginnings() if config.routing.policy is RoutingPolicy.LEAST_COST else None
        self._learnt = LearntKeeper(learnt, known, controller.learnt, say) if learnt is not None and learns else None
        self._changed = asyncio.Event()
        self._members = Membership(self._driver, config.server, config.timeouts, self._changed.set)
        self._pool.on_idle_lost = self._members.connection_lost
        self._admin = Admin(self._driver, self._members, admin_token, engine_key, lambda: self.url)
        self._has_admin_token = admin_token is not None
        self._server: Server | None = None
        self._admin_runner: web.AppRunner | None = None
        self.port = 0
        self.admin_port = 0

    @property
    def url(self) -> str:
        return f"http://{_shown(self._config.server.host)}:{self.port}"

    async def start(self) -> None:
        """Listen on both ports; raises `UserError` where one cannot be had."""
        server = self._config.server
        if not self._has_admin_token and not _is_loopback(server.admin_host):
            raise UserError(f"the admin port on {server.admin_host} needs a token: --admin-token-file, or keep it on 127.0.0.1")
        limits = Limits(
            max_connections=_connections_possible(),
            max_body_bytes=server.max_body_bytes,
            header_timeout_s=server.header_timeout_s,
            body_timeout_s=server.body_timeout_s,
            keep_alive_s=server.keep_alive_s,
        )
        self._admin_runner = web.AppRunner(self._admin.app(), access_log=None, lingering_time=_ADMIN_LINGER_S)
        try:
            await self._admin_runner.setup()
            site = web.TCPSite(self._admin_runner, server.admin_host, server.admin_port)
            try:
                await site.start()
            except OSError as taken:
                raise _cannot_listen(server.admin_host, server.admin_port, "--admin-port", taken) from taken
            self.admin_port = self._admin_runner.addresses[0][1]
            try:
                self._server = await serve(
                    self._handle,
                    host=server.host,
                    port=server.port,
                    limits=limits,
                    refusal_headers=lambda: [(b"x-request-id", _new_id())],
                )
            except OSError as taken:
                raise _cannot_listen(server.host, server.port, "--port", taken) from taken
            self.port = self._server.port
        except UserError:
            await self.close()
            raise
        if self._learnt is not None:
            self._learnt.start()

    def attach(
        self,
        worker: str,
        url: str,
        role: Role,
        allowed_roles: tuple[Role, ...],
        declared: Declared = Declared(),  # noqa: B008  frozen
        api_key: str | None = None,
    ) -> None:
        """Know this worker and route to it while it is well. A known id at a new address takes the old one's place. `declared`
        has what it cannot be asked, `api_key` goes with every request to it."""
        self._members.attach(Member(worker, url, role, allowed_roles, declared, api_key))

    def detach(self, worker: str) -> None:
        self._members.detach(worker)

    def worker_exited(self, worker: str) -> None:
        """Its process has ended: known at once, not at the next probe."""
        self._members.exited(worker)

    async def ready(self) -> None:
        """Return once every attached worker was found well."""
        while not all(member.trouble is None for member in self._members):
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        """Take nothing new, let what runs end within `drain_s`, then end everything."""
        if self._server is not None:
            drain_s = self._config.server.drain_s
            await self._driver.drain(drain_s)
            await self._server.close(drain_s=1.0)
        if self._learnt is not None:
            await self._learnt.close()
        await self._driver.ask_no_more()
        await self._members.close()
        await self._driver.close()
        await self._pool.close()
        if self._admin_runner is not None:
            await self._admin_runner.cleanup()

    # The public port

    async def _handle(self, request: Request, responder: Responder) -> None:
        wire_id = _wire_id(request)
        try:
            await self._route(request, responder, wire_id)
        except RequestError as error:
            if request.path in ROUTES or why_unsupported(request.path) is not None:
                self._metrics.turned_away()
            headers = [*_JSON, (b"x-request-id", wire_id)]
            if error.retry_after_s is not None:
                headers.append((b"retry-after", b"%d" % error.retry_after_s))
            responder.send(error.status, headers, msgspec.json.encode(error.envelope()))

    async def _route(self, request: Request, responder: Responder, wire_id: bytes) -> None:
        path, method = request.path, request.method
        if path in ROUTES:
            _only(method, "POST")
            await self._serve_call(ROUTES[path], request, responder, wire_id)
            return
        if (why := why_unsupported(path)) is not None:
            self._senders.authenticate(request)
            raise NotFoundError(f"the route {path} is not served here: {why}", Reason.UNSUPPORTED)
        _only(method, "GET", "HEAD", known=path in ("/health", "/ready", "/metrics", "/v1/models"))
        named = (b"x-request-id", wire_id)
        if path == "/health":
            responder.send(200, [*_JSON, named], b'{"status":"ok"}')
        elif path == "/ready":
            status, answer = self._readiness()
            responder.send(status, [*_JSON, named], answer)
        elif path == "/metrics":
            responder.send(200, [*_TEXT, named], self._metrics.render())
        elif path == "/v1/models":
            self._senders.authenticate(request)
            responder.send(200, [*_JSON, named], self._models())
        elif path.startswith(_ONE_MODEL):
            self._senders.authenticate(request)
            _only(method, "GET", "HEAD")
            responder.send(200, [*_JSON, named], self._model(unquote(path.removeprefix(_ONE_MODEL))))
        else:
            raise NotFoundError(f"no route {method} {path}")

    async def _serve_call(self, endpoint: Endpoint, request: Request, responder: Responder, wire_id: bytes) -> None:
        sender = self._senders.identify(request)
        call = read_call(endpoint, request.body, self._members.only_model, sender, self._beginnings)
        check_ceilings(call.fields, self._config.limits)
        known = self._driver.controller.cluster
        if not any(call.facts.model in worker.facts.models for worker in known):
            if not self._members.models():
                raise UnavailableError("no worker has joined yet; try again later", retry_after_s=2)
            raise NotFoundError(f"the model {call.facts.model!r} does not exist here", Reason.MODEL_NOT_FOUND, param="model")
        name = f"req-{secrets.token_hex(8)}"
        passed = [(key, value) for key, value in request.headers if key in _PASSED_HEADERS]
        await self._driver.serve(ClientRequest(name, wire_id, call, responder, request.arrived_at, passed))

    def _readiness(self) -> tuple[int, bytes]:
        """Ready while some worker can take a request; the reason why not, else. Workers that do not take our key are named:
        waiting does not mend that."""
        controller = self._driver.controller
        if controller.is_draining:
            return 503, b'{"ready":false,"reason":"draining"}'
        if any(worker.story.state is WorkerState.READY for worker in controller.cluster):
            return 200, b'{"ready":true}'
        locked = [member.worker for member in self._members if member.trouble_kind is Trouble.AUTH]
        if locked:
            return 503, msgspec.json.encode({"ready": False, "reason": "auth", "workers": locked})
        return 503, b'{"ready":false,"reason":"no_worker"}'

    def _models(self) -> bytes:
        models = self._members.models()
        if not models:
            raise UnavailableError("no worker is up", retry_after_s=2)
        return msgspec.json.encode({"object": "list", "data": [self._model_object(model) for model in models]})

    def _model(self, name: str) -> bytes:
        if name not in self._members.models():
            raise NotFoundError(f"the model {name!r} does not exist here", Reason.MODEL_NOT_FOUND, param="model")
        return msgspec.json.encode(self._model_object(name))

    def _model_object(self, name: str) -> dict[str, Any]:
        """As vLLM shows it: adapters name the model they stand on."""
        parent = self._members.parent(name)
        adapter = {} if parent is None else {"parent": parent}
        return {"id": name, "object": "model", "created": 0, "owned_by": "twinpool", **adapter}


def _connections_possible() -> int:
    """How many clients the limit on open files allows: each may take a socket to an engine for either leg. The limit is raised
    as far as this process may; `UserError` where that is too little to serve with."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    allowed = 1_000_000 if most == resource.RLIM_INFINITY else most
    if allowed < _FEWEST_FILES:
        raise UserError(f"only {allowed} files may be open at once, {_FEWEST_FILES} are needed: raise the limit with ulimit -n")
    return min((allowed - _OWN_FILES) // 3, Limits().max_connections)


def _only(method: str, *allowed: str, known: bool = True) -> None:
    if known and method not in allowed:
        error = BadRequestError(f"use {allowed[0]} here", Reason.METHOD_NOT_ALLOWED)
        error.status = 405
        raise error


def _wire_id(request: Request) -> bytes:
    """The client's own x-request-id where it has a sane one: it never names anything inside."""
    given = request.header(b"x-request-id")
    if given and len(given) <= _MAX_WIRE_ID and given.isascii() and given.decode().isprintable():
        return given
    return _new_id()


def _new_id() -> bytes:
    return f"req-{secrets.token_hex(8)}".encode()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _shown(host: str) -> str:
    """An address that a person can paste, for a host that means every address."""
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _cannot_listen(host: str, port: int, option: str, taken: OSError) -> UserError:
    why = os.strerror(taken.errno) if taken.errno else str(taken)
    return UserError(f"cannot listen on {host}:{port} ({why.lower()}): choose another port with {option}")
