"""How heads and chunks are laid out on the wire, for both directions.

Framing headers belong to a connection, not to a message: whatever a caller passes, they are left out here and written by
the side that knows (RFC 9112, 6 and 9). That is also what keeps a relayed message from smuggling a second one.
"""

from collections.abc import Iterable
from http import HTTPStatus

Headers = Iterable[tuple[bytes, bytes]]
"""Names in lower case."""

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"content-length",
        b"keep-alive",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_ANSWERED = _HOP_BY_HOP | {b"date"}  # ours: a relayed one would come twice
_NOT_SENT_UPSTREAM = _HOP_BY_HOP | {b"host", b"expect"}

_STATUS_LINES = {status.value: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}

LAST_CHUNK = b"0\r\n\r\n"
_SIZE_LINES = [b"%x\r\n" % size for size in range(4096)]  # an event of a stream is smaller
_join = b"".join


def chunk(data: bytes) -> bytes:
    """One chunk, with one copy of the data. Data is not empty: an empty chunk is the last. A table and a join take half the
    time of formatting; three writes would take more."""
    size = len(data)
    return _join((_SIZE_LINES[size] if size < 4096 else b"%x\r\n" % size, data, b"\r\n"))


def status_line(status: int) -> bytes:
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def answer_headers(headers: Headers) -> bytes:
    """Header lines for a client of ours. ValueError if a name or a value could break out of its line."""
    return _lines(headers, _NOT_ANSWERED)


def request_head(method: str, target: str, host: bytes, headers: Headers, body_bytes: int) -> bytes:
    """The head of a request to an engine. ValueError as above, and for a target that is not one word."""
    start = f"{method} {target} HTTP/1.1".encode("ascii")
    if len(start.split()) != 3:  # also catches CR and LF
        raise ValueError(f"not a request line: {start!r}")
    head = b"%b\r\nhost: %b\r\n%b" % (start, host, _lines(headers, _NOT_SENT_UPSTREAM))
    if body_bytes or method not in ("GET", "HEAD"):
        return b"%bcontent-length: %d\r\n\r\n" % (head, body_bytes)
    return head + b"\r\n"


def _lines(headers: Headers, left_out: frozenset[bytes]) -> bytes:
    kept = [header for header in headers if header[0] not in left_out]
    if not kept:
        return b""
    block = b"\r\n".join(map(b": ".join, kept)) + b"\r\n"
    if not block.count(b"\n") == block.count(b"\r") == len(kept) or b"\0" in block:
        raise ValueError("a header holds a line break or a NUL")
    return block
