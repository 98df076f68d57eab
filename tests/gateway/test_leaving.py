"""A client that leaves: whichever engine works for it hears of it within a second, the KV that was read for it is given back,
and nothing of it weighs on anyone. At every moment, streamed or not."""

import asyncio
import random
from typing import Any

import pytest
from tests.gateway.house import House, Wire, chat, house, told, turns, until

from twinpool.config import Routing
from twinpool.engines.scripted import Reply, Script, ScriptedEngine
from twinpool.engines.scripted.ledger import HandleState
from twinpool.http1 import Origin, Pool

STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
HEARS_WITHIN_S = 1.0


async def asks(h: House, **fields: Any) -> Wire:
    wire = await h.connect()
    wire.post(chat(**fields))
    return wire


async def leaves(h: House, wire: Wire, engine: ScriptedEngine) -> None:
    """It leaves, and the engine hears of it in time."""
    (running,) = (recorded for recorded in engine.recorded if recorded.is_running)
    left = await wire.leave()
    await until(lambda: not running.is_running, HEARS_WITHIN_S)
    assert running.finished_at is None
    assert running.disconnected_at is not None
    assert running.disconnected_at - left < HEARS_WITHIN_S
    await until(lambda: not h.remains(), HEARS_WITHIN_S)
    assert await h.outcomes() == {"client_left": 1}


@STREAM
async def test_while_it_waits(stream: bool) -> None:
    async with house(colocated=Script(slots=1, steps=asyncio.Semaphore(0))) as h:
        first = await asks(h, stream=stream)
        await until(lambda: h.c.running == 1)
        async with await asks(h, nonce="n2", stream=stream):
            await until(lambda: h.controller.waiting_requests() == 1)
        await until(lambda: h.controller.waiting_requests() == 0, HEARS_WITHIN_S)
        assert len(h.c.recorded) == 1
        await leaves_both(h, first)


async def leaves_both(h: House, wire: Wire) -> None:
    await wire.leave()
    await until(lambda: not h.remains(), HEARS_WITHIN_S)
    assert await h.outcomes() == {"client_left": 2}


@STREAM
async def test_while_its_prompt_is_read(stream: bool) -> None:
    async with house(prefill=Script(steps=asyncio.Semaphore(0)), decode=1) as h:
        wire = await asks(h, stream=stream)
        await until(lambda: h.p.running == 1)
        await leaves(h, wire, h.p)
        assert h.d.recorded == []


@STREAM
async def test_when_its_prompt_is_read_and_not_yet_pulled(stream: bool) -> None:
    async with house(prefill=1, decode=Script(handoff_s=3600.0)) as h:
        wire = await asks(h, stream=stream)
        await until(lambda: h.d.running == 1)
        assert h.p.ledger.held == 1
        await leaves(h, wire, h.d)
        assert h.p.ledger.count(HandleState.RELEASED) == 1


@STREAM
async def test_while_its_first_token_is_computed(stream: bool) -> None:
    async with house(prefill=1, decode=Script(steps=asyncio.Semaphore(0))) as h:
        wire = await asks(h, stream=stream)
        await until(lambda: h.p.ledger.count(HandleState.CONSUMED) == 1)
        await leaves(h, wire, h.d)


@STREAM
@pytest.mark.parametrize("pools", [{"prefill": 1, "decode": 1}, {"colocated": 1}], ids=["disaggregated", "colocated"])
async def test_while_its_answer_is_written(pools: dict[str, Any], stream: bool) -> None:
    async with house(**pools) as h:
        engine = (h.decode or h.colocated)[0]
        engine.script.steps = asyncio.Semaphore(3)
        wire = await asks(h, stream=stream)
        if stream:
            await wire.reader.readuntil(b"n1.2")
        await until(lambda: engine.running == 1 and engine.script.steps.locked())
        await leaves(h, wire, engine)


@STREAM
async def test_while_it_waits_for_a_second_try(stream: bool) -> None:
    async with house(colocated=1, routing=Routing(pause_s=3600.0, max_pause_s=3600.0)) as h:
        h.c.script.replies.append(Reply.error(503))
        wire = await asks(h, stream=stream)
        await until(lambda: h.controller.waiting_requests() == 1 and len(h.c.recorded) == 1)
        await wire.leave()
        await until(lambda: not h.remains(), HEARS_WITHIN_S)
        assert await h.outcomes() == {"client_left": 1}


async def test_when_it_only_closes_its_sending_side() -> None:
    async with house(prefill=Script(steps=asyncio.Semaphore(0)), decode=1) as h:
        wire = await asks(h)
        await until(lambda: h.p.running == 1)
        wire.writer.write_eof()
        await until(lambda: h.p.running == 0, HEARS_WITHIN_S)
        await wire.leave()


async def test_one_that_leaves_takes_nobody_with_it() -> None:
    async with house(prefill=1, decode=1) as h:
        steps = h.d.script.steps = asyncio.Semaphore(0)
        asking = [asyncio.create_task(h.chat(f"n{n}", stream=n % 2 == 0)) for n in range(4)]
        wire = await asks(h, nonce="n9")
        await until(lambda: h.d.running == 5)
        await wire.leave()
        await until(lambda: h.d.running == 4, HEARS_WITHIN_S)
        for _ in range(64):
            steps.release()
        answers = await asyncio.gather(*asking)
        assert answers[1].text == told("n1")
        assert answers[3].text == told("n3")
        assert await h.outcomes() == {"ok": 4, "client_left": 1}


async def test_a_connect_that_is_given_up_at_any_turn_leaves_no_connection() -> None:
    """Else the pool counts it for ever, and waits for it for ever when it closes."""
    async with ScriptedEngine() as engine:
        pool = Pool()
        for count in range(20):
            fetch = pool.fetch(Origin(engine.host, engine.port), "GET", "/health", timeout_s=5)
            asking = asyncio.create_task(fetch)
            await turns(count)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: pool.connections == pool.idle_connections, 0.5)
        await asyncio.wait_for(pool.close(), 5)


async def test_two_hundred_that_leave_at_any_turn_of_the_loop_leave_nothing() -> None:
    """Each a turn of the loop later than the one before, so that every await of ours is one at which some client left."""
    async with house(prefill=Script(lease_s=1.0), decode=Script(slots=3)) as h:
        for count in range(200):
            wire = await asks(h, nonce=f"n{count}", stream=count % 2 == 0)
            await turns(count % 67)
            await wire.leave()
        await h.settle()
        assert sum((await h.outcomes()).values()) == h.arrivals()
        assert (await h.chat("last")).text == told("last")


@pytest.mark.plain_loop
async def test_a_crowd_that_leaves_all_at_once_leaves_room_for_who_comes_next() -> None:
    rng = random.Random(7)
    async with house(
        prefill=[Script(prefill_s_per_token=0.002, lease_s=1.0) for _ in range(2)],
        decode=[Script(slots=4, token_interval_s=0.002, handoff_s=0.003) for _ in range(2)],
    ) as h:

        async def leaver(n: int) -> None:
            wire = await asks(h, nonce=f"n{n}", stream=rng.random() < 0.5)
            try:
                async with asyncio.timeout(rng.random() * 0.2):
                    await wire.reader.read(1 << 16)
            except TimeoutError:
                pass
            await wire.leave()

        await asyncio.gather(*(leaver(n) for n in range(200)))
        await until(lambda: not h.controller.live_requests, HEARS_WITHIN_S)
        await until(lambda: not any(engine.running for engine in h.engines.values()), HEARS_WITHIN_S)
        assert (await asyncio.wait_for(h.chat("next"), 1)).text == told("next")
