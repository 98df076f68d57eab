"""Workers change pool with requests in flight, by hand and by balance, and balance leaves alone what a person has chosen."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.house import Answer, House, house, text_of, told, until
from tests.policy.costs_of import PRIOR

from twinpool.config import Balance, BalanceMode, Routing, RoutingPolicy
from twinpool.core.model import Role
from twinpool.engines.scripted import Script
from twinpool.gateway.learnt_file import Learnt, write_learnt

POOLS = (Role.PREFILL, Role.DECODE)


async def set_role(h: House, worker: str, role: str) -> dict[str, Any]:
    answer = await h.ask(f"{h.admin_url}/admin/workers/{worker}/role", {"role": role})
    assert answer.status == 200, answer.body
    return dict(answer.json())


async def let_go(h: House, worker: str) -> dict[str, Any]:
    answer = await h.ask(f"{h.admin_url}/admin/workers/{worker}/role", method="DELETE")
    assert answer.status == 200, answer.body
    return dict(answer.json())


def roles(h: House) -> dict[str, str]:
    return {worker.facts.worker: str(worker.role) for worker in h.controller.cluster}


async def balance_words(h: House) -> list[str]:
    return [found["words"] for found in (await h.get(f"{h.admin_url}/admin/decisions")).json()["balance"]]


@pytest.fixture
def auto(tmp_path: Path) -> dict[str, Any]:
    """What work costs is known from the start."""
    write_learnt(tmp_path / "learnt", Learnt(costs={"": PRIOR}))
    return {
        "learnt": tmp_path / "learnt",
        "balance": Balance(mode=BalanceMode.AUTO, period_s=0.02),
        "routing": Routing(policy=RoutingPolicy.LEAST_COST),
        "allowed_roles": POOLS,
    }


@pytest.mark.parametrize("stream", [True, False])
async def test_every_worker_changes_its_pool_and_nothing_in_flight_notices(stream: bool) -> None:
    """Answers are under way on both decode workers, prompts at both prefill workers; then all four change, and change back."""
    steps = asyncio.Semaphore(0)
    scripts = [Script(steps=steps, prefill_s_per_token=0.005) for _ in range(4)]
    async with house(prefill=scripts[:2], decode=scripts[2:], allowed_roles=POOLS) as h:
        tasks: list[asyncio.Task[Answer]] = []
        for turn in range(4):
            tasks += [asyncio.create_task(h.chat(f"n{turn}x{n}", stream=stream)) for n in range(8)]
            await until(lambda turn=turn: h.controller.live_requests == 8 * (turn + 1))
            for worker, role in roles(h).items():
                changed = await set_role(h, worker, "decode" if role == "prefill" else "prefill")
                assert changed["held"]
        for _ in range(16 * len(tasks) + 4 * len(tasks)):
            steps.release()
        answers = await asyncio.gather(*tasks)
        assert [answer.status for answer in answers] == [200] * 32
        said = [text_of(answer.events) if stream else answer.text for answer in answers]
        assert said == [told(f"n{turn}x{n}") for turn in range(4) for n in range(8)]
        assert await h.outcomes() == {"ok": 32}
        assert await h.metric("twinpool_role_changes_total", reason="manual") == 16
        assert len(h.presented()) == len(set(h.presented())), "each handle is shown once"


async def test_balance_leaves_a_role_that_a_person_gave_until_they_let_go(auto: dict[str, Any]) -> None:
    """Nobody prefills: balance would move one of them at its next look."""
    async with house(prefill=1, decode=1, **auto) as h:
        for worker in ("p0", "d0"):
            await set_role(h, worker, "decode")
        for n in range(5):
            looked_at = h.controller.balanced()
            assert (await h.chat(f"n{n}")).text == told(f"n{n}")
            await until(lambda looked_at=looked_at: h.controller.balanced() is not looked_at)
        assert roles(h) == {"p0": "decode", "d0": "decode"}
        assert (await balance_words(h))[-1] == "nothing, because no worker may change its pool"
        assert not (await let_go(h, "d0"))["held"]
        await until(lambda: roles(h) == {"p0": "decode", "d0": "prefill"})
        assert any(words.startswith("moved d0 to prefill") for words in await balance_words(h))
        assert (await h.chat("after")).text == told("after")


async def test_a_drained_pool_is_filled_by_another_worker_and_what_ran_there_ends(auto: dict[str, Any]) -> None:
    steps = asyncio.Semaphore(2)  # the head comes with the first token, and over a pair that is the second one
    scripts = [Script(steps=steps) for _ in range(3)]
    async with house(prefill=scripts[0], decode=scripts[1:], **auto) as h:
        async with h.stream("n1") as held:
            assert held.status == 200
            runs_on = next(name for name, engine in h.engines.items() if engine.running)
            idle = next(name for name in ("p0", "d0", "d1") if name != runs_on and roles(h)[name] == "prefill")
            assert (await h.ask(f"{h.admin_url}/admin/workers/{idle}/drain")).status == 200
            await until(lambda: any(role == "prefill" for name, role in roles(h).items() if name != idle))
            for _ in range(40):
                steps.release()
            assert text_of(await held.rest()) == told("n1")
        for _ in range(20):
            steps.release()
        served_by = h.engines[idle].recorded
        before = len(served_by)
        assert (await h.chat("after")).text == told("after")
        assert len(served_by) == before


async def test_letting_go_of_what_nobody_chose_changes_nothing() -> None:
    async with house(prefill=1, decode=1, allowed_roles=POOLS) as h:
        assert not (await let_go(h, "p0"))["held"]
        assert roles(h) == {"p0": "prefill", "d0": "decode"}
        assert await h.metric("twinpool_role_changes_total") == 0


async def test_letting_go_of_a_role_is_no_change_of_it() -> None:
    async with house(prefill=1, decode=1, allowed_roles=POOLS) as h:
        assert (await set_role(h, "p0", "decode"))["held"]
        assert not (await let_go(h, "p0"))["held"]
        assert await h.metric("twinpool_role_changes_total") == 1
        assert [change["why"] for change in (await h.get(f"{h.admin_url}/admin/state")).json()["role_changes"]] == ["manual"]
