"""The public port: who may ask, what is refused before any engine hears of it, and in which words."""

import asyncio
import json
from typing import Any

import pytest
from tests.gateway.house import CHAT, COMPLETIONS, House, chat, house, told, until

from twinpool.engines.scripted import Script

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
