import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.cli.test_screen import state, worker

from twinpool.cli import state as state_module
from twinpool.cli.group import cli

Answer = Callable[[BaseHTTPRequestHandler], tuple[int, bytes]]


@contextmanager
def admin(answer: Answer) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
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
