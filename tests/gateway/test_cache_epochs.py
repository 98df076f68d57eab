"""Decode engines that keep what they read too late in their prefix cache, as vLLM does: the garbage must not come back from
there, neither to the client it was meant for nor to any that asks the same."""

import asyncio
from typing import Any

import pytest
from tests.gateway.house import SETTLES_WITHIN_S, House, chat, house, told, until

from twinpool.config import Declared, Routing
from twinpool.engines.scripted import GARBAGE, Default, Script

STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
LEASE_S = 0.6
LATE_S = 0.8


def stock(**more: Any) -> Any:
    engines = {"prefill": Script(lease_s=LEASE_S), "decode": Script(caches_prompts=True)}
    return house(is_stock=True, declared=Declared(lease_s=LEASE_S), routing=Routing(lease_margin_s=0.02), **(engines | more))


def salts(h: House) -> list[str | None]:
    """Of the requests for clients that the decode engine got, in order."""
    return [recorded.body.get("cache_salt") for recorded in h.d.requests("/chat/completions")]


async def until_salted(h: House) -> None:
    """Ask until requests carry a salt."""
    async with asyncio.timeout(SETTLES_WITHIN_S):
        while salts(h)[-1] is None:
            await h.chat("another")


def decoding(h: House) -> bool:
    return any(recorded.takes_over and recorded.is_running for recorded in h.d.requests("/chat/completions"))


@STREAM
async def test_garbage_does_not_come_back_from_the_cache(stream: bool) -> None:
    async with stock() as h:
        await h.proved()
        h.d.script.replies.append(Default(delay_s=LATE_S))
        answer = await h.chat("n1", stream=stream)
        assert h.p.ledger.misuses == 1, "the decode engine did read too late"
        assert GARBAGE.encode() not in answer.body
        assert answer.headers["x-twinpool-path"] == "disaggregated", "the second attempt went to the same engine"
        again = await h.chat("n1", stream=stream)
        assert GARBAGE.encode() not in again.body
        late, *others = salts(h)
        assert late is None
        assert len(others) == 2
        assert len(set(others)) == 1
        assert others[0]


async def test_without_a_doubt_bodies_are_the_client_s(capfd: pytest.CaptureFixture[str]) -> None:
    async with stock() as h:
        await h.proved()
        await h.chat("n1")
        await h.chat("n2", cache_salt="mine")
        assert salts(h) == [None, "mine"]


async def test_whole_requests_and_prefills_leave_the_old_cache_too() -> None:
    both = ("prefill", "decode")
    async with stock(allowed_roles=both) as h:
        await h.proved()
        h.d.script.replies.append(Default(delay_s=LATE_S))
        await h.chat("n1")
        two = await h.chat("n1", n=2)
        assert GARBAGE.encode() not in two.body
        assert salts(h)[-1] == salts(h)[1]


async def test_a_client_s_own_salt_stays_its_own() -> None:
    async with stock() as h:
        await h.proved()
        h.d.script.replies.append(Default(delay_s=LATE_S))
        await h.chat("n1", cache_salt="mine")
        assert (await h.chat("n1", cache_salt="mine")).text == told("n1")
        late, retried, again = salts(h)
        assert late == "mine"
        assert retried == again
        assert retried is not None
        assert retried.startswith("twinpool-")
        assert retried.endswith(" mine")


async def test_a_late_read_that_nobody_waits_for_any_more_spoils_no_answer() -> None:
    """The client leaves when the lease may have ended: whether it did is found out all the same."""
    async with stock() as h:
        await h.proved()
        h.d.script.replies.append(Default(delay_s=10 * LATE_S))
        client = asyncio.ensure_future(h.chat("n1"))
        await until(lambda: decoding(h))
        granted = asyncio.get_running_loop().time()
        await until(lambda: asyncio.get_running_loop().time() > granted + LEASE_S)
        client.cancel()
        await asyncio.gather(client, return_exceptions=True)
        await until_salted(h)
        assert (await h.chat("n1")).text == told("n1")
        assert salts(h)[-1] is not None


async def test_a_client_that_leaves_in_time_costs_no_cache() -> None:
    async with stock() as h:
        await h.proved()
        h.d.script.replies.append(Default(delay_s=10.0))
        client = asyncio.ensure_future(h.ask("/v1/chat/completions", chat("n1")))
        await until(lambda: decoding(h))
        client.cancel()
        await asyncio.gather(client, return_exceptions=True)
        ended = asyncio.get_running_loop().time() + LEASE_S + 1.5
        await until(lambda: asyncio.get_running_loop().time() > ended)
        await h.chat("n1")
        assert salts(h) == [None, None]
