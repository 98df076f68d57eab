"""The service under test: where it is, what it serves, how to ask it; in one line what is wrong where it cannot be."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from twinpool.errors import UserError
from twinpool.http1 import Loss, Origin, Pool, Response, UpstreamLost
from twinpool.http1.urls import parse_url, redirection, without_password

ASK_S = 15.0
"""For a service's own pages."""


@dataclass(frozen=True, slots=True)
class Target:
    """`url` is what messages call it; `base` the path in front of ``/chat/completions``."""

    url: str
    origin: Origin
    base: str
    model: str = ""
    api_key: str | None = None
    is_chat: bool = True

    @property
    def path(self) -> str:
        return f"{self.base}/chat/completions" if self.is_chat else f"{self.base}/completions"

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        lines = [(b"content-type", b"application/json"), (b"accept", b"text/event-stream")]
        return [*lines, *self.credentials]

    @property
    def credentials(self) -> list[tuple[bytes, bytes]]:
        return [(b"authorization", f"Bearer {self.api_key}".encode())] if self.api_key else []


def target_of(text: str, *, api_key: str | None = None, is_chat: bool = True) -> Target:
    """From what people paste: ``host:port``, with or without the ``/v1`` that clients want, or below another path."""
    try:
        found = parse_url(text)
    except ValueError as why:
        raise UserError(f"{without_password(text)!r} is not a service's URL, {why}: write http://host:port") from None
    url = (text.strip() if "://" in text else f"http://{text.strip()}").rstrip("/")
    path = found.path.removesuffix("/completions").removesuffix("/chat").rstrip("/")
    base = path if path.endswith("/v1") else f"{path}/v1"
    origin = Origin(found.host, found.port_or_default, found.scheme == "https")
    return Target(url, origin, base, api_key=api_key, is_chat=is_chat)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def find_model(pool: Pool, target: Target, wanted: str | None) -> str:
    """The model to ask for: the one that is wanted, or the only one there is. `UserError` in one line where that fails."""
    answer = await ask(pool, target, f"{target.base}/models")
    if answer.status in (404, 405) and wanted:
        return wanted  # a service that lists no models will tell by itself
    if answer.status != 200:
        raise complaint(target, answer.status, answer.headers, message_of(answer.body))
    try:
        models = [model.id for model in msgspec.json.decode(answer.body, type=_Models).data]
    except msgspec.DecodeError:
        raise UserError(
            f"{target.url} is no OpenAI-compatible service: its {target.base}/models is not a list of models"
        ) from None
    if wanted is None and len(models) == 1:
        return models[0]
    if not models:
        raise UserError(f"{target.url} serves no model now")
    if wanted is None:
        raise UserError(f"{target.url} serves several models: choose one with --model ({_some(models)})")
    if wanted not in models:
        raise UserError(f"the model {wanted!r} does not exist at {target.url}: it has {_some(models)}")
    return wanted


async def ask(pool: Pool, target: Target, path: str) -> Response:
    """A page of the service; `UserError` where nobody answers."""
    try:
        return await pool.fetch(target.origin, "GET", path, target.credentials, timeout_s=ASK_S, is_idempotent=True)
    except UpstreamLost as lost:
        raise unreachable(target, lost) from lost


def unreachable(target: Target, lost: UpstreamLost) -> UserError:
    cause = lost.__cause__
    why = str(lost).partition(": ")[2]
    if isinstance(cause, socket.gaierror):
        why = str(cause.strerror).lower()  # its numbers are not the system's
    elif isinstance(cause, OSError) and cause.errno:
        why = os.strerror(cause.errno).lower()
    if lost.loss in (Loss.CONNECT, Loss.CONNECT_TIMEOUT):
        return UserError(f"nobody answers at {target.url} ({why}): is the service running, and the URL right?")
    return UserError(f"{target.url} was lost while it was asked ({why})")


def complaint(target: Target, status: int, headers: Sequence[tuple[bytes, bytes]], said: str) -> UserError:
    """What an answer that is not 200 means to the person who asked; `said` is the message in it."""
    if status in (401, 403):
        key = "the key is refused" if target.api_key else "it wants a key"
        return UserError(f"{target.url} answers {status}, {key}: give a valid one with --api-key-file{_quoted(said)}")
    if status == 429:
        after = _header(headers, b"retry-after")
        wait = f" (Retry-After {after} s)" if after else ""
        return UserError(f"{target.url} answers 429, it takes no more requests now{wait}: try again later{_quoted(said)}")
    if (leads_to := redirection(status, f"{target.origin}{target.path}", _header(headers, b"location"))) is not None:
        return UserError(f"{target.url} answers {status} and leads to {leads_to}: give the URL of the service there")
    if status == 404:
        return UserError(f"{target.url} answers 404: is this the URL of an OpenAI-compatible service?{_quoted(said)}")
    return UserError(f"{target.url} answers {status}{_quoted(said)}")


def message_of(body: bytes) -> str:
    """What an error says, in a line; empty where it says nothing that is for people."""
    try:
        value: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    error = value.get("error", value) if isinstance(value, dict) else None
    text = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return " ".join(str(text).split())[:200] if text else ""


def _header(headers: Sequence[tuple[bytes, bytes]], wanted: bytes) -> str | None:
    return next((value.decode("latin-1") for name, value in headers if name == wanted), None)


def _quoted(said: str) -> str:
    return f' ("{said}")' if said else ""


def _some(models: list[str]) -> str:
    return ", ".join(models[:5]) + (f" and {len(models) - 5} more" if len(models) > 5 else "")
