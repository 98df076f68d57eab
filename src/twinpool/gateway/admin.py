"""The admin port: the page, the state, the decisions, and what a person may change. On its own port, and so on its own address.

Without a token it answers on loopback only; `Gateway.start` refuses another address without one. What runs in a browser here is
our own page alone: another site's script gets and changes nothing, token or not.
"""

import hmac
import ipaddress
import re
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from twinpool.config import Declared, declared_of
from twinpool.core import events as on
from twinpool.core.lifecycle import WorkerState
from twinpool.core.model import Role
from twinpool.engines.facts import why_not_roles
from twinpool.errors import (
    BadRequestError,
    NotFoundError,
    Reason,
    RequestError,
    TooLargeError,
    UnauthorizedError,
    UserError,
)
from twinpool.gateway.decision_log import KEPT
from twinpool.gateway.driver import Driver
from twinpool.gateway.membership import Member, Membership
from twinpool.gateway.state import describe, describe_worker
from twinpool.page.served import assets

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


_WORKER_ID = r"\A[A-Za-z0-9._-]{1,64}\Z"
"""It stands in paths of this port and in headers of answers."""


class _NewWorker(Declared, frozen=True, kw_only=True):
    """An engine that runs already, and what it cannot be asked. No file of ours can be named here: it gets the key of all."""

    id: Annotated[str, msgspec.Meta(pattern=_WORKER_ID)]
    url: str
    role: Role = Role.COLOCATED
    allowed_roles: tuple[Role, ...] = ()


class _NewRole(msgspec.Struct, forbid_unknown_fields=True):
    role: Role


class ConflictError(RequestError):
    status, kind, default_reason = 409, "invalid_request_error", Reason.INVALID_REQUEST


class ForeignSiteError(RequestError):
    status, kind, default_reason = 403, "invalid_request_error", Reason.INVALID_REQUEST


class Admin:
    """The routes of the admin port."""

    def __init__(
        self, driver: Driver, membership: Membership, token: str | None, engine_key: str | None, url: Callable[[], str]
    ) -> None:
        self._driver = driver
        self._membership = membership
        self._token = token
        self._engine_key = engine_key
        self._url = url
        self._started_at = monotonic()

    def app(self) -> web.Application:
        @web.middleware
        async def guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
            return await self._guard(request, handler)

        app = web.Application(middlewares=[guard])
        app.add_routes([web.get(path, self._asset) for path in assets()])
        app.add_routes(
            [
                web.get("/admin/state", self._state),
                web.get("/admin/history", self._history),
                web.get("/admin/decisions", self._decisions),
                web.post("/admin/workers", self._add_worker),
                web.delete("/admin/workers/{id}", self._remove_worker),
                web.post("/admin/workers/{id}/role", self._set_role),
                web.delete("/admin/workers/{id}/role", self._release_role),
                web.post("/admin/workers/{id}/drain", self._drain),
            ]
        )
        return app

    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Every route but the page's own files wants the token where one is set; every error has the OpenAI shape."""
        try:
            if request.path in assets() and request.method in ("GET", "HEAD"):
                return await handler(request)
            if self._token is None and _is_another_site(request):
                raise ForeignSiteError("the admin port is for its own page and address; under another name it wants a token")
            if self._token is not None:
                scheme, _, given = request.headers.get("authorization", "").partition(" ")
                is_ours = hmac.compare_digest(given.encode(errors="surrogateescape"), self._token.encode())
                if scheme.lower() != "bearer" or not is_ours:
                    raise UnauthorizedError("the admin port wants its token as a bearer token")
            return await handler(request)
        except web.HTTPException as refused:
            if refused.status == 405:
                return _json(BadRequestError("no such method here", Reason.METHOD_NOT_ALLOWED).envelope(), 405)
            if refused.status == 413:
                return _json(TooLargeError("no body here is that large").envelope(), 413)
            return _json(NotFoundError(f"no route {request.method} {request.path}").envelope(), 404)
        except RequestError as error:
            return _json(error.envelope(), error.status)

    async def _state(self, request: web.Request) -> web.Response:
        return _json(describe(self._driver, self._membership, url=self._url(), started_at=self._started_at))

    async def _history(self, request: web.Request) -> web.Response:
        return _json(self._driver.metrics.indicators.history())

    async def _asset(self, request: web.Request) -> web.Response:
        asset = assets()[request.path]
        if asset.etag in request.headers.get("if-none-match", ""):
            return web.Response(status=304, headers=asset.headers)
        return web.Response(body=asset.body, headers=asset.headers)

    async def _decisions(self, request: web.Request) -> web.Response:
        given = request.query.get("limit", "100")
        if not re.fullmatch("[0-9]{1,9}", given) or not 1 <= int(given) <= KEPT:
            raise BadRequestError(f"limit is a number from 1 to {KEPT}", Reason.INVALID_VALUE, param="limit")
        count, driver = int(given), self._driver
        return _json(
            {
                "decisions": driver.decisions.recent(count),
                "regret_s": round(driver.decisions.regret_s, 3),
                "balance": driver.balances.recent(count),
                "role_changes": driver.role_changes.recent(count),
            }
        )

    async def _add_worker(self, request: web.Request) -> web.Response:
        new = _read(await request.read(), _NewWorker)
        if self._membership.get(new.id) is not None:
            raise ConflictError(f"there is a worker {new.id!r} already")
        allowed = new.allowed_roles or (new.role,)
        if new.role not in allowed:
            raise BadRequestError(f"role {new.role} is not among allowed_roles", Reason.INVALID_VALUE, param="role")
        if why_not := why_not_roles(allowed, new):
            raise BadRequestError(why_not, Reason.INVALID_VALUE, param="kv_role")
        try:
            member = Member(new.id, new.url, new.role, allowed, declared_of(new), self._engine_key)
        except UserError as wrong:
            raise BadRequestError(str(wrong), Reason.INVALID_VALUE, param="url") from wrong
        self._membership.attach(member)
        return _json(describe_worker(member, None), 201)

    async def _remove_worker(self, request: web.Request) -> web.Response:
        member = self._member(request)
        self._membership.detach(member.worker)
        return _json({"removed": member.worker})

    async def _set_role(self, request: web.Request) -> web.Response:
        member = self._member(request)
        role = _read(await request.read(), _NewRole).role
        if role not in member.allowed_roles:
            allowed = ", ".join(member.allowed_roles)
            raise ConflictError(f"worker {member.worker!r} may not be {role}: its allowed roles are {allowed}")
        if self._driver.controller.cluster.get(member.worker) is None:
            raise ConflictError(f"worker {member.worker!r} has not joined yet: {member.trouble}")
        self._driver.feed(on.RoleAsked(at=monotonic(), worker=member.worker, role=role))
        return self._described(member)

    async def _release_role(self, request: web.Request) -> web.Response:
        """It stays as it is, and balance may change it again."""
        member = self._member(request)
        self._driver.feed(on.RoleReleased(at=monotonic(), worker=member.worker))
        return self._described(member)

    async def _drain(self, request: web.Request) -> web.Response:
        member = self._member(request)
        worker = self._driver.controller.cluster.get(member.worker)
        if worker is None or worker.story.state is WorkerState.LOST:
            raise ConflictError(f"worker {member.worker!r} is not up: {member.trouble}")
        self._driver.feed(on.DrainAsked(at=monotonic(), worker=member.worker))
        return self._described(member)

    def _described(self, member: Member) -> web.Response:
        return _json(describe_worker(member, self._driver.controller.cluster.get(member.worker)))

    def _member(self, request: web.Request) -> Member:
        member = self._membership.get(request.match_info["id"])
        if member is None:
            raise NotFoundError(f"there is no worker {request.match_info['id']!r}", Reason.NO_SUCH_WORKER)
        return member


def _read(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as wrong:
        raise BadRequestError(str(wrong), Reason.INVALID_JSON) from wrong


def _is_another_site(request: web.Request) -> bool:
    """Sent by a script of another site, as a browser says, or under another site's name that was made to lead here: where no
    token is wanted, this port has only addresses and `localhost`."""
    if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        return True
    try:
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != request.host:
            return True
        host = urlsplit(f"//{request.host}").hostname or ""
        if host != "localhost":
            ipaddress.ip_address(host)
    except ValueError:  # neither an address nor a URL
        return True
    return False


def _json(content: dict[str, Any], status: int = 200) -> web.Response:
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    body = msgspec.json.encode(content)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)
