"""Load is counted from selection to end, by nothing else, and spread by it."""

import asyncio
from collections import Counter
from time import monotonic

import pytest
from tests.gateway.house import CHAT, chat, house, text_of, told, until

from twinpool.config import Routing, Timeouts
from twinpool.core.model import Role
from twinpool.engines.scripted import Reply, Script


def held(**fields: object) -> Script:
    return Script(steps=asyncio.Semaphore(0), **fields)  # type: ignore[arg-type]


def let_go(*scripts: Script) -> None:
    for script in scripts:
        assert script.steps is not None
        for _ in range(10_000):
            script.steps.release()


async def test_probes_change_no_count() -> None:
    async with house(prefill=1, decode=held(), server={"probe_interval_s": 0.01}) as h:
        asking = [asyncio.create_task(h.chat(f"n{n}", stream=True)) for n in range(5)]
        await until(lambda: h.d.running == 5)
        load = h.load("d0")
        assert load[2] == 5
        seen = h.d.pages["/twinpool/identity"]
        await until(lambda: h.d.pages["/twinpool/identity"] >= seen + 12)
        assert h.load("d0") == load
        let_go(h.d.script)
        await asyncio.gather(*asking)
        assert h.load("d0") == (0, 0, 0)


async def test_a_worker_that_is_lost_and_found_keeps_what_it_runs() -> None:
    async with house(colocated=held(), server={"probe_interval_s": 0.02}) as h:
        asking = [asyncio.create_task(h.chat(f"n{n}", stream=True)) for n in range(3)]
        await until(lambda: h.c.running == 3)
        h.gateway.worker_exited("c0")
        assert h.load("c0")[2] == 3
        await h.up()
        assert h.load("c0")[2] == 3
        let_go(h.c.script)
        assert [text_of((await task).events) for task in asking] == [told(f"n{n}") for n in range(3)]


@pytest.mark.parametrize("pool", ["prefill", "decode", "colocated"])
async def test_who_is_chosen_counts_at_once(pool: str) -> None:
    """Before any engine has said a word: else everyone goes to the first."""
    others = {} if pool == "colocated" else {"prefill": 1, "decode": 1}
    async with house(**others | {pool: [held() for _ in range(4)]}, routing=Routing(prefill_window_tokens=10**6)) as h:
        engines = getattr(h, pool)
        asking = [asyncio.create_task(h.chat(f"n{n:02}")) for n in range(40)]
        await until(lambda: sum(engine.running for engine in engines) == 40)
        assert [engine.running for engine in engines] == [10] * 4
        let_go(*(engine.script for engine in engines))
        await asyncio.gather(*asking)


async def test_a_decode_worker_that_was_promised_does_not_look_idle() -> None:
    """While fifty prompts are read, none has reached a decode worker yet."""
    async with house(prefill=held(), decode=5, routing=Routing(prefill_window_tokens=10**6)) as h:
        asking = [asyncio.create_task(h.chat(f"n{n:02}")) for n in range(50)]
        await until(lambda: h.p.running == 50)
        assert [h.load(f"d{index}")[2] for index in range(5)] == [10] * 5
        let_go(h.p.script)
        await asyncio.gather(*asking)
        assert [len(engine.recorded) for engine in h.decode] == [10] * 5


async def test_prefill_load_is_counted_in_tokens() -> None:
    """Prompts of 100 and of 20,000 tokens by turns."""
    long, short = "word " * 20_000, "word " * 100
    scripts = [Script(prefill_s_per_token=4e-6, max_model_tokens=40_000) for _ in range(4)]
    async with house(prefill=scripts, decode=1) as h:
        asking = [asyncio.create_task(h.chat((long if n % 2 else short) + f"n{n}", max_tokens=1)) for n in range(120)]
        await asyncio.gather(*asking)
        tokens = [engine.computed_prompt_tokens for engine in h.prefill]
        assert max(tokens) / min(tokens) < 1.3


async def test_one_that_never_answers_stalls_nobody_else() -> None:
    async with house(colocated=2, timeouts=Timeouts(first_byte_s=0.4)) as h:
        h.c.script.on_request = lambda recorded: Reply.hang()

        async def timed(n: int) -> float:
            began = monotonic()
            assert (await h.chat(f"n{n}")).text == told(f"n{n}")
            return monotonic() - began

        took = sorted(await asyncio.gather(*(timed(n) for n in range(50))))
        stuck = len(h.c.recorded)
        assert 0 < stuck <= 26
        assert took[-stuck - 1] < 0.35, "who went to the other waited for nobody"
        assert took[-1] < 0.4 + 0.5


async def test_three_hundred_streams_at_once() -> None:
    async with house(prefill=1, decode=held(slots=300), routing=Routing(prefill_window_tokens=10**6)) as h:
        asking = [asyncio.create_task(h.chat(f"n{n}", stream=True, max_tokens=3)) for n in range(300)]
        await until(lambda: h.d.running == 300, 20)
        let_go(h.d.script)
        answers = await asyncio.gather(*asking)
        assert [text_of(answer.events) for answer in answers] == [told(f"n{n}", 3) for n in range(300)]
        assert await h.outcomes() == {"ok": 300}


async def test_a_worker_that_joins_late_gets_its_share_and_no_more() -> None:
    async with house(colocated=[held(slots=64) for _ in range(3)], routing=Routing(worker_wait_s=5)) as h:
        late = h.colocated[2]
        await late.stop()
        await until(lambda: h.gateway._members.get("c2").trouble)
        asking = [asyncio.create_task(h.chat(f"n{n}")) for n in range(100)]
        await until(lambda: sum(engine.running for engine in h.colocated[:2]) == 100)
        await late.start()
        await h.up("c2")
        asking += [asyncio.create_task(h.chat(f"m{n}")) for n in range(20)]
        await until(lambda: sum(engine.running for engine in h.colocated) == 120)
        assert late.running == 20, "it was idle, and the others were not"
        let_go(*(engine.script for engine in h.colocated))
        await asyncio.gather(*asking)


async def test_a_worker_that_drains_gets_nothing_new_and_finishes_what_it_has() -> None:
    async with house(colocated=[held(), held()]) as h:
        asking = [asyncio.create_task(h.chat(f"n{n}")) for n in range(4)]
        await until(lambda: h.colocated[0].running == h.colocated[1].running == 2)
        assert (await h.ask(f"{h.admin_url}/admin/workers/c0/drain")).json()["state"] == "draining"
        asking += [asyncio.create_task(h.chat(f"m{n}")) for n in range(6)]
        await until(lambda: h.colocated[1].running == 8)
        assert h.c.running == 2
        let_go(*(engine.script for engine in h.colocated))
        answers = await asyncio.gather(*asking)
        assert [answer.text for answer in answers] == [told(n) for n in ("n0", "n1", "n2", "n3", *(f"m{n}" for n in range(6)))]


async def test_a_change_of_role_under_load_fails_no_request() -> None:
    async with house(
        prefill=[Script(prefill_s_per_token=0.0005) for _ in range(2)],
        decode=[Script(token_interval_s=0.0005) for _ in range(2)],
        allowed_roles=tuple(Role),
    ) as h:
        asking = [asyncio.create_task(h.chat(f"n{n}")) for n in range(60)]
        for role in ("decode", "colocated", "prefill"):
            answer = await h.ask(f"{h.admin_url}/admin/workers/p1/role", {"role": role})
            assert (answer.status, answer.json()["role"]) == (200, role)
            asking += [asyncio.create_task(h.chat(f"{role}{n}")) for n in range(20)]
        answers = await asyncio.gather(*asking)
        assert Counter(answer.status for answer in answers) == {200: 120}
        assert await h.metric("twinpool_role_changes_total") == 3
        assert (await h.ask(CHAT, chat("last"))).text == told("last")
