import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any

import pytest
from click.testing import CliRunner
from tests.cli.test_screen import state, worker

from twinpool.cli import state as state_module
from twinpool.cli.group import cli

Answer = Callable[[BaseHTTPRequestHandler], tuple[int, bytes]]


@contextmanager
def admin(answer: Answer, port: int = 0) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


STATE = state(worker("prefill-0"), worker("decode-0"))


def test_json_is_the_gateway_s_own() -> None:
    with admin(lambda request: (200, json.dumps(STATE).encode())) as url:
        result = CliRunner().invoke(cli, ["status", url, "--json"])
    assert (json.loads(result.stdout), result.stderr, result.exit_code) == (STATE, "", 0)


def test_text_is_tables() -> None:
    with admin(lambda request: (200, json.dumps(STATE).encode())) as url:
        assert "prefill-0" in CliRunner().invoke(cli, ["status", url]).stdout


def test_the_token_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("0123456789abcdef\n")

    def answer(request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        told = request.headers["authorization"] == "Bearer 0123456789abcdef" and request.path == "/admin/state"
        return (200, json.dumps(STATE).encode()) if told else (401, b"")

    with admin(answer) as url:
        assert CliRunner().invoke(cli, ["status", url, "--admin-token-file", str(path)]).exit_code == 0
        refused = CliRunner().invoke(cli, ["status", url])
    assert (refused.exit_code, refused.stderr) == (2, f"twinpool: http://{url} wants its token: --admin-token-file FILE\n")


WRONG = [
    (200, json.dumps(STATE | wrong).encode())
    for wrong in ({"workers": {}}, {"workers": [{}]}, {"requests": None}, {"workers": [worker("cook-0")]}, {"uptime_s": "x"})
]


@pytest.mark.parametrize(
    "answer", [(404, b"{}"), (200, b"<html>"), (200, b"[]"), (200, b'{"object":"list"}'), (200, b"[" * 100_000), *WRONG]
)
def test_another_service_is_told_apart(answer: tuple[int, bytes]) -> None:
    with admin(lambda request: answer) as url:
        result = CliRunner().invoke(cli, ["status", url])
    assert result.exit_code == 2
    assert "does not answer as a gateway's admin port does" in result.stderr


def test_nobody_there() -> None:
    with admin(lambda request: (200, b"")) as url:
        pass
    result = CliRunner().invoke(cli, ["status", url])
    assert result.exit_code == 2
    assert f"no gateway answers at http://{url} (Connection refused): twinpool serve starts one" in result.stderr


def test_an_answer_that_never_ends_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    left = threading.Event()

    def drip(request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        try:
            while not left.wait(0.01):
                request.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        except OSError:
            left.set()
            request.close_connection = True
        return 200, b""

    monkeypatch.setattr(state_module, "WHOLE_ANSWER_S", 0.3)
    with admin(drip) as url:
        result = CliRunner().invoke(cli, ["status", url])
        assert left.wait(10)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


def test_more_than_a_gateway_ever_says_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "MOST_BYTES", 100)
    with admin(lambda request: (200, json.dumps(STATE).encode())) as url:
        result = CliRunner().invoke(cli, ["status", url])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


# Watching


@contextmanager
def watching(url: str, *options: str, **more: Any) -> Iterator["subprocess.Popen[bytes]"]:
    argv = [sys.executable, "-m", "twinpool", "status", url, "--watch", "--every", "0.1", *options]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, **more) as running:
        try:
            yield running
        finally:
            running.kill()


def read_until(stream: IO[bytes], what: bytes) -> bytes:
    read = b""
    while what not in read:
        more = os.read(stream.fileno(), 65536)
        assert more, read.decode()
        read += more
    return read


def interrupted(running: "subprocess.Popen[bytes]") -> tuple[int, bytes]:
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=30)
    return running.returncode, said


def test_watched_without_a_terminal_it_is_printed_again_and_again() -> None:
    with admin(lambda request: (200, json.dumps(STATE).encode())) as url, watching(url, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        for _ in range(3):
            shown = read_until(running.stdout, b"No decision yet")
            assert b"\x1b" not in shown
        assert interrupted(running) == (130, b"\n")


def test_watched_as_json_it_is_a_line_a_look() -> None:
    with (
        admin(lambda request: (200, json.dumps(STATE).encode())) as url,
        watching(url, "--json", stdout=subprocess.PIPE) as running,
    ):
        assert running.stdout is not None
        assert [json.loads(running.stdout.readline()) for _ in range(2)] == [STATE, STATE]
        assert interrupted(running) == (130, b"\n")


def test_on_a_terminal_it_is_in_place_and_leaves_what_was_there_before() -> None:
    ours, theirs = pty.openpty()
    looks = threading.Semaphore(0)

    def answer(request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        looks.release()
        return 200, json.dumps(STATE).encode()

    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    with admin(answer) as url, watching(url, stdout=theirs, env=environment) as running, os.fdopen(ours, "rb", 0) as screen:
        os.close(theirs)
        shown = read_until(screen, b"Ctrl-C ends this")
        assert shown.index(b"\x1b[?1049h") < shown.index(b"prefill-0")
        assert all(looks.acquire(timeout=30) for _ in range(3))
        running.send_signal(signal.SIGINT)
        read_until(screen, b"\x1b[?1049l")
        assert (running.wait(30), running.stderr.read()) == (130, b"\n")


def test_what_a_short_screen_has_no_room_for_is_counted() -> None:
    ours, theirs = pty.openpty()
    many = json.dumps(state(*(worker(f"decode-{number}") for number in range(30)))).encode()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    with (
        admin(lambda request: (200, many)) as url,
        watching(url, stdout=theirs, env=environment) as running,
        os.fdopen(ours, "rb", 0) as screen,
    ):
        os.close(theirs)
        shown = read_until(screen, b"Ctrl-C ends this").decode()
        running.send_signal(signal.SIGINT)
        read_until(screen, b"\x1b[?1049l")
    rows = shown.partition("\x1b[?1049h")[2].count("\n") + 1
    assert rows <= 24
    hidden = re.search(r"(\d+) more lines below", shown)
    assert hidden is not None
    assert int(hidden[1]) >= 30 - rows


def test_a_gateway_that_is_started_again_is_seen_again() -> None:
    def answer(request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        return 200, json.dumps(STATE).encode()

    with ExitStack() as stack:
        with admin(answer) as url:
            running = stack.enter_context(watching(url, stdout=subprocess.PIPE))
            assert running.stdout is not None
            read_until(running.stdout, b"No decision yet")
        gone = read_until(running.stdout, b"Asking again until it is back")
        assert b"Gone since " in gone
        assert f"no gateway answers at http://{url}".encode() in gone.replace(b"\n", b" ")
        port = int(url.rpartition(":")[2])
        with admin(answer, port):
            told = read_until(running.stdout, b"No decision yet")
            while b"Gone" in told:
                told = read_until(running.stdout, b"No decision yet")
        assert interrupted(running) == (130, b"\n")


def test_a_mistake_is_one_before_it_watches() -> None:
    with admin(lambda request: (200, b"")) as url:
        pass
    result = CliRunner().invoke(cli, ["status", url, "--watch"])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
