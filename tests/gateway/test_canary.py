"""Canaries between scripted stock engines: what shows that a handoff arrived, and what each way of not arriving is called."""

import asyncio
from typing import Any

import msgspec
import pytest
from tests.gateway.house import COMPLETIONS, House, house, told, until

from twinpool.config import Declared, Routing, Timeouts
from twinpool.engines.scripted import Default, Recorded, Reply, Script
from twinpool.gateway.canary import _check_reach, _FailedError

OFTEN = Routing(canary_share=0.5, canary_interval_s=0.2, canary_idle_s=0.3)


def canaries(h: House) -> list[Recorded]:
    """The decode legs of those that were sent."""
    return [recorded for recorded in h.d.requests(COMPLETIONS) if recorded.takes_over]


def stock(**more: Any) -> Any:
    pools = {"prefill": 1, "decode": 1} | more
    return house(is_stock=True, **pools)


async def test_a_canary_is_a_completion_of_one_token_that_nobody_has_sent_before() -> None:
    async with stock(routing=OFTEN) as h:
        await until(lambda: len(canaries(h)) >= 3, 20)
        prompts = [recorded.body["prompt"] for recorded in canaries(h)]
        assert len(set(prompts)) == len(prompts)
        first = canaries(h)[0].body
        assert (first["max_tokens"], first["temperature"]) == (1, 0)
        assert first["logprobs"] >= 1
        assert h.d.computed_prompt_tokens == len([r for r in canaries(h) if r.status == 200]), "D read the KV each time"


async def test_of_a_canary_nothing_is_counted_as_a_clients() -> None:
    async with stock() as h:
        await h.proved()
        assert await h.outcomes() == {}
        assert await h.metric("twinpool_canaries_total", outcome="proved") == 1
        assert h.handles() == {}


async def test_a_canary_carries_the_engines_key_and_the_model_of_its_base() -> None:
    script = Script(api_key="secret", models=("scripted",), loras={"adapter": "scripted"})
    async with house(prefill=script, decode=1, is_stock=True, engine_key="secret") as h:
        h.d.script.loras = {"adapter": "scripted"}
        await h.proved()
        assert {recorded.body["model"] for recorded in (*h.p.recorded, *h.d.recorded)} == {"scripted"}
        assert {recorded.headers["authorization"] for recorded in h.p.recorded} == {"Bearer secret"}


async def test_bandwidth_is_what_the_decode_engine_counted() -> None:
    async with stock(decode=Script(handoff_s=0.01)) as h:
        await h.proved()
        assert h.d.pulls == 1
        assert h.pair().bytes_per_s == pytest.approx(h.d.pulled_bytes / h.d.pulled_s)


def lying(**usage: Any) -> Any:
    return lambda recorded: Default(usage=usage)


def no_logprobs(recorded: Recorded) -> Reply:
    return Reply.json(
        {"choices": [{"index": 0, "text": "x", "logprobs": None, "finish_reason": "length"}], "usage": {"prompt_tokens": 3}}
    )


def other_word(recorded: Recorded) -> Reply | None:
    if not recorded.takes_over:
        return None
    logprobs = {"tokens": ["zebra"], "token_logprobs": [-0.1], "top_logprobs": [{"zebra": -0.1}]}
    return Reply.json({"choices": [{"index": 0, "text": "zebra", "logprobs": logprobs}], "usage": {"prompt_tokens": 3}})


@pytest.mark.parametrize(
    ("prefill", "decode", "why"),
    [
        (Script(on_request=lambda recorded: Default(handle=None)), Script(), "connector"),
        (Script(on_request=lambda recorded: Default(handle="absent")), Script(), "connector"),
        (Script(on_request=lambda recorded: Default(handle={"do_remote_prefill": False})), Script(), "connector"),
        (Script(on_request=lambda recorded: Reply.json({}, status=200)), Script(), "handle"),
        (Script(on_request=lambda recorded: Reply.error(500)), Script(), "500"),
        (Script(on_request=lambda recorded: Reply.error(400, "no such field")), Script(), "no such field"),
        (Script(), Script(on_request=lambda recorded: Reply.error(500, "KV load failed")), "KV load failed"),
        (Script(), Script(on_request=lambda recorded: Reply(body=b"<html>")), "not understood"),
        (Script(lease_s=0.5), Script(on_request=no_logprobs), "log-probabilities"),
        (Script(lease_s=0.5), Script(on_request=other_word), "zebra"),
        (Script(), Script(on_request=lying(prompt_tokens=7)), "count the same prompt differently"),
    ],
    ids=[
        "null handle",
        "no handle",
        "no remote prefill",
        "nothing",
        "prefill fails",
        "prefill refuses",
        "decode fails",
        "no json",
        "no logprobs",
        "another word",
        "another count",
    ],
)
async def test_what_does_not_arrive_sets_the_pair_aside_by_name_and_requests_are_served_whole(
    prefill: Script, decode: Script, why: str
) -> None:
    async with stock(prefill=prefill, decode=decode) as h:
        assert why in await h.aside()
        h.p.script.on_request = h.d.script.on_request = None
        answer = await h.chat("n1")
        assert answer.text == told("n1")
        assert answer.headers["x-twinpool-path"] == "colocated"
        troubled = (await h.get(f"{h.admin_url}/admin/state")).json()["pairs"]["troubled"]
        assert why in troubled[0]["why"]
        h.p.ledger.expire(all_now=True)


async def test_garbage_under_http_200_is_noticed_though_every_counter_is_well() -> None:
    async with stock(routing=OFTEN) as h:
        await h.proved()
        h.d.script.garbled_peers.add(h.p.address)
        assert "GARBAGE" in await h.aside()


async def test_an_engine_that_reads_the_prompt_itself_has_not_been_handed_anything() -> None:
    """Its answer is right, and nobody would notice but for the time it takes."""
    async with stock(prefill=Script(lease_s=0.5), decode=Script(load_failure="recompute"), routing=OFTEN) as h:
        h.d.script.poisoned_peers.add(h.p.address)
        assert "read the prompt itself" in await h.aside()


async def test_what_nobody_tells_is_not_taken_for_arrival() -> None:
    silent = {
        "vllm:nixl_bytes_transferred_sum": None,
        "vllm:nixl_bytes_transferred_count": None,
        "vllm:prompt_tokens_by_source_total": None,
    }
    decode = Script(metrics=silent, on_request=lying(prompt_tokens_details=None))
    async with stock(decode=decode) as h:
        why = await h.aside()
        assert "shows whether KV moved" in why or "read the prompt itself" in why


async def test_an_embedded_worker_that_hangs_is_waited_for_as_for_a_clients_answer() -> None:
    """It shakes no hands; and until its canary has ended, neither of the two could prove itself to others."""
    quick = Timeouts(first_byte_s=0.2)
    async with house(prefill=Script(lease_s=1.0), decode=1, timeouts=quick, routing=Routing(pair_strikes=1)) as h:
        h.d.script.replies.append(Reply.error(500))
        h.d.script.on_request = lambda recorded: Reply.hang() if recorded in canaries(h) else None
        assert (await h.chat("n1")).text == told("n1")
        await h.aside()
        await until(lambda: len(canaries(h)) == 1)
        await until(lambda: not h.pair().canary)
        await until(lambda: h.d.running == 0)
        assert await h.metric("twinpool_canaries_total", outcome="not_proved") == 1, "a handoff that hangs has failed"
        h.d.script.on_request = None
        await h.proved()


@pytest.mark.parametrize("where", ["prefill", "decode"])
@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_engine_says_nothing_of_the_pair(where: str, status: int) -> None:
    busy = Script(on_request=lambda recorded: Reply.error(status))
    async with stock(prefill=Script(lease_s=0.5), **{where: busy}) if where == "decode" else stock(prefill=busy) as h:
        engine = h.p if where == "prefill" else h.d
        await until(lambda: len(engine.recorded) >= 1)
        await until(lambda: not h.pair().canary)
        assert h.pair().state == "unproved"
        engine.script.on_request = None
        await h.proved()


async def test_a_handoff_that_takes_nearly_as_long_as_the_lease_proves_nothing() -> None:
    declared = Declared(lease_s=0.3)
    rules = Routing(lease_margin_s=0.2)
    async with house(prefill=1, decode=Script(handoff_s=0.15), is_stock=True, declared=declared, routing=rules) as h:
        assert "lease" in await h.aside()
        h.d.script.handoff_s = 0.0


async def test_a_canary_under_way_ends_with_the_gateway() -> None:
    async with stock(decode=Script(on_request=lambda recorded: Reply.hang()), prefill=Script(lease_s=0.5)) as h:
        await until(lambda: h.d.running == 1)
        await asyncio.wait_for(h.gateway.close(), 10)
        h.is_closed = True
        await until(lambda: h.d.running == 0)


async def test_a_canary_that_waits_for_a_count_ends_with_the_gateway() -> None:
    """The probes' connections close with it, and are asked no more."""
    async with stock(decode=Script(metrics={"vllm:nixl_bytes_transferred_sum": 0.0})) as h:
        await until(lambda: len(canaries(h)) == 1 and h.d.running == 0 and h.pair().canary)
        scrapes = h.d.pages["/metrics"]
        await until(lambda: h.d.pages["/metrics"] > scrapes + 2)
        await h.gateway.close()
        h.is_closed = True


async def test_a_canary_to_an_engine_that_restarts_meanwhile_is_followed_by_another() -> None:
    async with stock(prefill=Script(lease_s=0.5), decode=Script(handoff_s=0.3)) as h:
        await until(lambda: h.d.running == 1)
        await h.d.restart()
        h.d.script.handoff_s = 0.0
        await h.proved()
        assert (await h.chat("n1")).headers["x-twinpool-path"] == "disaggregated"


@pytest.mark.parametrize(
    ("told_host", "prefill", "decode", "is_reached"),
    [
        ("localhost", "10.0.0.1", "10.0.0.2", False),
        ("127.0.0.1", "10.0.0.1", "10.0.0.2", False),
        ("::1", "10.0.0.1", "10.0.0.2", False),
        ("127.0.0.1", "10.0.0.1", "10.0.0.1", True),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1", True),
        ("10.0.0.1", "10.0.0.1", "10.0.0.2", True),
        ("p.example", "10.0.0.1", "10.0.0.2", True),
        (None, "10.0.0.1", "10.0.0.2", True),
        (7, "10.0.0.1", "10.0.0.2", True),
    ],
)
def test_a_side_channel_on_the_engines_own_loopback_reaches_nobody_else(
    told_host: Any, prefill: str, decode: str, is_reached: bool
) -> None:
    handle = msgspec.Raw(msgspec.json.encode({"remote_host": told_host, "remote_port": 5600}))
    if is_reached:
        _check_reach(handle, prefill, decode)
        return
    with pytest.raises(_FailedError, match="VLLM_NIXL_SIDE_CHANNEL_HOST"):
        _check_reach(handle, prefill, decode)
