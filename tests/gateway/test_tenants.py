"""Whose turn it is, among real clients: tenants by their keys, priorities by a header, and when to come back."""

import asyncio
import json
from typing import Any

import pytest
from multidict import CIMultiDict
from tests.gateway.house import CHAT, Answer, House, chat, house, told, until

from twinpool.config import Routing
from twinpool.engines.scripted import Script

FLOOD, QUIET = "sk-flood", "sk-quiet"
KEYS = frozenset({FLOOD, QUIET})
OPEN = {"client_priorities": True}


def one_at_a_time() -> Script:
    """Each token waits until the test has released one; every answer is one token."""
    return Script(slots=1, steps=asyncio.Semaphore(0), answer_tokens=1)


def ask(h: House, nonce: str, *, key: str | None = None, priority: str | None = None) -> "asyncio.Task[Answer]":
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    if priority is not None:
        headers["x-twinpool-priority"] = priority
    return asyncio.create_task(h.ask(CHAT, chat(nonce), headers=headers))


async def asked_in_order(h: House, *requests: dict[str, Any]) -> "list[asyncio.Task[Answer]]":
    """The first runs, and each has come before the next one does."""
    tasks = []
    for n, request in enumerate(requests):
        tasks.append(ask(h, **request))
        await until(lambda n=n: h.controller.live_requests == n + 1)
    return tasks


async def served_in_order(h: House, count: int) -> list[str]:
    """Let so many answers end, one after the other; whose they were."""
    assert h.c.script.steps is not None
    order = []
    ended = sum(not recorded.is_running for recorded in h.c.recorded)
    for n in range(ended + 1, ended + count + 1):
        await until(lambda n=n: len(h.c.recorded) == n and h.c.running == 1)
        order.append(h.c.last.body["messages"][0]["content"].split()[-1])
        h.c.script.steps.release()
        await until(lambda n=n: not h.c.recorded[n - 1].is_running)
    return order


async def test_a_tenant_that_floods_starves_nobody() -> None:
    async with house(colocated=one_at_a_time(), api_keys=KEYS) as h:
        flood = await asked_in_order(h, *({"nonce": f"f{n}", "key": FLOOD} for n in range(12)))
        quiet = [ask(h, f"q{n}", key=QUIET) for n in range(2)]
        await until(lambda: h.controller.waiting_requests() == 13)
        order = await served_in_order(h, 14)
        assert {"q0", "q1"} <= set(order[:5]), "every second turn is theirs"
        assert [answer.text for answer in await asyncio.gather(*quiet)] == [told("q0", 1), told("q1", 1)]
        assert all(answer.status == 200 for answer in await asyncio.gather(*flood))


async def test_without_keys_the_same_flood_is_served_first() -> None:
    """So that it is the keys that make the difference."""
    async with house(colocated=one_at_a_time()) as h:
        await asked_in_order(h, *({"nonce": f"f{n}"} for n in range(6)))
        late = ask(h, "q0")
        await until(lambda: h.controller.waiting_requests() == 6)
        assert (await served_in_order(h, 7))[-1] == "q0"
        assert (await late).status == 200


async def test_a_full_queue_has_room_for_another_tenant_and_the_refused_learn_when_to_come_back() -> None:
    async with house(colocated=one_at_a_time(), routing=Routing(max_waiting=4), api_keys=KEYS) as h:
        flood = await asked_in_order(h, *({"nonce": f"f{n}", "key": FLOOD} for n in range(5)))
        more = await ask(h, "f5", key=FLOOD)
        quiet = ask(h, "q0", key=QUIET)
        yielded = await flood[4]
        for refused in (more, yielded):
            assert (refused.status, refused.error["code"]) == (429, "queue_full")
            assert int(refused.headers["retry-after"]) >= 1
        assert set((await served_in_order(h, 5))[:3]) >= {"f0", "q0"}
        assert (await quiet).text == told("q0", 1)
        again = ask(h, "f5", key=FLOOD)
        assert await served_in_order(h, 1) == ["f5"]
        assert (await again).text == told("f5", 1)
        assert [(await task).status for task in flood[:4]] == [200] * 4
        assert await h.outcomes() == {"ok": 6, "refused": 2}


async def test_a_priority_request_overtakes_where_clients_may_say_so() -> None:
    async with house(colocated=one_at_a_time(), server=OPEN) as h:
        requests = [{"nonce": f"n{n}"} for n in range(4)]
        tasks = await asked_in_order(
            h, *requests, {"nonce": "later", "priority": "-1"}, {"nonce": "urgent", "priority": "1"}, {"nonce": "n4"}
        )
        assert await served_in_order(h, 7) == ["n0", "urgent", "n1", "n2", "n3", "n4", "later"]
        assert [(await task).status for task in tasks] == [200] * 7
        assert not any("x-twinpool-priority" in recorded.headers for recorded in h.c.recorded)


@pytest.mark.parametrize("priority", ["100", "high"])
async def test_elsewhere_the_header_says_nothing(priority: str) -> None:
    async with house(colocated=one_at_a_time()) as h:
        tasks = await asked_in_order(h, {"nonce": "n0"}, {"nonce": "n1"}, {"nonce": "urgent", "priority": priority})
        assert await served_in_order(h, 3) == ["n0", "n1", "urgent"]
        assert [(await task).status for task in tasks] == [200] * 3
        assert not any("x-twinpool-priority" in recorded.headers for recorded in h.c.recorded)


@pytest.mark.parametrize("priority", ["", "high", "101", "-101", "1.5", "1 2", "null", "9" * 50, "\N{SUPERSCRIPT TWO}"])
async def test_a_priority_that_is_none_is_told(priority: str) -> None:
    async with house(colocated=1, server=OPEN) as h:
        answer = await ask(h, "n1", priority=priority)
        assert (answer.status, answer.error["code"]) == (400, "invalid_value")
        assert answer.error["param"] == "x-twinpool-priority"
        assert h.c.recorded == []


async def test_two_priorities_are_none() -> None:
    async with house(colocated=1, server=OPEN) as h:
        headers = CIMultiDict([("x-twinpool-priority", "1"), ("x-twinpool-priority", "2")])
        assert (await h.ask(CHAT, chat(), headers=headers)).status == 400  # type: ignore[arg-type]


async def facts_in_journal(h: House) -> list[dict[str, Any]]:
    """Of each request that came."""
    await h.gateway.close()
    h.is_closed = True
    lines = map(json.loads, h.journal.read_text().splitlines()[1:])
    return [line["event"]["facts"] for line in lines if line["event"]["type"] == "RequestArrived"]


async def test_the_journal_names_tenants_and_no_key() -> None:
    async with house(colocated=1, server=OPEN, api_keys=KEYS) as h:
        for n, key in enumerate((FLOOD, QUIET, FLOOD)):
            await ask(h, f"n{n}", key=key, priority="7")
        facts = await facts_in_journal(h)
        names = [fact["tenant"] for fact in facts]
        assert (names[0], len(set(names))) == (names[2], 2)
        assert [fact["priority"] for fact in facts] == [7, 7, 7]
        assert "sk-" not in h.journal.read_text()


async def test_another_run_names_the_same_key_differently() -> None:
    """Who reads a journal cannot try keys against its names."""
    names = []
    for _ in range(2):
        async with house(colocated=1, api_keys=KEYS) as h:
            await ask(h, "n1", key=FLOOD)
            names += [fact["tenant"] for fact in await facts_in_journal(h)]
    assert len(set(names)) == 2


async def test_without_keys_and_priorities_the_journal_is_as_it_was() -> None:
    async with house(colocated=1) as h:
        await ask(h, "n1", priority="7")
        (facts,) = await facts_in_journal(h)
        assert not {"tenant", "priority"} & facts.keys()
