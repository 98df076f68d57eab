"""Stock engines that are attached: what is known of them, their keys, and what a restart makes of them."""

import json

import pytest
from tests.gateway.house import CHAT, COMPLETIONS, House, chat, house, told, until

from twinpool.config import Connector, Declared, KvRole
from twinpool.core.model import Dialect
from twinpool.engines.scripted import Script, ScriptedEngine


def facts(h: House, worker: str):
    return h.controller.cluster[worker].facts


async def state(h: House, worker: str) -> dict:
    found = (await h.get(f"{h.admin_url}/admin/state")).json()["workers"]
    return next(one for one in found if one["id"] == worker)


async def test_a_vllm_is_known_by_what_it_says_and_what_is_declared() -> None:
    declared = Declared(lease_s=6.0, budget_tokens=512, dtype="bfloat16")
    async with house(prefill=1, is_stock=True, declared=declared) as h:
        shown = await state(h, "p0")
        assert (shown["kind"], shown["engine"], shown["connector"], shown["kv_role"]) == (
            "vllm",
            "vllm 0.32.0+scripted",
            "nixl",
            "kv_both",
        )
        assert (shown["lease_s"], shown["budget_tokens"], shown["kv_capacity_tokens"]) == (6.0, 512, 16_384)
        assert shown["fingerprint"] == {
            "engine": "vllm 0.32.0+scripted",
            "model": "scripted",
            "dtype": "bfloat16",
            "block size": "16",
            "cache dtype": "auto",
        }
        assert facts(h, "p0").dialect is Dialect.NIXL


@pytest.mark.parametrize(
    ("script", "declared", "obstacle"),
    [
        (Script(kind="llama.cpp"), Declared(), "a plain llama.cpp server has no handoff"),
        (Script(connector="none"), Declared(), "its metrics show no connector"),
        (Script(), Declared(connector=Connector.LMCACHE), "its connector is LMCache: not spoken"),
        (Script(), Declared(connector=Connector.MOONCAKE), "its connector is Mooncake: not spoken"),
        (Script(kind="sglang"), Declared(), "SGLang's handoff is not spoken"),
        (Script(kind="openai"), Declared(), "its engine is not known to hand off"),
    ],
    ids=["llama.cpp", "no connector", "lmcache", "mooncake", "sglang", "openai"],
)
async def test_what_cannot_hand_over_serves_colocated_and_says_why(script: Script, declared: Declared, obstacle: str) -> None:
    async with house(prefill=script, decode=script, is_stock=True, declared=declared) as h:
        answer = await h.chat("n1")
        assert answer.text == told("n1")
        assert answer.headers["x-twinpool-path"] == "colocated"
        shown = await state(h, "p0")
        assert shown["obstacle"].startswith(obstacle)
        assert not shown["hands_off"]
        assert await h.metric("twinpool_decisions_total", choice="colocated", reason="no_pair") == 1


async def test_an_engine_of_a_pair_that_cannot_read_prompts_is_never_asked_to() -> None:
    async with house(decode=Script(kind="sglang", disaggregation_mode="decode"), colocated=1, is_stock=True) as h:
        for _ in range(3):
            assert (await h.chat()).status == 200
        assert h.d.recorded == []


async def test_a_restart_at_the_same_address_is_another_engine() -> None:
    async with house(prefill=1, decode=1, is_stock=True) as h:
        before = facts(h, "p0").incarnation
        await h.p.restart()
        await until(lambda: facts(h, "p0").incarnation not in (before, ""))


async def test_another_engine_at_the_same_address_is_known_for_what_it_is() -> None:
    async with house(colocated=1, is_stock=True) as h:
        await h.c.stop()
        h.c.script.kind = "llama.cpp"
        await h.c.start()
        await until(lambda: facts(h, "c0").kind == "llama.cpp")


async def test_adapters_are_models_of_their_own() -> None:
    async with house(colocated=Script(loras={"tuned": "scripted"}), is_stock=True) as h:
        models = (await h.get("/v1/models")).json()["data"]
        assert [(model["id"], model.get("parent")) for model in models] == [("scripted", None), ("tuned", "scripted")]
        assert (await h.ask(CHAT, chat() | {"model": "tuned"})).status == 200
        assert facts(h, "c0").loras == ("tuned",)


async def test_models_are_those_of_whoever_is_up() -> None:
    scripts = [Script(models=("scripted",)), Script(models=("scripted", "other"))]
    async with house(colocated=scripts, is_stock=True) as h:
        listed = [model["id"] for model in (await h.get("/v1/models")).json()["data"]]
        assert listed == ["scripted", "other"]
        await h.colocated[1].stop()
        await until(lambda: h.gateway._members.get("c1").trouble is not None)
        assert [model["id"] for model in (await h.get("/v1/models")).json()["data"]] == ["scripted"]
        await h.colocated[0].stop()
        await until(lambda: h.gateway._members.get("c0").trouble is not None)
        assert (await h.get("/v1/models")).status == 503


# Keys


async def test_every_request_to_an_engine_carries_its_key_and_never_a_clients() -> None:
    wanted = Script(api_key="W")
    async with house(prefill=wanted, decode=wanted, is_stock=True, engine_key="W", api_keys=frozenset({"C"})) as h:
        headers = {"authorization": "Bearer C", "x-api-key": "C"}
        for path, body in ((CHAT, chat()), (COMPLETIONS, {"model": "scripted", "prompt": "hello n2"})):
            assert (await h.ask(path, body, headers=headers)).status == 200
        assert (await h.ask("/v1/models", method="GET", headers=headers)).status == 200
        assert await h.gateway._members.scrape("p0")
        seen = [recorded.headers for engine in (h.p, h.d) for recorded in engine.recorded]
        assert seen
        assert all(one["authorization"] == "Bearer W" and "x-api-key" not in one for one in seen)
        assert "Bearer C" not in json.dumps(seen)


async def test_an_engine_that_does_not_take_our_key_is_named() -> None:
    async with house(colocated=1, is_stock=True, engine_key="old") as h:
        h.c.script.api_key = "new"
        await until(lambda: h.gateway._members.get("c0").trouble is not None)
        ready = await h.get("/ready")
        assert (ready.status, ready.json()) == (503, {"ready": False, "reason": "auth", "workers": ["c0"]})
        shown = await state(h, "c0")
        assert (shown["reason_kind"], "401" in shown["reason"]) == ("auth", True)
        assert "old" not in json.dumps(shown)
        h.c.script.api_key = "old"
        await h.up()
        assert (await h.chat()).status == 200


async def test_a_client_never_hears_an_engines_401() -> None:
    """It would take its own key for wrong."""
    async with house(colocated=2, is_stock=True, engine_key="W", server={"probe_interval_s": 30}) as h:
        h.colocated[0].script.api_key = "other"
        answers = [await h.chat(f"n{index}") for index in range(4)]
        assert [answer.status for answer in answers] == [200] * 4
        assert h.gateway._members.get("c0").trouble is not None


async def test_a_key_is_in_no_record_of_ours() -> None:
    async with house(colocated=Script(api_key="W-secret"), is_stock=True, engine_key="W-secret") as h:
        assert (await h.chat()).status == 200
        assert "W-secret" not in repr(h.gateway._members.get("c0").origin)
        assert b"W-secret" not in h.journal.read_bytes()


async def test_an_engine_that_joins_over_the_admin_port_is_declared_there_and_gets_the_key_of_all() -> None:
    async with house(colocated=1, is_stock=True, engine_key="W") as h, ScriptedEngine(Script(api_key="W")) as late:
        new = {"id": "late", "url": late.url, "role": "decode", "kv_role": "kv_consumer", "lease_s": 6}
        assert (await h.ask(f"{h.admin_url}/admin/workers", new)).status == 201
        await h.up("late")
        shown = await state(h, "late")
        assert (shown["state"], shown["lease_s"], shown["kv_role"]) == ("ready", 6.0, "kv_consumer")
        await h.ask(f"{h.admin_url}/admin/workers/late", method="DELETE")


async def test_a_flag_that_forbids_reading_shows() -> None:
    async with house(prefill=1, is_stock=True, declared=Declared(kv_role=KvRole.PRODUCER)) as h:
        assert not facts(h, "p0").reads_handoffs
        assert (await state(h, "p0"))["kv_role"] == "kv_producer"


async def test_two_engines_that_do_not_fit_serve_colocated_and_the_difference_is_named() -> None:
    async with house(prefill=Script(cache_dtype="fp8"), decode=1, is_stock=True) as h:
        assert (await h.chat()).headers["x-twinpool-path"] == "colocated"
        found = (await h.get(f"{h.admin_url}/admin/state")).json()["incompatible"]
        assert found == [{"prefill": "p0", "decode": "d0", "why": "cache dtype: p0 has fp8, d0 has auto"}]


async def test_routing_learns_how_full_an_engine_says_it_is() -> None:
    usage = "vllm:kv_cache_usage_perc"
    async with house(colocated=Script(metrics={usage: 0.5}), is_stock=True) as h:
        known = h.controller.cluster["c0"]
        await until(lambda: known.kv_used_ratio == 0.5)

        async def seen_twice() -> None:
            before = h.c.pages["/metrics"]
            await until(lambda: h.c.pages["/metrics"] >= before + 3)

        h.c.script.metrics[usage] = 0.52  # no news: a steady engine fills no journal
        await seen_twice()
        assert known.kv_used_ratio == 0.5
        h.c.script.metrics[usage] = 0.98
        await until(lambda: known.kv_used_ratio == 0.98)
        told_at = known.kv_used_at
        await until(lambda: known.kv_used_at > told_at)  # full is full only while that is fresh
        h.c.script.metrics[usage] = 0.1
        await until(lambda: known.kv_used_ratio == 0.1)
