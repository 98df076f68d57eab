"""Whatever a client sends wrongly, it is told what, in the shape of OpenAI, and the next request is answered as before."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.live import prompts, wire
from tests.live.service import Service, process, run

pytestmark = [pytest.mark.model, pytest.mark.timeout(40, func_only=True)]

PATHS = ("chat/completions", "completions")
CAP_BYTES = 64_000
KEY = "sk-of-a-friend"


@pytest.fixture(scope="module")
def strict(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A second gateway before the same workers: short of patience, with a small cap, and for friends only."""
    folder = tmp_path_factory.mktemp("strict")
    config, keys = folder / "twinpool.toml", folder / "keys"
    config.write_text(
        f"[server]\nmax_body_bytes = {CAP_BYTES}\nheader_timeout_s = 0.5\nbody_timeout_s = 0.5\nexpose_route = true\n"
    )
    keys.write_text(f"# friends\n{KEY}\nanother-key\n")
    engines = ["--prefill", service.prefill.url, "--decode", service.decode.url]
    with process(folder, "--config", str(config), "--api-key-file", str(keys), *engines) as ready:
        yield ready["gateway"]["url"]


def good(path: str, service: Service, **fields: Any) -> dict[str, Any]:
    return prompts.body(path, 5, model=service.model, **{"max_tokens": 2, **fields})


def check_refusal(answer: wire.Answer, status: int, code: str, *, param: str | None = None, says: str = "") -> None:
    assert answer.headers["x-request-id"]
    check_envelope(answer, status, code, param=param, says=says)


def check_envelope(answer: wire.Answer, status: int, code: str, *, param: str | None = None, says: str = "") -> None:
    assert (answer.status, answer.headers["content-type"]) == (status, "application/json"), answer.body
    assert answer.json().keys() == {"error"}
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["type"]
    assert says in error["message"]
    assert error["message"][0].islower() or error["message"][0] in "'\"", "a message is a sentence for people"
    if param is not None:
        assert error["param"] == param


def check_well(url: str, service: Service, headers: dict[str, str] | None = None) -> None:
    """By both workers, with nothing left over from before."""
    answer = wire.post(url, "chat/completions", good("chat/completions", service), headers)
    assert answer.status == 200, answer.body
    assert answer.headers["x-twinpool-path"] == "disaggregated"
    service.wait_until_idle()


@pytest.mark.parametrize("path", PATHS)
def test_no_json_object(service: Service, path: str) -> None:
    for body in (b"", b"{", b"not json", b"\xff\xfe", b'"text"', b"[1, 2]", b"null", b'{"model": "m"} {}'):
        check_refusal(wire.ask(service.url, "POST", f"/v1/{path}", body), 400, "invalid_json", says="JSON")
    check_well(service.url, service)


@pytest.mark.parametrize(("path", "stream"), [("chat/completions", True), ("completions", False)])
@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"model": None}, 400, "missing_required_parameter", "model"),
        ({"model": ""}, 400, "invalid_value", "model"),
        ({"model": 7}, 400, "invalid_value", "model"),
        ({"model": "gpt-4"}, 404, "model_not_found", "model"),
        ({"max_tokens": 0}, 400, "invalid_value", "max_tokens"),
        ({"max_tokens": -1}, 400, "invalid_value", "max_tokens"),
        ({"max_tokens": 1_000_000}, 400, "context_length_exceeded", None),
        ({"max_tokens": "many"}, 400, "invalid_value", "max_tokens"),
        ({"temperature": -0.1}, 400, "invalid_value", "temperature"),
        ({"temperature": "hot"}, 400, "invalid_value", "temperature"),
        ({"n": 0}, 400, "invalid_value", "n"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_field(
    service: Service, path: str, fields: dict[str, Any], status: int, code: str, param: str | None, *, stream: bool
) -> None:
    body = {key: value for key, value in {**good(path, service), **fields}.items() if value is not None}
    check_refusal(wire.post(service.url, path, body | {"stream": stream}), status, code, param=param)
    check_well(service.url, service)


@pytest.mark.parametrize(
    ("path", "fields", "code"),
    [
        ("chat/completions", {"messages": []}, "invalid_value"),
        ("chat/completions", {"messages": None}, "missing_required_parameter"),
        ("chat/completions", {"messages": "hello"}, "invalid_value"),
        ("chat/completions", {"messages": [{"content": "hello"}]}, "invalid_value"),
        ("completions", {"prompt": ""}, "invalid_value"),
        ("completions", {"prompt": []}, "invalid_value"),
        ("completions", {"prompt": [""]}, "invalid_value"),
        ("completions", {"prompt": None}, "missing_required_parameter"),
        ("completions", {"prompt": {"text": "hello"}}, "invalid_value"),
    ],
)
def test_an_empty_or_a_strange_prompt(service: Service, path: str, fields: dict[str, Any], code: str) -> None:
    (param,) = fields
    body = {key: value for key, value in {**good(path, service), **fields}.items() if value is not None}
    check_refusal(wire.post(service.url, path, body), 400, code, param=param)
    check_well(service.url, service)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_prompt_longer_than_the_context(service: Service, path: str, *, stream: bool) -> None:
    """Refused at once: nothing of it is computed."""
    before = service.prefill.prompt_tokens_computed() + service.decode.prompt_tokens_computed()
    context = service.ready["workers"][0]["context_tokens"]
    body = prompts.body(path, context + 100, model=service.model, max_tokens=2, stream=stream)
    answer = wire.post(service.url, path, body)
    param = "prompt" if path == "completions" else "messages"
    check_refusal(answer, 400, "context_length_exceeded", param=param, says=str(context))
    assert service.prefill.prompt_tokens_computed() + service.decode.prompt_tokens_computed() == before
    check_well(service.url, service)


def test_the_openai_client_raises_the_right_errors(client: openai.OpenAI, service: Service) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=service.model, prompt="hello", max_tokens=1_000_000)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="hello")
    with pytest.raises(openai.BadRequestError) as refused:
        list(client.chat.completions.create(model=service.model, messages=[], stream=True))
    assert refused.value.param == "messages"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_a_wrong_method(service: Service, method: str, path: str) -> None:
    answer = wire.ask(service.url, method, f"/v1/{path}")
    check_refusal(answer, 405, "method_not_allowed", says="POST")
    check_well(service.url, service)


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/models"), ("DELETE", "/health"), ("POST", "/metrics")])
def test_a_wrong_method_elsewhere(service: Service, method: str, path: str) -> None:
    check_refusal(wire.ask(service.url, method, path), 405, "method_not_allowed", says="GET")


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/unheard-of"), ("GET", "/"), ("POST", "/v1/chat/completions/"), ("GET", "/admin/state")]
)
def test_an_unknown_route(service: Service, method: str, path: str) -> None:
    check_refusal(wire.ask(service.url, method, path, b"{}"), 404, "no_such_route", says=path)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/audio/speech"])
def test_a_route_that_is_known_elsewhere(service: Service, path: str) -> None:
    check_refusal(wire.ask(service.url, "POST", path, b"{}"), 404, "unsupported", says="is not served here")


def test_a_route_that_the_engine_does_not_have(service: Service) -> None:
    answer = wire.ask(service.url, "POST", "/v1/embeddings", b'{"input":"a"}')
    assert (answer.status, answer.json()["error"]["code"]) == (404, "no_such_route")


class TestStrict:
    """A gateway with a key file, a small cap and short time-outs."""

    FRIEND = {"authorization": f"Bearer {KEY}"}  # noqa: RUF012

    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": f"Bearer {KEY}x"},
            {"authorization": KEY},
            {"authorization": "Bearer "},
            {"authorization": "Bearer # friends"},
        ],
        ids=["none", "wrong", "longer", "bare", "empty", "comment"],
    )
    def test_a_wrong_key(self, strict: str, service: Service, headers: dict[str, str]) -> None:
        for answer in (
            wire.post(strict, "chat/completions", good("chat/completions", service), headers),
            wire.ask(strict, "GET", "/v1/models", headers=headers),
        ):
            check_refusal(answer, 401, "invalid_api_key")
        check_well(strict, service, self.FRIEND)

    def test_the_right_key(self, strict: str, service: Service) -> None:
        for key in (KEY, "another-key"):
            with openai.OpenAI(base_url=f"{strict}/v1", api_key=key, max_retries=0) as friend:
                assert [model.id for model in friend.models.list()] == [service.model]
                assert friend.completions.create(model=service.model, prompt="Hello", max_tokens=1).choices[0].text
        with (
            openai.OpenAI(base_url=f"{strict}/v1", api_key="sk-stranger", max_retries=0) as stranger,
            pytest.raises(openai.AuthenticationError),
        ):
            stranger.models.list()

    @pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
    def test_operations_ask_for_no_key(self, strict: str, path: str) -> None:
        assert wire.ask(strict, "GET", path).status == 200

    @pytest.mark.parametrize("bytes_over", [1, 10 * CAP_BYTES])
    def test_a_body_over_the_cap(self, strict: str, service: Service, bytes_over: int) -> None:
        data = b"x" * (CAP_BYTES + bytes_over)
        answer = wire.ask(strict, "POST", "/v1/completions", data, self.FRIEND)
        check_envelope(answer, 413, "body_too_large", says=str(CAP_BYTES))
        check_well(strict, service, self.FRIEND)

    def test_a_body_without_an_announced_end_over_the_cap(self, strict: str, service: Service) -> None:
        """In chunks, no length says what is to come."""
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ntransfer-encoding: chunked\r\n\r\n"
        with wire.sent(strict, head.encode()) as connection:
            sending = threading.Thread(target=send_chunks, args=(connection,))
            sending.start()
            check_envelope(wire.read_answer(connection), 413, "body_too_large")
            sending.join()
        check_well(strict, service, self.FRIEND)

    @pytest.mark.parametrize(
        "half",
        [
            b"POST /v1/compl",
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n",
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n",
            b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"model":',
            b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n9\r\n{"model":\r\n',
        ],
        ids=["line", "head", "no-body", "body", "chunks"],
    )
    def test_half_a_request_then_silence(self, strict: str, service: Service, half: bytes) -> None:
        with wire.sent(strict, half) as connection:
            answer = wire.read_answer(connection)
            check_envelope(answer, 408, "request_timeout")
            assert answer.headers["connection"] == "close"
            assert connection.recv(1) == b""
        check_well(strict, service, self.FRIEND)

    @pytest.mark.parametrize("data", [b"x" * (CAP_BYTES + 1), None], ids=["413", "408"])
    def test_such_an_answer_has_an_id_too(self, strict: str, data: bytes | None) -> None:
        if data is not None:
            assert wire.ask(strict, "POST", "/v1/completions", data, self.FRIEND).headers["x-request-id"]
            return
        with wire.sent(strict, b"POST /v1/compl") as connection:
            assert wire.read_answer(connection).headers["x-request-id"]


def send_chunks(connection: socket.socket) -> None:
    """Twice the cap; the gateway may close before all of it has gone."""
    try:
        for _ in range(2 * CAP_BYTES // 1000):
            connection.sendall(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
    except OSError:
        return


def test_a_missing_key_file(tmp_path: Path) -> None:
    """Never an open door by mistake."""
    empty = tmp_path / "keys"
    empty.write_text("# nobody yet\n")
    for path in (empty, tmp_path / "none"):
        refused = run("serve", "--api-key-file", str(path))
        assert refused.returncode == 2
        assert len(refused.stderr.splitlines()) == 1
