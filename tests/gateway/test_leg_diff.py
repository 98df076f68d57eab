"""The legs of thousands of random requests, as engines got them, against what clients sent.

Bodies are valid for vLLM, whose objections the engines raise; beside its fields they have others that nobody knows yet, and
numbers and texts in the ways in which JSON lets them be written.
"""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.gateway.house import CHAT, COMPLETIONS, House, house, raw_fields

from twinpool.handoff.body import OURS

REQUESTS = 2000
AT_ONCE = 50

_ONE = {"max_tokens", "max_completion_tokens", "max_output_tokens"}
_NEVER_ON_PREFILL = {"min_tokens", "min_completion_tokens", "stream_options"}

_SCALARS = (
    b"null",
    b"true",
    b"false",
    b"0",
    b"-0",
    b"1.0",
    b"1e5",
    b"0.10000000000000000555",
    b"12345678901234567890123",
    b'""',
    b'"\\ud83d\\ude00"',
    '"日本"'.encode(),
    b'"a\\/b\\n"',
    b'"kv_transfer_params"',
)
_NAMES = ("x_future", "chat_template_kwargs", "return_token_ids", "ключ", "a b", "x.y", "metadata", "", "priority")


def value(rng: random.Random, depth: int = 3) -> bytes:
    """Any JSON, as it may be written: with spaces where they may stand."""
    kind = rng.random()
    if depth == 0 or kind < 0.6:
        return rng.choice(_SCALARS)
    gap = rng.choice((b"", b" ", b"\n"))
    inner = [value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind < 0.8:
        return b"[" + (b"," + gap).join(inner) + gap + b"]"
    return b"{" + b",".join(b'"k%d":%b%b' % (index, gap, one) for index, one in enumerate(inner)) + b"}"


def body(rng: random.Random, nonce: str) -> tuple[str, bytes]:
    """A route, and a body for it that vLLM would take and that one handle can serve."""
    is_chat = rng.random() < 0.5
    words = f"please answer {nonce}"
    content = f'[{{"type":"text","text":"{words}"}}]' if rng.random() < 0.3 else f'"{words}"'
    prompt = f'"messages": [{{"role":"user", "content": {content}}}]' if is_chat else f'"prompt":"{words}"'
    fields = ['"model":"scripted"', prompt]
    limit = rng.randrange(1, 20)
    fields += rng.sample(
        [f'"max_tokens":{limit}', f'"max_completion_tokens":{limit}'] if is_chat else [f'"max_tokens":{limit}'], 1
    )
    if rng.random() < 0.3:
        fields.pop()
        limit = 20
    if rng.random() < 0.3:
        fields.append(f'"min_tokens":{rng.randrange(limit)}')
    if rng.random() < 0.5:
        fields.append('"stream":true')
        if rng.random() < 0.5:
            fields.append('"stream_options":{"include_usage":true}')
    optional = [
        '"temperature":0.0',
        '"seed":-1',
        '"n":1',
        '"stop":["zzz"]',
        '"user":null',
        '"logprobs":true,"top_logprobs":2' if is_chat else '"logprobs":2',
        '"tools":[{"type":"function","function":{"name":"f"}}]',
        '"response_format":{"type":"json_object"}',
        '"structured_outputs":{"regex":"a+"}',
        '"logit_bias":{"50256":-100}',
        '"cache_salt":"s"',
    ]
    fields += rng.sample(optional, rng.randrange(5))
    written = [field.encode() for field in fields]
    names = rng.sample(_NAMES, rng.randrange(4)) + rng.sample(sorted(OURS), rng.randrange(3))
    written += [msgspec.json.encode(name) + b":" + value(rng) for name in names]
    rng.shuffle(written)
    gap = rng.choice((b"", b" ", b"\r\n\t"))
    return CHAT if is_chat else COMPLETIONS, b"{" + gap + (b"," + gap).join(written) + gap + b"}"


async def test_the_decode_leg_is_the_clients_body_and_the_prefill_leg_the_same_for_one_token() -> None:
    rng = random.Random(4)
    asked = {f"n{index}x": body(rng, f"n{index}x") for index in range(REQUESTS)}
    async with house(prefill=1, decode=1) as h:
        for batch in _batches(list(asked.items())):
            answers = await asyncio.gather(*(h.ask(path, sent) for _, (path, sent) in batch))
            assert [answer.status for answer in answers] == [200] * len(batch), next(a.body for a in answers if a.status != 200)
        prefills, decodes = _by_nonce(h, 0), _by_nonce(h, 1)
        assert prefills.keys() == decodes.keys() == asked.keys()
        for nonce, (_, sent) in asked.items():
            client = {name: raw for name, raw in _fields(sent).items() if name not in OURS}
            _check_decode(client, decodes[nonce])
            _check_prefill(client, prefills[nonce])


def _check_decode(client: dict[str, bytes], leg: dict[str, bytes]) -> None:
    handle = msgspec.json.decode(leg.pop("kv_transfer_params"))
    assert handle["do_remote_prefill"] is True
    asked = leg.pop("stream_options", None)
    if asked is not None and "stream_options" not in client:
        assert (asked, client["stream"]) == (b'{"include_usage":true}', b"true"), "every stream is asked for its usage"
        asked = None
    client = client.copy()
    assert asked == client.pop("stream_options", None)
    assert list(leg.items()) == list(client.items()), "byte for byte, and in the client's order"


def _check_prefill(client: dict[str, bytes], leg: dict[str, bytes]) -> None:
    assert msgspec.json.decode(leg.pop("kv_transfer_params"))["do_remote_decode"] is True
    assert leg.pop("stream") == b"false"
    assert leg.pop("max_tokens") == b"1"
    assert {leg.pop(name) for name in _ONE & leg.keys()} <= {b"1"}
    assert _ONE & client.keys() <= {"max_tokens"} | _ONE
    rest = {name: raw for name, raw in client.items() if name not in {"stream"} | _ONE | _NEVER_ON_PREFILL}
    assert leg == rest


def _batches(asked: list[Any]) -> Iterator[list[Any]]:
    return (asked[start : start + AT_ONCE] for start in range(0, len(asked), AT_ONCE))


def _fields(sent: bytes) -> dict[str, bytes]:
    return {name: bytes(raw) for name, raw in msgspec.json.decode(sent, type=dict[str, msgspec.Raw]).items()}


def _by_nonce(h: House, pool: int) -> dict[str, dict[str, bytes]]:
    """What each engine got, by the last word of its prompt; no request comes twice."""
    found = {}
    for recorded in (h.p, h.d)[pool].recorded:
        content = recorded.body.get("prompt") or recorded.body["messages"][0]["content"]
        text = content if isinstance(content, str) else content[0]["text"]
        assert text.split()[-1] not in found
        found[text.split()[-1]] = raw_fields(recorded)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_the_bodies_are_as_varied_as_they_should_be(seed: int) -> None:
    rng = random.Random(seed)
    names = {name for index in range(300) for name in _fields(body(rng, f"n{index}")[1])}
    assert names >= {"min_tokens", "max_completion_tokens", "stream_options", "tools", "x_future", "ключ", *OURS}
