"""What an engine says of itself is understood, whatever its kind; and what cannot be asked says why."""

import aiohttp
import pytest

from twinpool.core.model import Dialect
from twinpool.engines.probe import Identity, Kind, ProbeError, Trouble, probe
from twinpool.engines.scripted import Script, ScriptedEngine
from twinpool.engines.scripted.metrics import true_values


async def ask(script: Script, **options) -> Identity:
    async with ScriptedEngine(script) as engine, aiohttp.ClientSession() as session:
        return await probe(session, engine.url, 5, **options)


async def test_the_embedded_worker_tells_everything() -> None:
    found = await ask(Script(is_embedded=True, slots=3, lease_s=7))
    assert (found.kind, found.engine, found.vouches, found.dialect) == (Kind.EMBEDDED, "scripted 1", True, Dialect.NIXL)
    assert (found.slots, found.lease_s, found.models) == (3, 7, ("scripted",))


async def test_vllm_tells_its_version_its_models_and_its_cache() -> None:
    found = await ask(Script(models=("m", "alias"), loras={"tuned": "m"}, max_model_tokens=4096, cache_dtype="fp8"))
    assert (found.kind, found.engine) == (Kind.VLLM, "vllm 0.32.0+scripted")
    assert (found.models, found.loras, found.context_tokens) == (("m", "alias", "tuned"), ("tuned",), 4096)
    assert (found.connector, found.has_metrics, found.incarnation != "") == ("nixl", True, True)
    assert (found.block_tokens, found.kv_capacity_tokens, found.cache_dtype) == (16, 16_384, "fp8")
    assert not found.vouches
    assert found.lease_s is None


async def test_vllm_without_a_connector_shows_that_it_has_none() -> None:
    assert (await ask(Script(connector="none"))).connector == "none"


async def test_vllm_without_statistics_is_still_vllm() -> None:
    async with ScriptedEngine() as engine, aiohttp.ClientSession() as session:
        engine.script.metrics = dict.fromkeys(true_values(engine))
        found = await probe(session, engine.url, 5)
    assert (found.kind, found.has_metrics, found.connector, found.incarnation) == (Kind.VLLM, False, None, "")


@pytest.mark.parametrize(("mode", "is_alone"), [("null", True), ("prefill", False), ("decode", False)])
async def test_sglang_serves_alone_unless_it_was_launched_for_pairs(mode: str, is_alone: bool) -> None:
    found = await ask(Script(kind="sglang", disaggregation_mode=mode, slots=12))
    assert (found.kind, found.serves_whole, found.slots, found.dialect) == (Kind.SGLANG, is_alone, 12, None)
    assert found.obstacle is not None
    assert (mode in found.obstacle) is not is_alone


async def test_a_plain_llama_cpp_server_says_why_it_does_not_hand_off() -> None:
    found = await ask(Script(kind="llama.cpp", slots=4, max_model_tokens=2048))
    assert (found.kind, found.slots, found.context_tokens) == (Kind.LLAMA_CPP, 4, 2048)
    assert found.obstacle == "a plain llama.cpp server has no handoff"


async def test_any_other_engine_has_its_models() -> None:
    found = await ask(Script(kind="openai", models=("a", "b")))
    assert (found.kind, found.models, found.dialect) == (Kind.OPENAI, ("a", "b"), None)


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llama.cpp"])
async def test_who_knows_the_kind_asks_for_little(kind: str) -> None:
    async with ScriptedEngine(Script(kind=kind)) as engine, aiohttp.ClientSession() as session:
        found = await probe(session, engine.url, 5)
        engine.pages.clear()
        assert await probe(session, engine.url, 5, expected=found.kind) == found
        assert sum(engine.pages.values()) <= 3


@pytest.mark.parametrize("expected", list(Kind))
async def test_another_engine_at_the_same_address_is_found_out(expected: Kind) -> None:
    assert (await ask(Script(kind="llama.cpp"), expected=expected)).kind is Kind.LLAMA_CPP
    assert (await ask(Script(is_embedded=True), expected=expected)).engine is not None


async def test_a_wrong_key_is_told_apart_from_a_dead_engine() -> None:
    wanted = Script(api_key="W")
    assert (await ask(wanted, headers={"authorization": "Bearer W"})).kind is Kind.VLLM
    with pytest.raises(ProbeError, match=r"refuses the key that it was sent \(401\)") as wrong:
        await ask(wanted, headers={"authorization": "Bearer X"})
    with pytest.raises(ProbeError, match="without a key: api_key_file") as none:
        await ask(wanted)
    assert {wrong.value.trouble, none.value.trouble} == {Trouble.AUTH}


async def test_an_engine_that_is_not_there_and_one_that_says_nothing() -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(ProbeError, match="no connection") as gone:
            await probe(session, "http://127.0.0.1:9", 5)
        assert gone.value.trouble is Trouble.UNREACHABLE


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b'{"data": 3}', b"<html>"])
async def test_an_answer_that_is_no_engines_is_strange(body: bytes, http_page) -> None:
    url = await http_page(200, body)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(ProbeError, match="not understood") as strange:
            await probe(session, url, 5)
    assert strange.value.trouble is Trouble.STRANGE


async def test_a_door_that_forbids_the_pages_it_does_not_know_hides_no_engine(http_page) -> None:
    url = await http_page(403, b"")
    async with aiohttp.ClientSession() as session:
        with pytest.raises(ProbeError, match="shows no /v1/models"):
            await probe(session, url, 5)
