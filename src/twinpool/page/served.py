"""The live page of a gateway: files out of the package, as a browser is to be given them.

The page has no secret in it, asks for everything else at the port that it came from, and its content policy lets it reach no
other place and run no other script.
"""

import hashlib
from functools import cache
from importlib.resources import files
from typing import NamedTuple

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_FOLDER = "live"
_LIBRARY = "chart.umd.min.js"

_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)


class Asset(NamedTuple):
    body: bytes
    headers: dict[str, str]

    @property
    def etag(self) -> str:
        return self.headers["ETag"]


@cache
def assets() -> dict[str, Asset]:
    """By path on the server. Browsers keep them, and ask each time whether they are still the same: after an upgrade of the
    gateway nobody sees half of the old page."""
    package = files("twinpool.page")
    found = {f"/page/{file.name}": file.read_bytes() for file in (package / _FOLDER).iterdir() if file.is_file()}
    found["/"] = found.pop("/page/index.html")
    found[f"/page/{_LIBRARY}"] = (package / "chartjs" / _LIBRARY).read_bytes()
    return {path: Asset(body, _headers(path, body)) for path, body in sorted(found.items())}


def _headers(path: str, body: bytes) -> dict[str, str]:
    return {
        "Content-Type": _TYPES["html" if path == "/" else path.rpartition(".")[2]],
        "ETag": f'"{hashlib.sha256(body).hexdigest()[:24]}"',
        "Cache-Control": "no-cache",
        "Content-Security-Policy": _POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
    }
