"""What a client library hides: heads, framing, and which of a client's own words reach an engine."""

import json

import pytest
from tests.live import prompts, wire
from tests.live.service import Service

pytestmark = [pytest.mark.model, pytest.mark.timeout(30, func_only=True)]

PATHS = ("chat/completions", "completions")
FORGED = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "0" * 32,
    "remote_request_id": "0" * 32,
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "remote_block_ids": [0],
    "remote_num_tokens": 5,
    "tp_size": 1,
    "twinpool_signature": "0" * 64,
}


@pytest.mark.parametrize("path", PATHS)
def test_the_head_of_an_answer(service: Service, path: str) -> None:
    answer = wire.post(service.url, path, prompts.body(path, 20, model=service.model, max_tokens=2))
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert int(answer.headers["content-length"]) == len(answer.body)
    assert answer.headers["x-request-id"]
    check_disaggregated(service, answer)


@pytest.mark.parametrize("path", PATHS)
def test_a_stream(service: Service, path: str) -> None:
    answer = wire.post(service.url, path, prompts.body(path, 20, model=service.model, max_tokens=3, stream=True))
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["transfer-encoding"] == "chunked"
    assert answer.headers["x-request-id"]
    check_disaggregated(service, answer)
    *events, last = answer.events()
    assert last == b"[DONE]"
    chunks = [json.loads(event) for event in events]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert all("usage" not in chunk and "kv_transfer_params" not in chunk for chunk in chunks)


def test_one_connection_serves_many_requests(service: Service) -> None:
    """Streamed, refused and whole, one after the other."""
    body = prompts.body("completions", 5, model=service.model, max_tokens=2)
    answers = wire.ask_in_turn(service.url, "completions", [body | {"stream": True}, body | {"model": "none"}, body])
    assert [answer.status for answer in answers] == [200, 404, 200]
    assert answers[0].events()[-1] == b"[DONE]"


def test_a_request_keeps_its_id(service: Service) -> None:
    body = prompts.body("completions", 5, model=service.model, max_tokens=1)
    for each in (body, body | {"stream": True}, body | {"model": "none"}):
        assert wire.post(service.url, "completions", each, {"x-request-id": "mine-17"}).headers["x-request-id"] == "mine-17"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/models", None),
        ("GET", "/v1/chat/completions", None),
        ("GET", "/nowhere", None),
        ("POST", "/v1/completions", b"{"),
        ("GET", "/health", None),
        ("GET", "/ready", None),
        ("GET", "/metrics", None),
    ],
)
def test_every_answer_has_an_id(service: Service, method: str, path: str, body: bytes | None) -> None:
    first, second = (wire.ask(service.url, method, path, body).headers["x-request-id"] for _ in range(2))
    assert first
    assert second
    assert first != second


def test_operations(service: Service) -> None:
    assert wire.ask(service.url, "GET", "/health").status == 200
    assert wire.ask(service.url, "GET", "/ready").status == 200
    assert b"twinpool_pool_workers" in wire.ask(service.url, "GET", "/metrics").body
    models = wire.ask(service.url, "GET", "/v1/models").json()
    assert models["object"] == "list"
    assert [model["id"] for model in models["data"]] == [service.model]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [1, 2], ids=["disaggregated", "colocated"])
def test_a_client_cannot_bring_a_handle(service: Service, path: str, n: int) -> None:
    """A worker refuses it; through the gateway the request is answered as if it were not there, whichever way it goes."""
    body = prompts.body(path, 20, model=service.model, max_tokens=4)
    forged = body | {"kv_transfer_params": FORGED, "n": n}
    refused = wire.post(service.decode.url, path, forged)
    assert 400 <= refused.status < 500
    assert "choices" not in refused.json()

    answer = wire.post(service.url, path, forged)
    assert answer.status == 200
    assert answer.headers["x-twinpool-path"] == ("disaggregated" if n == 1 else "colocated")
    assert b"kv_transfer_params" not in answer.body
    plain = wire.post(service.url, path, body)
    assert [shown(choice) for choice in answer.json()["choices"]] == [shown(plain.json()["choices"][0])] * n


def test_a_client_cannot_have_a_handle(service: Service) -> None:
    """Asking to be the prefill leg gets a whole answer and no handle."""
    body = prompts.body("completions", 20, model=service.model, max_tokens=4)
    answer = wire.post(service.url, "completions", body | {"kv_transfer_params": {"do_remote_decode": True}})
    assert answer.status == 200
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert b"kv_transfer_params" not in answer.body
    assert not service.at_work()


def test_a_client_cannot_choose_workers(service: Service) -> None:
    """Neither by headers nor by the fields of other engines' topologies."""
    body = prompts.body("completions", 20, model=service.model, max_tokens=2)
    topology = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 1, "disagg_prefill_dp_rank": 3}
    headers = {
        "x-twinpool-path": "colocated",
        "x-twinpool-prefill": service.decode.id,
        "x-twinpool-decode": service.prefill.id,
        "x-prefiller-host-port": "127.0.0.1:1",
        "x-data-parallel-rank": "7",
    }
    answer = wire.post(service.url, "completions", body | topology, headers)
    assert answer.status == 200
    check_disaggregated(service, answer)


def test_unknown_fields_reach_the_engine(service: Service) -> None:
    """`grammar` is llama.cpp's own: no OpenAI client and no gateway knows it."""
    body = prompts.body("completions", 5, model=service.model, max_tokens=20, grammar='root ::= "zebra"', nonsense={"a": [1]})
    answer = wire.post(service.url, "completions", body)
    assert answer.status == 200
    check_disaggregated(service, answer)
    assert answer.json()["choices"][0]["text"] == "zebra"


def shown(choice: dict[str, object]) -> object:
    return choice.get("message", choice.get("text"))


def check_disaggregated(service: Service, answer: wire.Answer) -> None:
    names = ("x-twinpool-path", "x-twinpool-prefill", "x-twinpool-decode")
    found = {name: answer.headers.get_all(name) for name in names}
    assert found == dict(zip(names, (["disaggregated"], [service.prefill.id], [service.decode.id]), strict=True))
