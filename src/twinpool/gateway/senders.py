"""Whose request it is, and how urgent: what the queue shares its turns by (`core.line`)."""

import hashlib
import secrets
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from twinpool.core.model import Priority
from twinpool.errors import BadRequestError, Reason, UnauthorizedError
from twinpool.http1 import Request

PRIORITY = "x-twinpool-priority"

_HEADER = PRIORITY.encode()
_PRIORITY = msgspec.json.Decoder(Priority)


class Sender(NamedTuple):
    """`tenant` is "" where clients need no key: then all are one."""

    tenant: str = ""
    priority: int = 0


class Senders:
    """Knows the clients' keys by their digests: a look-up by digest tells nothing of the key by its timing.

    A tenant's name is a digest under a secret that ends with this process: the journal has the name, and whoever reads it has
    nothing to try keys against.
    """

    def __init__(self, api_keys: Iterable[str], *, client_priorities: bool) -> None:
        secret = secrets.token_bytes(32)
        self._tenants = {
            _digest(key.encode()): hashlib.blake2b(key.encode(), key=secret, digest_size=8).hexdigest() for key in api_keys
        }
        self._client_priorities = client_priorities

    def authenticate(self, request: Request) -> str:
        """The tenant; raises `UnauthorizedError` where a key is needed and none of ours was given."""
        if not self._tenants:
            return ""
        scheme, _, key = (request.header(b"authorization") or b"").partition(b" ")
        tenant = self._tenants.get(_digest(key.strip()))
        if scheme.lower() != b"bearer" or tenant is None:
            raise UnauthorizedError("a valid API key is needed: Authorization: Bearer KEY")
        return tenant

    def identify(self, request: Request) -> Sender:
        tenant = self.authenticate(request)
        return Sender(tenant, _read_priority(request) if self._client_priorities else 0)


def _read_priority(request: Request) -> int:
    given = [value for name, value in request.headers if name == _HEADER]
    if not given:
        return 0
    try:
        (value,) = given
        return _PRIORITY.decode(value)
    except (ValueError, UnicodeDecodeError):
        raise BadRequestError(
            f"{PRIORITY} is one whole number from -100 to 100", Reason.INVALID_VALUE, param=PRIORITY
        ) from None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
