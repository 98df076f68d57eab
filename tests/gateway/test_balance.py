"""Balance in the live service: what it found, what came of it, and that it is told in plain words."""

import json
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from tests.gateway.house import House, house, text_of, told, until

from twinpool.cli.status_screen import show_status
from twinpool.config import Balance, BalanceMode, Objectives, Routing, RoutingPolicy
from twinpool.core.decisions import Balanced, WhyBalance
from twinpool.core.model import Role
from twinpool.engines.scripted import Script
from twinpool.gateway.balance_state import Balances, Outcome, words

ANY_ROLE = (Role.PREFILL, Role.DECODE, Role.COLOCATED)


def script() -> Script:
    return Script(prefill_s_per_token=0.0001, token_interval_s=0.001)


async def decisions(h: House) -> list[dict[str, Any]]:
    found = (await h.get(f"{h.admin_url}/admin/decisions")).json()["balance"]
    assert isinstance(found, list)
    return found


async def state(h: House) -> dict[str, Any]:
    return dict((await h.get(f"{h.admin_url}/admin/state")).json())


def shown(of: dict[str, Any]) -> str:
    console = Console(width=200, record=True, file=StringIO())
    show_status(console, of)
    return console.export_text()


def with_mode(mode: BalanceMode, policy: RoutingPolicy) -> dict[str, Any]:
    """Two workers in one pool, and nobody in the other: what balance must see as soon as it knows what they take."""
    return {
        "decode": [script(), script()],
        "allowed_roles": ANY_ROLE,
        "routing": Routing(policy=policy),
        "balance": Balance(mode=mode, period_s=0.05),
    }


async def until_it_proposes(h: House) -> None:
    """Ask until costs are known and somebody has been proposed."""
    for n in range(400):
        answer = await h.chat(f"n{n}", stream=True)
        assert text_of(answer.events) == told(f"n{n}")
        if any("worker" in found for found in await decisions(h)):
            return
    raise AssertionError(await decisions(h))


async def test_auto_moves_a_worker_and_says_so() -> None:
    async with house(**with_mode(BalanceMode.AUTO, RoutingPolicy.LEAST_COST)) as h:
        await until_it_proposes(h)
        found = next(found for found in await decisions(h) if "worker" in found)
        assert (found["outcome"], found["why"], found["role"]) == ("did", "pool_empty", "prefill")
        assert found["words"] == f"moved {found['worker']} to prefill, because nobody was left in that pool"
        assert h.controller.cluster[found["worker"]].role is Role.PREFILL
        assert await h.metric("twinpool_role_changes_total", to="prefill", reason="pool_empty") >= 1
        text = shown(await state(h))
        assert "Balance (auto): " in text
        assert f"ago: {found['words']}" in text
        await h.proved()
        assert (await h.chat("after")).text == told("after")


async def test_advice_says_the_same_and_moves_nobody() -> None:
    async with house(**with_mode(BalanceMode.ADVISE, RoutingPolicy.LEAST_LOADED)) as h:
        await until_it_proposes(h)
        for n in range(3):
            looked_at = h.controller.balanced()
            await h.chat(f"more{n}")
            await until(lambda looked_at=looked_at: h.controller.balanced() is not looked_at)
        (found,) = [found for found in await decisions(h) if "worker" in found]
        assert (found["outcome"], found["why"]) == ("would_do", "pool_empty")
        assert found["words"] == f"would move {found['worker']} to prefill, because nobody was left in that pool"
        assert {worker.role for worker in h.controller.cluster} == {Role.DECODE}
        assert await h.metric("twinpool_role_changes_total") == 0
        assert "Balance (advise): would move d" in shown(await state(h))


async def test_off_says_nothing_and_never_looks() -> None:
    async with house(**with_mode(BalanceMode.OFF, RoutingPolicy.LEAST_LOADED)) as h:
        for n in range(60):
            await h.chat(f"n{n}")
        assert await decisions(h) == []
        now = await state(h)
        assert now["balance"] is None
        assert "Balance" not in shown(now)
        await h.gateway.close()
        h.is_closed = True
        journal = h.journal.read_text()
        assert "RecordBalance" not in journal
        assert json.loads(journal.splitlines()[0])["law"]["learns"] is False


async def test_before_it_has_looked_it_says_why_not() -> None:
    """Nobody may change: then nothing ticks."""
    async with house(prefill=1, decode=1, balance=Balance(mode=BalanceMode.AUTO, period_s=0.05)) as h:
        await h.chat("n1")
        assert "Balance (auto): nothing yet, because" in shown(await state(h))


async def test_the_objectives_reach_the_law() -> None:
    wanted = Objectives(slo_ttft_s=2.5, slo_itl_s=0.07)
    async with house(colocated=1, objectives=wanted, balance=Balance(mode=BalanceMode.AUTO)) as h:
        await h.chat("n1")
        await h.gateway.close()
        h.is_closed = True
        law = json.loads(h.journal.read_text().splitlines()[0])["law"]
        assert (law["objectives"]["slo_ttft_s"], law["objectives"]["slo_itl_s"]) == (2.5, 0.07)


# Words


@pytest.mark.parametrize("why", WhyBalance)
def test_every_reason_has_words(why: WhyBalance) -> None:
    text = words(Balanced(why), Outcome.NOTHING)
    assert text.startswith("nothing, because ")
    assert "_" not in text


def test_what_was_weighed_is_told() -> None:
    move = Balanced(
        WhyBalance.PREFILL_SHORT,
        prefill=1,
        decode=3,
        best_prefill=2,
        pressure=1.12,
        best_pressure=0.7,
        worker="d2",
        role=Role.PREFILL,
    )
    assert words(move, Outcome.WOULD_DO) == (
        "would move d2 to prefill, because prompts are more than their pool can read "
        "(1 prefill and 3 decode are at 112% of what they carry, 2 and 2 would be at 70%)"
    )
    one_pool = Balanced(WhyBalance.ONE_POOL, prefill=2, decode=2, pressure=0.9, one_pool_pressure=0.8, is_one_pool=True)
    assert words(one_pool, Outcome.DID) == (
        "everybody does everything, because two pools would carry less of this traffic "
        "(2 prefill and 2 decode are at 90% of what they carry, one pool would be at 80%)"
    )


def test_advice_that_is_given_again_is_kept_once_from_when_it_began() -> None:
    balances = Balances(BalanceMode.ADVISE)
    for at, worker in enumerate(("d1", "d2")):
        balances.found(float(at), Balanced(WhyBalance.PREFILL_SHORT, worker=worker, role=Role.PREFILL))
    (kept,) = balances.recent(10)
    assert kept["worker"] == "d2"
    balances.found(5.0, Balanced(WhyBalance.GOOD))
    first, last = balances.recent(10)
    assert (first["outcome"], last["outcome"]) == ("would_do", "nothing")
    assert first["age_s"] - last["age_s"] == pytest.approx(5.0, abs=0.01)
    assert balances.recent(1)[0]["why"] == "good"
