"""Asks a gateway's admin port for its state, as `twinpool status` shows it."""

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import msgspec

from twinpool.cli.state_shape import State
from twinpool.errors import UserError
from twinpool.http1.urls import redirection

DEFAULT_ADMIN_URL = "http://127.0.0.1:8001"
TIMEOUT_S = 5.0
WHOLE_ANSWER_S = 10.0
MOST_BYTES = 16_000_000  # of an answer: thousands of workers and their pairs are less


def fetch_state(admin_url: str, token: str | None) -> dict[str, Any]:
    """The JSON of ``GET /admin/state``. Blocks for at most a few seconds; raises `UserError` when it cannot be had."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    parts = urlsplit(admin_url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    with closing(kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)) as connection:
        try:
            connection.connect()
            with _at_most(WHOLE_ANSWER_S, connection.sock):
                connection.request("GET", "/admin/state", headers=headers)
                with connection.getresponse() as answer:
                    status, body = answer.status, answer.read(MOST_BYTES + 1)
                    location = answer.getheader("location")
        except http.client.HTTPException:
            raise _not_a_gateway(admin_url) from None
        except OSError as problem:
            why = problem.strerror or problem
            raise UserError(f"no gateway answers at {admin_url} ({why}): twinpool serve starts one") from None
    if status == 401:
        raise UserError(f"{admin_url} wants its token: --admin-token-file FILE")
    if (leads_to := redirection(status, admin_url, location)) is not None:
        raise UserError(f"{admin_url} answers {status} and leads to {leads_to}: give the URL of serve's --admin-port")
    try:
        state: dict[str, Any] = msgspec.json.decode(body)
        msgspec.convert(state, State)
    except (ValueError, RecursionError):
        raise _not_a_gateway(admin_url) from None
    if status != 200 or len(body) > MOST_BYTES:
        raise _not_a_gateway(admin_url)
    return state


@contextmanager
def _at_most(seconds: float, connection: socket.socket) -> Iterator[None]:
    """The time-out of a socket is for each of its reads: one that gives a byte now and then would never end."""

    def end() -> None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _not_a_gateway(url: str) -> UserError:
    return UserError(f"{url} does not answer as a gateway's admin port does: give the URL of serve's --admin-port")
