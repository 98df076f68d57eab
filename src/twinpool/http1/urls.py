"""URLs as people paste them, made fit for a request line and a Host header."""

import re
from typing import NamedTuple
from urllib.parse import quote, urljoin, urlsplit

_PORTS = {"http": 80, "https": 443}
_REDIRECTIONS = frozenset({301, 302, 303, 307, 308})
_KEPT = "/%:@!$&'()*+,;=~"


class Url(NamedTuple):
    """In ASCII and without white space. `port` is None where none is written."""

    scheme: str
    host: str
    port: int | None
    path: str

    @property
    def port_or_default(self) -> int:
        return self.port or _PORTS[self.scheme]


def parse_url(text: str) -> Url:
    """``host:port`` is meant as http. ValueError, with the reason, for what is no place of a service."""
    text = text.strip()
    if not text.isprintable() or " " in text:
        raise ValueError("there is white space or a control character in it")
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if parts.scheme not in _PORTS:
        raise ValueError(f"{parts.scheme} is neither http nor https")
    if parts.port == 0:
        raise ValueError("nobody listens on port 0")
    if parts.username is not None:
        raise ValueError("there is somebody's name in it, and keys are given in files")
    if parts.query or parts.fragment:
        raise ValueError("it has more than a host, a port and a path")
    return Url(parts.scheme, _host(parts.hostname or ""), parts.port, quote(parts.path, safe=_KEPT))


def without_password(text: str) -> str:
    """A URL to be shown: what stands before an @ may be a secret."""
    return re.sub(r"(//|^)[^/]*@", r"\1...@", text)


def redirection(status: int, asked: str, location: str | None) -> str | None:
    """Where an answer sends its client on to, whole; None for one that does not. Nobody here follows: what is named is not
    where the service was said to be, and must not get its key."""
    if status not in _REDIRECTIONS or not location:
        return None
    try:
        return urljoin(asked, location)
    except ValueError:  # a broken address in it
        return location


def _host(name: str) -> str:
    if not name or "," in name:
        raise ValueError("it names no host")
    if ":" in name:
        return name  # IPv6
    try:
        return name.encode("idna").decode()
    except UnicodeError:
        raise ValueError("no host can have this name") from None
