"""Asks a gateway's admin port for its state, as `twinpool status` shows it."""

import http.client
import json
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from twinpool.errors import UserError

DEFAULT_ADMIN_URL = "http://127.0.0.1:8001"
TIMEOUT_S = 5.0


def fetch_state(admin_url: str, token: str | None) -> dict[str, Any]:
    """The JSON of ``GET /admin/state``. Blocks for at most a few seconds; raises `UserError` when it cannot be had."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    parts = urlsplit(admin_url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    with closing(kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)) as connection:
        try:
            connection.request("GET", "/admin/state", headers=headers)
            answer = connection.getresponse()
            status, body = answer.status, answer.read()
        except http.client.HTTPException:
            raise _not_a_gateway(admin_url) from None
        except OSError as problem:
            why = problem.strerror or problem
            raise UserError(f"no gateway answers at {admin_url} ({why}): twinpool serve starts one") from None
    if status == 401:
        raise UserError(f"{admin_url} wants its token: --admin-token-file FILE")
    try:
        state = json.loads(body)
    except ValueError:
        raise _not_a_gateway(admin_url) from None
    if status != 200 or not isinstance(state, dict) or "workers" not in state:
        raise _not_a_gateway(admin_url)
    return state


def _not_a_gateway(url: str) -> UserError:
    return UserError(f"{url} does not answer as a gateway's admin port does: give the URL of serve's --admin-port")
