"""Who gets in, who waits, for how long, and what the others are told."""

import asyncio
from time import monotonic
from typing import Any

import pytest
from tests.gateway.house import CHAT, Answer, House, chat, finish_reasons, house, text_of, told, until

from twinpool.config import Objectives, Routing, RoutingPolicy
from twinpool.engines.scripted import Script


def slow(slots: int) -> Script:
    return Script(slots=slots, steps=asyncio.Semaphore(0))


def let_go(script: Script, tokens: int = 10_000) -> None:
    assert script.steps is not None
    for _ in range(tokens):
        script.steps.release()


def begun(h: House, count: int, **fields: Any) -> "list[asyncio.Task[Answer]]":
    return [asyncio.create_task(h.chat(f"n{n}", **fields)) for n in range(count)]


async def test_the_limits_are_real() -> None:
    """Eight run, sixteen wait, the rest hear at once that there is no room."""
    async with house(colocated=slow(8), routing=Routing(max_waiting=16)) as h:
        began = monotonic()
        asking = begun(h, 100, stream=True)
        await until(lambda: sum(task.done() for task in asking) == 76)
        took_s = monotonic() - began
        assert h.c.running == 8
        assert h.controller.waiting_requests() == 16
        let_go(h.c.script)
        answers = await asyncio.gather(*asking)
        refused = [answer for answer in answers if answer.status != 200]
        assert {(answer.status, answer.error["code"]) for answer in refused} == {(429, "queue_full")}
        assert all(int(answer.headers["retry-after"]) > 0 for answer in refused)
        assert took_s < 1.0, "a hundred connections and 76 refusals"
        assert h.c.peak_running == 8
        assert await h.outcomes() == {"ok": 24, "refused": 76}


async def test_a_slot_is_held_until_the_answer_has_ended() -> None:
    async with house(prefill=1, decode=slow(1)) as h:
        async with h_stream(h, "n1") as first:
            waiting = asyncio.create_task(h.chat("n2"))
            assert first
            await until(lambda: h.controller.waiting_requests() == 1)
            assert h.d.running == 1
            let_go(h.d.script)
            assert (await waiting).text == told("n2")
        assert h.d.peak_running == 1


def h_stream(h: House, nonce: str) -> Any:
    assert h.d.script.steps is not None
    h.d.script.steps.release()
    return h.stream(nonce)


async def test_nobody_parks_kv_for_whom_there_is_no_room_to_decode() -> None:
    """Prefill outruns decode, and is held back."""
    async with house(prefill=1, decode=[Script(slots=2, token_interval_s=0.002) for _ in range(2)]) as h:
        most = 0

        def watch() -> bool:
            nonlocal most
            most = max(most, h.p.ledger.held)
            return all(task.done() for task in asking)

        asking = begun(h, 60)
        await until(watch)
        assert [task.result().text for task in asking] == [told(f"n{n}") for n in range(60)]
        assert most <= 4
        assert all(engine.peak_running <= 2 for engine in h.decode)


async def test_first_come_first_served() -> None:
    async with house(colocated=slow(1)) as h:
        order: list[str] = []
        tasks = []
        for n in range(12):
            tasks.append(asyncio.create_task(h.chat(f"n{n}", max_tokens=1)))
            await until(lambda n=n: h.controller.live_requests == n + 1)
        for n in range(12):
            await until(lambda n=n: len(h.c.recorded) == n + 1 and h.c.running == 1)
            order.append(h.c.last.body["messages"][0]["content"].split()[-1])
            let_go(h.c.script, 1)
            await tasks[n]
        assert order == [f"n{n}" for n in range(12)]


async def test_a_wait_ends_at_its_deadline() -> None:
    async with house(colocated=slow(1), routing=Routing(queue_timeout_s=0.2)) as h:
        running = asyncio.create_task(h.chat("n1"))
        await until(lambda: h.c.running == 1)
        began = monotonic()
        answer = await h.chat("n2")
        assert 0.18 < monotonic() - began < 0.5
        assert (answer.status, answer.error["code"]) == (503, "queue_timeout")
        assert "waited too long" in answer.error["message"]
        assert int(answer.headers["retry-after"]) > 0
        let_go(h.c.script)
        assert (await running).text == told("n1")
        assert await h.outcomes() == {"ok": 1, "refused": 1}


async def test_who_would_be_late_is_told_so_at_once_and_when_to_come_back() -> None:
    """By what the engine has shown of itself; nobody is told before."""
    script = Script(slots=1, prefill_s_per_token=0.0005, token_interval_s=0.001)
    routing = Routing(policy=RoutingPolicy.LEAST_COST, refuse_late=True)
    async with house(colocated=script, routing=routing, objectives=Objectives(slo_ttft_s=1.0)) as h:
        for n in range(40):
            usage = {"stream_options": {"include_usage": True}}
            assert (await h.chat(f"n{n} {'word ' * (n % 7) * 20}", stream=True, **usage)).status == 200
        asking = [asyncio.create_task(h.chat(f"m{n} {'word ' * 100}")) for n in range(80)]
        answers = await asyncio.gather(*asking)
        late = [answer for answer in answers if answer.status != 200]
        assert 0 < len(late) < len(answers)
        assert {(answer.status, answer.error["code"]) for answer in late} == {(429, "would_be_late")}
        assert all(int(answer.headers["retry-after"]) > 0 for answer in late)
        assert (await h.chat(f"again {'word ' * 100}")).status == 200


async def test_health_and_metrics_are_never_in_the_queue() -> None:
    async with house(colocated=slow(1), routing=Routing(max_waiting=2)) as h:
        asking = begun(h, 3)
        await until(lambda: h.controller.waiting_requests() == 2)
        assert (await h.chat()).status == 429
        for path in ("/health", "/ready", "/metrics", "/v1/models"):
            assert (await h.get(path)).status == 200
        let_go(h.c.script)
        await asyncio.gather(*asking)


# No worker


async def test_without_any_worker_a_request_waits_a_little_and_is_told_why() -> None:
    async with house(colocated=1, routing=Routing(worker_wait_s=0.2)) as h:
        await h.c.stop()
        await until(lambda: h.gateway._members.get("c0").trouble)
        assert (await h.get("/ready")).status == 503
        began = monotonic()
        answer = await h.chat()
        assert 0.18 < monotonic() - began < 0.6
        assert (answer.status, answer.error["code"]) == (503, "no_worker")
        assert int(answer.headers["retry-after"]) > 0
        await h.c.start()
        await h.up()
        assert (await h.get("/ready")).status == 200
        assert (await h.chat("n3")).text == told("n3")


async def test_who_waits_is_served_when_a_worker_returns() -> None:
    async with house(colocated=1) as h:
        await h.c.stop()
        await until(lambda: h.gateway._members.get("c0").trouble)
        asking = begun(h, 3)
        await until(lambda: h.controller.waiting_requests() == 3)
        await h.c.start()
        assert [answer.text for answer in await asyncio.gather(*asking)] == [told(f"n{n}") for n in range(3)]


@pytest.mark.parametrize("pool", ["prefill", "decode"])
async def test_an_empty_pool_is_gone_round_openly_and_used_again_when_it_is_back(pool: str) -> None:
    async with house(prefill=1, decode=1) as h:
        gone: Any = getattr(h, pool)[0]
        await gone.stop()
        await until(lambda: h.gateway._members.get(f"{pool[0]}0").trouble)
        answer = await h.chat("n4")
        assert answer.text == told("n4")
        assert answer.headers["x-twinpool-path"] == "colocated"
        assert await h.metric("twinpool_decisions_total", choice="colocated", reason=f"no_{pool}_worker") == 1
        await gone.start()
        await h.up()
        assert (await h.chat("n5")).headers["x-twinpool-path"] == "disaggregated"


async def test_models_are_those_of_the_workers_that_are_up() -> None:
    scripts = [Script(models=("scripted", "other")), Script(), Script(models=("third",))]
    async with house(colocated=scripts) as h:

        async def models() -> list[str]:
            return [model["id"] for model in (await h.get("/v1/models")).json()["data"]]

        assert await models() == ["scripted", "third"], "an embedded worker has one model"
        await h.colocated[0].stop()
        await until(lambda: h.gateway._members.get("c0").trouble)
        assert await models() == ["scripted", "third"]
        await h.colocated[1].stop()
        await until(lambda: h.gateway._members.get("c1").trouble)
        assert await models() == ["third"]
        await h.colocated[2].stop()
        await until(lambda: h.gateway._members.get("c2").trouble)
        answer = await h.get("/v1/models")
        assert (answer.status, answer.error["code"]) == (503, "no_worker")
        assert int(answer.headers["retry-after"]) > 0


async def test_a_model_that_nobody_has_is_404_at_once() -> None:
    async with house(prefill=1, decode=1) as h:
        answer = await h.ask(CHAT, chat() | {"model": "other"})
        assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
        assert h.p.recorded == h.d.recorded == []


# Ends


async def test_while_it_drains_what_runs_ends_well_and_nothing_new_begins() -> None:
    async with house(prefill=1, decode=slow(8), server={"drain_s": 5.0}) as h:
        async with h_stream(h, "n6") as stream:
            closing = asyncio.create_task(h.gateway.close())
            await until(lambda: h.controller.is_draining)
            ready = await h.get("/ready")
            assert (ready.status, ready.json()) == (503, {"ready": False, "reason": "draining"})
            assert (await h.get("/health")).status == 200
            refused = await h.chat("n7")
            assert (refused.status, refused.error["code"]) == (503, "draining")
            assert int(refused.headers["retry-after"]) > 0
            outcomes = await h.outcomes()
            let_go(h.d.script)
            events = await stream.rest()
            assert text_of(events) == told("n6")
            assert finish_reasons(events) == ["stop"]
            await closing
        assert outcomes == {"refused": 1}
        h.is_closed = True


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_what_has_not_ended_when_the_drain_is_over_is_told_so(stream: bool) -> None:
    async with house(prefill=1, decode=slow(8), server={"drain_s": 0.1}) as h:
        assert h.d.script.steps is not None
        h.d.script.steps.release()
        asking = asyncio.create_task(h.chat("n8", stream=stream))
        await until(lambda: h.d.running == 1 and h.d.script.steps.locked())
        await h.gateway.close()
        answer = await asking
        error = answer.events[-1]["error"] if stream else answer.error
        assert error["code"] == "draining"
        assert answer.status == (200 if stream else 503)
        h.is_closed = True
