"""What the engines get of a client's request: its body on the decode leg, the same for one token on the prefill leg, and
nothing that could steer one engine to another."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gateway.house import CHAT, COMPLETIONS, House, chat, house, raw_fields, told

from twinpool.engines.scripted import Default, Recorded, Reply, Script, ScriptedEngine

ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
LIMIT = "twinpool_max_tokens"  # the client's own, for the embedded worker

FORGED = {
    "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1, "remote_request_id": "x"},
    "bootstrap_host": "127.0.0.1",
    "bootstrap_port": 1,
    "bootstrap_room": 7,
    "disagg_prefill_dp_rank": 0,
}

# JSON as it may come: numbers that no parser should touch, nulls, keys of any script
_NUMBERS = st.sampled_from(["0", "-0", "1.0", "1e5", "1E-7", "0.10", str(10**40), str(-(2**63)), "123456789012345678901"])
_TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12).map(json.dumps)
_VALUES = st.recursive(
    st.one_of(_NUMBERS, _TEXTS, st.sampled_from(["null", "true", "false"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        st.dictionaries(_TEXTS, inner, max_size=3).map(lambda d: "{" + ",".join(f"{k} : {v}" for k, v in d.items()) + "}"),
    ),
    max_leaves=6,
)
_KNOWN = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.sampled_from(["5", "9"]),
        "max_completion_tokens": st.sampled_from(["4", "8"]),
        "min_tokens": st.sampled_from(["1", "3"]),
        "temperature": st.sampled_from(["0", "0.70", "1.0"]),
        "stream_options": st.sampled_from(['{"include_usage":true}', '{ "include_usage" : false }']),
        "stop": st.sampled_from(['"zzz"', '["zzz", "日本"]']),
        "logprobs": st.just("true"),
        "chat_template_kwargs": st.just('{"enable_thinking": false}'),
        "return_token_ids": st.just("true"),
        "seed": _NUMBERS,
    },
)
_UNKNOWN = st.dictionaries(_TEXTS.map(lambda text: '"x_' + text[1:]), _VALUES, max_size=4)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    known = draw(_KNOWN)
    fields = {'"model"': '"scripted"', '"messages"': '[{"role": "user", "content": "please answer n1"}]'}
    fields |= {f'"{name}"': value for name, value in known.items()} | draw(_UNKNOWN)
    if "stream_options" in known:
        fields['"stream"'] = "true"
    order = draw(st.permutations(list(fields)))
    return ("{" + ", ".join(f"{name}:{fields[name]}" for name in order) + "}").encode()


def fields_of(body: bytes) -> dict[str, bytes]:
    return raw_fields(Recorded("", "", {}, None, body, 0.0, 1, 1))


@settings(max_examples=60, deadline=None)
@given(st.lists(bodies(), min_size=1, max_size=4))
async def test_the_decode_leg_is_the_clients_body_and_the_prefill_leg_the_same_for_one_token(sent: list[bytes]) -> None:
    async with house(prefill=1, decode=1) as h:
        for body in sent:
            assert (await h.ask(CHAT, body)).status == 200
            theirs, prefill, decode = fields_of(body), raw_fields(h.p.last), raw_fields(h.d.last)
            assert decode.pop("kv_transfer_params")
            options = json.loads(theirs.get("stream_options", b"null"))
            if options == {"include_usage": False}:  # the one thing that we ask for ourselves
                assert decode["stream_options"] == b'{"include_usage":true}'
                decode["stream_options"] = theirs["stream_options"]
            assert decode == theirs
            asked = json.loads(prefill.pop("kv_transfer_params"))
            limit = json.loads(theirs.get("max_completion_tokens", theirs.get("max_tokens", b"null")))
            assert asked.pop(LIMIT) == limit
            assert asked == ASK
            assert prefill.pop("stream") == b"false"
            limits = {"max_tokens", "max_completion_tokens"} & theirs.keys()
            assert {prefill.pop(name) for name in limits | {"max_tokens"}} == {b"1"}
            dropped = {"stream_options", "min_tokens", "stream"} | limits
            assert prefill == {name: value for name, value in theirs.items() if name not in dropped}


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens", "both", "none"])
@pytest.mark.parametrize("stream", [False, True])
async def test_every_spelling_of_the_output_limit_is_one_on_the_prefill_leg(limit: str, stream: bool) -> None:
    names = {"both": ["max_tokens", "max_completion_tokens"], "none": []}.get(limit, [limit])
    extra: dict[str, Any] = dict.fromkeys(names, 5) | ({"min_tokens": 5} if names else {"min_tokens": 2})
    if stream:
        extra |= {"stream": True, "stream_options": {"include_usage": True}}
    async with house(prefill=1, decode=1) as h:
        answer = await h.chat("n3", **extra)
        assert answer.status == 200
        assert h.p.last.status == 200
        assert h.p.generated_tokens == 1
        assert h.d.generated_tokens == (5 if names else 16)
        assert h.d.last.body.get("max_tokens", "absent") == (5 if "max_tokens" in names else "absent")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_every_route_is_disaggregated_and_counted_by_its_path(path: str, stream: bool) -> None:
    body = chat("n4", stream=stream) if path == CHAT else {"model": "scripted", "prompt": "please answer n4", "stream": stream}
    async with house(prefill=1, decode=1) as h:
        answer = await h.ask(path, body)
        assert answer.status == 200
        assert answer.headers["x-twinpool-path"] == "disaggregated"
        assert (answer.headers["x-twinpool-prefill"], answer.headers["x-twinpool-decode"]) == ("p0", "d0")
        assert [recorded.path for recorded in (*h.p.recorded, *h.d.recorded)] == [path, path]
        assert h.d.computed_prompt_tokens == 1
        assert await h.metric("twinpool_requests_total", path="disaggregated", outcome="ok") == 1


@pytest.mark.parametrize(
    ("body", "reason", "choices"),
    [
        (chat("n5", n=3), "n_choices", 3),
        ({"model": "scripted", "prompt": ["a n6", "b n7"]}, "prompt_list", 2),
        ({"model": "scripted", "prompt": ["a n6"], "best_of": 2, "n": 1}, "prompt_list", 1),
    ],
)
async def test_what_one_handle_cannot_serve_goes_whole_and_says_so(body: dict[str, Any], reason: str, choices: int) -> None:
    async with house(prefill=1, decode=1) as h:
        answer = await h.ask(CHAT if "messages" in body else COMPLETIONS, body)
        assert [choice["index"] for choice in answer.json()["choices"]] == list(range(choices))
        assert answer.headers["x-twinpool-path"] == "colocated"
        assert await h.metric("twinpool_requests_total", path="colocated", outcome="ok") == 1
        assert await h.metric("twinpool_decisions_total", choice="colocated", reason=reason) == 1
        assert h.presented() == []


@pytest.mark.parametrize("pools", [{"prefill": 1, "decode": 1}, {"colocated": 1}])
@pytest.mark.parametrize(
    "forge",
    [
        lambda fields: fields | FORGED,
        lambda fields: fields | {"extra_body": FORGED, "vllm_xargs": FORGED | {"kept": 1}},
        lambda fields: json.dumps(fields).replace("{", '{"kv_transfer\\u005fparams":{"do_remote_prefill":true},', 1).encode(),
        lambda fields: json.dumps(fields).replace("{", '{"bootstrap_room":1,"bootstrap_room":2,', 1).encode(),
    ],
    ids=["plain", "nested", "escaped", "twice"],
)
async def test_no_field_of_a_client_steers_an_engine(pools: dict[str, int], forge: Any) -> None:
    async with ScriptedEngine() as canary, house(**pools) as h:
        FORGED["kv_transfer_params"] |= {"remote_port": canary.port}
        answer = await h.ask(CHAT, forge(chat("n8")))
        assert answer.text == told("n8")
        for recorded in (recorded for engine in h.engines.values() for recorded in engine.recorded):
            got = dict(recorded.body)
            ours = got.pop("kv_transfer_params", {})
            ours.pop(LIMIT, None)
            assert ours in (ASK, {}) or ours["remote_port"] == h.p.port
            assert not FORGED.keys() & set(words_of(got))
        assert canary.recorded == []
        assert canary.connections == 0


def words_of(value: Any) -> list[str]:
    """Every key of an object and of those inside it."""
    if isinstance(value, dict):
        return [word for key, inner in value.items() for word in (key, *words_of(inner))]
    if isinstance(value, list):
        return [word for inner in value for word in words_of(inner)]
    return []


async def test_of_a_clients_headers_engines_get_the_trace_alone() -> None:
    async with ScriptedEngine() as canary, house(prefill=1, decode=1) as h:
        trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}
        steering = {
            "Authorization": "Bearer C",
            "Cookie": "C",
            "X-Api-Key": "C",
            "X-Prefiller-Host-Port": canary.address,
            "x-prefiller-url": canary.url,
            "X-Data-Parallel-Rank": "3",
            "X-Request-Id": "mine",
        }
        answer = await h.ask(CHAT, chat(), headers=trace | steering)
        assert answer.headers["x-request-id"] == "mine"
        for engine in (h.p, h.d):
            got = engine.last.headers
            assert set(got) == {"host", "content-length", "content-type", "x-request-id", *trace}
            assert trace.items() <= got.items()
            assert "mine" not in got["x-request-id"]
        assert canary.connections == 0


async def test_no_leg_shares_its_id_or_the_beginning_of_one_with_another() -> None:
    async with house(prefill=2, decode=2) as h:
        for engine in (*h.prefill, *h.decode):
            engine.script.replies.extend([Default(), Reply.error(500)] * 3)
        for n in range(6):
            await h.chat(f"n{n}")
        ids = [recorded.headers["x-request-id"] for engine in h.engines.values() for recorded in engine.recorded]
        assert len(ids) > 12
        assert len(set(ids)) == len(ids)
        assert not [(one, two) for one in ids for two in ids if one != two and two.startswith(one)]


async def test_a_handle_goes_on_as_it_came() -> None:
    extras = {"x_future": {"a": [1, 2.0, None]}, "remote_block_ids": [[2**53 + 1]], "ключ": "значение", "n": 2**63}
    async with house(prefill=Script(handle_extras=extras), decode=1) as h:
        assert (await h.chat("n9")).text == told("n9")
        given = h.d.last.kv_transfer_params
        assert given is not None
        assert extras.items() <= given.items()
        assert given["remote_request_id"] not in h.p.last.headers["x-request-id"]


@pytest.mark.parametrize("handle", [None, "absent", {}, {"do_remote_prefill": False}])
async def test_a_missing_handle_is_counted_and_tried_again_and_never_decoded_without(handle: Any) -> None:
    async with house(prefill=1, decode=1) as h:
        h.p.script.replies.append(Default(handle=handle))
        assert (await h.chat("n10")).text == told("n10")
        assert len(h.p.recorded) == 2
        assert await h.metric("twinpool_leg_failures_total", leg="prefill", failure="no_handle") == 1
        assert h.d.computed_prompt_tokens == 1


async def test_without_handles_one_worker_serves_whole_and_it_is_counted_why() -> None:
    """Never a decode leg without a handle, which would read the prompt in silence."""
    async with house(prefill=1, decode=1) as h:
        h.p.script.on_request = lambda recorded: Default(handle=None)
        answer = await h.chat("n10")
        assert answer.text == told("n10")
        assert answer.headers["x-twinpool-path"] == "colocated"
        assert await h.metric("twinpool_decisions_total", choice="colocated", reason="handoff_failed") == 1
        assert await h.metric("twinpool_leg_failures_total", leg="prefill", failure="no_handle") == 2


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_a_prefill_that_was_cut_short_is_not_decoded(reason: str) -> None:
    async with house(prefill=Script(lease_s=0.2), decode=1) as h:
        h.p.script.replies.append(Default(finish_reason=reason))
        assert (await h.chat("n11")).text == told("n11")
        assert len(h.presented()) == 1
        assert h.p.ledger.misuses == 0


def engines_got(h: House) -> list[dict[str, Any]]:
    return [recorded.body for engine in h.engines.values() for recorded in engine.recorded]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": [{"role": "latest_reminder", "content": "x n1"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "n1"}, {"type": "image_url"}]}]},
    ],
)
async def test_what_engines_may_judge_reaches_them(fields: dict[str, Any]) -> None:
    async with house(prefill=1, decode=1) as h:
        assert (await h.ask(CHAT, chat() | fields)).status == 200
        assert all(fields.items() <= body.items() for body in engines_got(h))


@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_are_those_of_the_prefill(stream: bool) -> None:
    """A stock decode engine calls cached what was handed to it; an embedded one has been told by the handle."""
    async with house(prefill=1, decode=1, is_stock=True) as h:
        await h.proved()
        h.p.script.replies.append(Default(usage={"prompt_tokens_details": {"cached_tokens": 2}}))
        more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = await h.chat(**more)
        assert answer.headers["x-twinpool-path"] == "disaggregated"
        usage = answer.events[-2]["usage"] if stream else answer.json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 2
        assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
