"""A service that is elsewhere: the message says where."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from twinpool.cli.group import cli
from twinpool.http1.urls import redirection


@pytest.mark.parametrize(
    ("status", "location", "where"),
    [
        (301, "https://h/v1/models", "https://h/v1/models"),
        (302, "/login?next=x", "http://a:1/login?next=x"),
        (307, "//other/x", "http://other/x"),
        (308, "http://[broken", "http://[broken"),
        (301, None, None),
        (200, "https://h", None),
        (304, "https://h", None),
    ],
)
def test_where_an_answer_leads_to(status: int, location: str | None, where: str | None) -> None:
    assert redirection(status, "http://a:1/v1/models", location) == where


@contextmanager
def moved(*, but: tuple[str, ...] = ()) -> Iterator[str]:
    """Everything is elsewhere, but the list of models where that is in `but`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            body = b'{"data": [{"id": "m"}]}'
            if self.path in but:
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                return
            self.send_response(308)
            self.send_header("location", f"https://new.example{self.path}")
            self.send_header("content-length", "0")
            self.end_headers()

        do_POST = do_GET  # noqa: N815  # the library's name

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def check_named(path: str, *arguments: str) -> None:
    found = CliRunner().invoke(cli, [*arguments])
    assert (found.exit_code, found.stderr.count("\n")) == (2, 1), found.output
    assert f"answers 308 and leads to https://new.example{path}: give the URL" in found.stderr


@pytest.mark.parametrize("command", ["bench", "check", "compare", "profile", "status"])
def test_every_command_names_it(command: str, tmp_path: Path) -> None:
    with moved() as url:
        more = {"compare": ("--engine", url, "--engine", url), "profile": (url, "--out", str(tmp_path / "p"))}
        path = {"profile": "/twinpool/identity", "status": "/admin/state"}
        check_named(path.get(command, "/v1/models"), command, *more.get(command, (url,)))


@pytest.mark.parametrize("command", ["bench", "check"])
def test_a_question_and_a_metrics_page_are_named_too(command: str) -> None:
    with moved(but=("/v1/models",)) as url:
        check_named("/v1/chat/completions", command, url)
        check_named("/metrics", command, url, "--metrics", url)
