"""The public port: who may ask, what is refused before any engine hears of it, and in which words."""

import asyncio
import json
from typing import Any

import pytest
from tests.gateway.house import CHAT, COMPLETIONS, House, chat, house, told, until

from twinpool.engines.scripted import Script
from twinpool.gateway.routes import PATHS, ROUTES, UNSUPPORTED, WAYS, Endpoint, Way

KEYS = frozenset({"sk-one", "sk-two"})


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/models", "/v1/x"])
@pytest.mark.parametrize(
    "given",
    [None, "Bearer wrong", "Bearer", "Basic sk-one", "sk-one", "Bearer sk-one x", "Bearer sk-on\xe9", "Bearer sk-one,sk-two"],
)
async def test_without_a_key_of_ours_nothing_is_served(path: str, given: str | None) -> None:
    async with house(prefill=1, decode=1, api_keys=KEYS) as h:
        headers = {} if given is None else {"Authorization": given}
        body = None if path == "/v1/models" else chat()
        answer = await h.ask(path, body, method="POST" if body else "GET", headers=headers)
        if path == "/v1/x":
            assert answer.status == 404
        else:
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert h.p.recorded == h.d.recorded == []


@pytest.mark.parametrize("given", ["Bearer sk-one", "bearer sk-two", "Bearer  sk-two"])
async def test_with_a_key_it_is_served_and_no_engine_sees_the_key(given: str) -> None:
    async with house(prefill=1, decode=1, api_keys=KEYS) as h:
        headers = {"Authorization": given, "X-Api-Key": "sk-one"}
        assert (await h.ask(CHAT, chat("n1"), headers=headers)).text == told("n1")
        assert (await h.ask("/v1/models", method="GET", headers=headers)).status == 200
        for engine in (h.p, h.d):
            assert b"sk-" not in engine.last.raw + json.dumps(engine.last.headers).encode()
        assert b"sk-" not in _read(h)


def _read(h: House) -> bytes:
    return h.journal.read_bytes()


async def test_operations_need_no_key() -> None:
    async with house(prefill=1, decode=1, api_keys=KEYS) as h:
        for path in ("/health", "/ready", "/metrics"):
            assert (await h.get(path)).status == 200


@pytest.mark.parametrize(
    ("path", "status"), [("/health", 200), ("/ready", 200), ("/metrics", 200), ("/v1/models", 200), ("/x", 404)]
)
async def test_every_answer_names_its_request(path: str, status: int) -> None:
    async with house(colocated=1) as h:
        answer = await h.get(path, headers={"x-request-id": "mine-1"})
        assert answer.status == (404 if path == "/x" else 200)
        assert answer.headers["x-request-id"] == "mine-1"
        assert (await h.get(path)).headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize("given", ["a" * 129, "\xe9", ""])
async def test_a_strange_request_id_is_replaced(given: str) -> None:
    async with house(colocated=1) as h:
        answer = await h.ask(CHAT, chat(), headers={"x-request-id": given})
        assert answer.headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[]", "invalid_json"),
        (b'"text"', "invalid_json"),
        (b'{"model":"scripted","x":' + b"[" * 20_000 + b"]" * 20_000 + b"}", "invalid_json"),
        (b"{}", "missing_required_parameter"),
        (b'{"model":7}', "invalid_value"),
    ],
    ids=lambda value: value[:12] if isinstance(value, bytes) else value,
)
async def test_a_body_that_cannot_be_routed_is_refused_in_openais_shape(body: bytes, code: str) -> None:
    async with house(prefill=1, decode=1) as h:
        answer = await h.ask(CHAT, body)
        assert answer.status == 400
        assert (answer.error["code"], answer.error["type"]) == (code, "invalid_request_error")
        assert answer.headers["x-request-id"]
        assert h.p.recorded == h.d.recorded == []
        assert await h.metric("twinpool_requests_total", path="none", outcome="turned_away") == 1
        assert (await h.chat("n2")).text == told("n2")


@pytest.mark.parametrize(("method", "path"), [("GET", CHAT), ("PUT", CHAT), ("DELETE", "/v1/models"), ("POST", "/health")])
async def test_another_method_is_405(method: str, path: str) -> None:
    async with house(colocated=1) as h:
        answer = await h.ask(path, method=method)
        assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_of_megabytes_passes_and_one_over_the_cap_is_413(chunked: bool) -> None:
    cap = 9 << 20
    async with house(prefill=1, decode=1, server={"max_body_bytes": cap}) as h:
        image = {"type": "image_url", "image_url": {"url": "data:" + "A" * (8 << 20)}}
        large = chat() | {"messages": [{"role": "user", "content": [{"type": "text", "text": "n1"}, image]}]}
        assert (await h.ask(CHAT, large)).status == 200
        assert h.d.last.body["messages"] == large["messages"]
        seen = len(h.p.recorded)
        wire = await h.connect()
        if chunked:
            wire.writer.write(b"POST %b HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n" % CHAT.encode())
            piece = b"%x\r\n%b\r\n" % (1 << 20, b"x" * (1 << 20))
            for _ in range(10):
                wire.writer.write(piece)
        else:
            head = b"POST %b HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), cap + 1)
            wire.writer.write(head)
        head = await asyncio.wait_for(wire.reader.readuntil(b"\r\n\r\n"), 5)
        assert head.startswith(b"HTTP/1.1 413 ")
        assert b'"code":"body_too_large"' in await asyncio.wait_for(wire.reader.read(4096), 5)
        await wire.leave()
        assert len(h.p.recorded) == seen
        assert (await h.chat("n3")).text == told("n3")


async def test_half_a_request_and_then_silence_is_408() -> None:
    async with house(colocated=1, server={"body_timeout_s": 0.2}) as h:
        async with await h.connect() as wire:
            wire.writer.write(b"POST %b HTTP/1.1\r\nhost: h\r\ncontent-length: 100\r\n\r\n{" % CHAT.encode())
            assert (await asyncio.wait_for(wire.reader.readuntil(b"\r\n\r\n"), 5)).startswith(b"HTTP/1.1 408 ")
        assert h.c.recorded == []


async def test_a_connection_serves_one_request_after_the_other() -> None:
    async with house(prefill=1, decode=1) as h, await h.connect() as wire:
        for n in range(3):
            wire.post(chat(f"n{n}"))
        for n in range(3):
            head = await asyncio.wait_for(wire.reader.readuntil(b"\r\n\r\n"), 5)
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            body = json.loads(await wire.reader.readexactly(length))
            assert body["choices"][0]["message"]["content"] == told(f"n{n}")


async def test_an_answer_shows_nothing_of_the_handoff() -> None:
    async with house(prefill=1, decode=1, server={"expose_route": False}) as h:
        h.d.script.on_request = None
        for stream in (False, True):
            answer = await h.chat(stream=stream)
            shown = answer.body + json.dumps(answer.headers).encode()
            assert b"kv_transfer_params" not in shown
            assert b"remote_" not in shown
            assert b"x-twinpool" not in shown.lower()


async def test_keys_and_prompts_are_not_in_the_journal() -> None:
    async with house(prefill=1, decode=1) as h:
        await h.chat("very-secret-words")
        handle: dict[str, Any] = h.d.last.kv_transfer_params or {}
        await until(lambda: h.arrivals() == 1)
        written = _read(h)
        assert b"very-secret-words" not in written
        assert handle["remote_request_id"].encode() not in written
        assert handle["twinpool_signature"].encode() not in written


async def test_an_engine_that_only_speaks_openai_serves_whole() -> None:
    async with house(colocated=1) as h:
        h.c.script.is_embedded = False
        await h.c.restart()
        await h.up()
        stock = Script()
        assert not stock.is_embedded
        assert (await h.chat("n4")).text == told("n4")


# Which way each route goes


ASKED = {
    "/v1/embeddings": {"input": ["a", "b"]},
    "/pooling": {"input": "a"},
    "/classify": {"input": "a"},
    "/v1/rerank": {"query": "q", "documents": ["a"]},
    "/v2/rerank": {"query": "q", "documents": ["a"]},
    "/rerank": {"query": "q", "documents": ["a"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1, 2]},
    CHAT: chat(),
    COMPLETIONS: {"prompt": "please answer n1"},
}


def test_every_route_is_declared() -> None:
    assert ASKED.keys() == ROUTES.keys()
    assert WAYS.keys() == set(Endpoint) == PATHS.keys()
    assert not ROUTES.keys() & UNSUPPORTED.keys()


@pytest.mark.parametrize("path", ASKED)
async def test_every_route_goes_the_way_it_is_declared_to(path: str) -> None:
    """A route that quietly goes to one pool alone shows in nobody's answers."""
    async with house(prefill=1, decode=1) as h:
        endpoint = ROUTES[path]
        body = {"model": "scripted", "x_future": 1.0} | ASKED[path]
        answer = await h.ask(path, body)
        assert answer.status == 200
        is_split = WAYS[endpoint] is Way.DISAGGREGATED
        assert answer.headers["x-twinpool-path"] == WAYS[endpoint]
        assert len(h.p.recorded) + len(h.d.recorded) == 1 + is_split
        assert len(h.p.recorded) == is_split
        assert await h.metric("twinpool_requests_total", path=WAYS[endpoint], outcome="ok") == 1
        if not is_split:
            assert answer.json() == {"object": "echo", "route": PATHS[endpoint], "asked": body}
            assert await h.metric("twinpool_decisions_total", choice="colocated", reason="other_route") == 1


@pytest.mark.parametrize("path", UNSUPPORTED)
async def test_a_route_that_is_declared_unsupported_says_why(path: str) -> None:
    async with house(prefill=1, decode=1) as h:
        answer = await h.ask(path, chat())
        assert (answer.status, answer.error["code"]) == (404, "unsupported")
        assert UNSUPPORTED[path] in answer.error["message"]
        assert (await h.get(f"{path}/x")).status == 404
        assert h.p.recorded == h.d.recorded == []
        assert await h.metric("twinpool_requests_total", outcome="turned_away") == 2


@pytest.mark.parametrize("path", ["/v1/unheard-of", "/v1/", "/v1", "/metrics/x", "/admin/state", "/v1/chat/completions/", "/"])
async def test_a_route_that_nobody_knows_reaches_no_engine(path: str) -> None:
    async with house(prefill=1, decode=1) as h:
        for method in ("GET", "POST"):
            answer = await h.ask(path, chat() if method == "POST" else None, method=method)
            assert (answer.status, answer.error["code"]) == (404, "no_such_route")
        assert h.p.recorded == h.d.recorded == []


async def test_where_one_model_is_served_it_need_not_be_named_to_count_its_tokens() -> None:
    async with house(colocated=1) as h:
        assert (await h.ask("/tokenize", {"prompt": "a"})).status == 200
        assert h.c.last.body == {"prompt": "a"}
        assert (await h.ask("/tokenize", {"prompt": "a", "model": "other"})).status == 404


async def test_where_there_are_two_models_it_must_be() -> None:
    async with house(colocated=[Script(models=("a", "b"))], is_stock=True) as h:
        answer = await h.ask("/tokenize", {"prompt": "a"})
        assert (answer.status, answer.error["param"]) == (400, "model")


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        (CHAT, {"n": 2}, "n_choices"),
        (CHAT, {"n": "2"}, "n_choices"),
        (COMPLETIONS, {"best_of": 2}, "best_of"),
        (COMPLETIONS, {"use_beam_search": True}, "beam_search"),
        (COMPLETIONS, {"prompt": ["a n1", "b n2"]}, "prompt_list"),
        (CHAT, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (COMPLETIONS, {"echo": True}, "echo"),
        (COMPLETIONS, {"logprobs": 2}, None),
        (CHAT, {"logprobs": True, "top_logprobs": 2}, None),
    ],
)
async def test_what_an_engine_cannot_hand_over_goes_whole_and_says_why(path: str, fields: Any, reason: str | None) -> None:
    async with house(prefill=Script(validates=False), decode=Script(validates=False)) as h:
        body = ({"model": "scripted", "prompt": "please answer n1"} if path == COMPLETIONS else chat()) | fields
        answer = await h.ask(path, body)
        assert (answer.status == 200) or fields == {"n": "2"}
        handed_over = [recorded for engine in (h.p, h.d) for recorded in engine.recorded if recorded.kv_transfer_params]
        assert len(handed_over) == (2 if reason is None else 0)
        assert await h.metric("twinpool_decisions_total", reason=reason or "pair_ready") == 1


# What only the router may say


STEERING = {
    "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "169.254.169.254", "remote_port": 80},
    "ec_transfer_params": {"peer": "x"},
    "bootstrap_host": "169.254.169.254",
    "bootstrap_port": 80,
    "bootstrap_room": 1,
    "disagg_prefill_dp_rank": 1,
    "data_parallel_rank": 1,
    "twinpool_continue": {"text": "x"},
}


@pytest.mark.parametrize("path", ASKED)
async def test_what_steers_engines_never_comes_from_a_client(path: str) -> None:
    headers = {"x-prefiller-host-port": "127.0.0.1:9", "x-data-parallel-rank": "1", "x-kv-transfer-params": "{}"}
    async with house(prefill=1, decode=1) as h:
        body = {"model": "scripted"} | ASKED[path] | STEERING
        body |= {"vllm_xargs": STEERING | {"mine": 1}, "extra_body": STEERING}
        assert (await h.ask(path, body, headers=headers)).status == 200
        for engine in (h.p, h.d):
            for recorded in engine.recorded:
                seen = dict(recorded.body)
                ours = seen.pop("kv_transfer_params", {})
                assert ours.get("remote_host") in (None, "127.0.0.1")
                assert ours.get("remote_port") in (None, h.p.port)
                assert not STEERING.keys() & seen.keys()
                assert seen["vllm_xargs"] == {"mine": 1}
                assert "169.254" not in json.dumps([seen, recorded.headers])
                assert not headers.keys() & recorded.headers.keys()
