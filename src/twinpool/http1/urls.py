"""URLs as people paste them, made fit for a request line and a Host header."""

from typing import NamedTuple
from urllib.parse import quote, urlsplit

_PORTS = {"http": 80, "https": 443}
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
    if parts.query or parts.fragment or parts.username is not None:
        raise ValueError("it has more than a host, a port and a path")
    return Url(parts.scheme, _host(parts.hostname or ""), parts.port, quote(parts.path, safe=_KEPT))


def _host(name: str) -> str:
    if not name or "," in name:
        raise ValueError("it names no host")
    if ":" in name:
        return name  # IPv6
    try:
        return name.encode("idna").decode()
    except UnicodeError:
        raise ValueError("no host can have this name") from None
