"""Asks a gateway's admin port for its state, as `twinpool status` shows it."""

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from twinpool.errors import UserError

TIMEOUT_S = 5.0


def fetch_state(admin_url: str, token: str | None) -> dict[str, Any]:
    """The JSON of ``GET /admin/state``. Blocks for at most a few seconds; raises `UserError` when it cannot be had."""
    request = urllib.request.Request(f"{admin_url}/admin/state")  # noqa: S310  # http or https: `engine_url` checked
    if token:
        request.add_header("authorization", f"Bearer {token}")
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # an admin port is never behind a web proxy
    try:
        with direct.open(request, timeout=TIMEOUT_S) as answer:
            state = json.load(answer)
    except urllib.error.HTTPError as refused:
        if refused.code == 401:
            raise UserError(f"{admin_url} wants its token: --admin-token-file FILE") from None
        raise _not_a_gateway(admin_url) from None
    except OSError as problem:
        reason = getattr(problem, "reason", problem)
        why = getattr(reason, "strerror", None) or str(reason)
        raise UserError(f"no gateway answers at {admin_url} ({why}): start one with twinpool serve, or give its URL") from None
    except (ValueError, http.client.HTTPException):
        raise _not_a_gateway(admin_url) from None
    if not isinstance(state, dict) or "workers" not in state:
        raise _not_a_gateway(admin_url)
    return state


def _not_a_gateway(url: str) -> UserError:
    return UserError(f"{url} does not answer as a gateway's admin port does: give the URL of `serve --admin-port`")
