"""HTTP as it goes over the wire, for what a client library hides: heads, framing, halves of requests, hanging up."""

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 250.0  # the longest prompt in these tests takes a fifth of that on cores that do nothing else


@dataclass(frozen=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[bytes]:
        """The payloads of a stream of server-sent events, ``[DONE]`` included."""
        *events, rest = self.body.split(b"\n\n")
        assert not rest, f"a stream ends with a blank line, this one with {rest!r}"
        assert all(event.startswith(b"data: ") for event in events)
        return [event.removeprefix(b"data: ") for event in events]


def ask(url: str, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Answer:
    """One request on a connection of its own."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return Answer(answer.status, answer.headers, answer.read())
    finally:
        connection.close()


def ask_in_turn(url: str, path: str, bodies: list[dict[str, Any]]) -> list[Answer]:
    """Several requests, one after the other; fails when the connection is not kept."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    connection.connect()
    first, answers = connection.sock, []
    try:
        for body in bodies:
            connection.request("POST", f"/v1/{path}", json.dumps(body).encode(), {"content-type": "application/json"})
            answer = connection.getresponse()
            answers.append(Answer(answer.status, answer.headers, answer.read()))
            assert connection.sock is first, "the connection was closed"
    finally:
        connection.close()
    return answers


def post(url: str, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Answer:
    return ask(url, "POST", f"/v1/{path}", json.dumps(body).encode(), {"content-type": "application/json", **(headers or {})})


def dial(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=TIMEOUT_S)


@contextmanager
def sent(url: str, data: bytes) -> Iterator[socket.socket]:
    """A socket on which these bytes were sent. The end of the block hangs up."""
    with dial(url) as connection:
        connection.sendall(data)
        yield connection


def request_bytes(path: str, body: dict[str, Any]) -> bytes:
    """A whole request as bytes."""
    payload = json.dumps(body).encode()
    lines = [f"POST /v1/{path} HTTP/1.1", "host: twinpool", "content-type: application/json", f"content-length: {len(payload)}"]
    return "\r\n".join([*lines, "", ""]).encode() + payload


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    """What comes up to and with `mark`; fails when the connection ends before it."""
    data = b""
    while mark not in data:
        more = connection.recv(65536)
        assert more, f"the connection ended without {mark!r}, after {data!r}"
        data += more
    return data


def read_answer(connection: socket.socket) -> Answer:
    """The next answer on this connection."""
    answer = http.client.HTTPResponse(connection)
    try:
        answer.begin()
        return Answer(answer.status, answer.headers, answer.read())
    finally:
        answer.close()
