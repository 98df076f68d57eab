"""The whole service over stock engines, which verify nothing: whatever they get wrong, no client reads it.

Every answer is compared with the one its prompt must have. A stock engine says garbage, with HTTP 200, to a handle that it
should have refused.
"""

import asyncio
import json
from typing import Any

import pytest
from tests.gateway.house import CHAT, House, chat, house, text_of, told, until

from twinpool.config import Declared, KvRole, Routing
from twinpool.core.lifecycle import PairState
from twinpool.core.model import Role
from twinpool.engines.scripted import GARBAGE, Default, Recorded, Script

SHORT = Declared(lease_s=2.0)
"""For handles that nobody can free: they end with their lease."""

QUICK = Routing(canary_interval_s=0.05, canary_idle_s=0.2, canary_share=0.5, lease_margin_s=0.1)


def pair_state(h: House, prefill: str = "p0", decode: str = "d0") -> PairState | None:
    return next((pair.state for pair in h.controller.pairs() if (pair.prefill, pair.decode) == (prefill, decode)), None)


async def proved(h: House, prefill: str = "p0", decode: str = "d0") -> None:
    await until(lambda: pair_state(h, prefill, decode) is PairState.PROVED, 20)  # the other direction's turn comes later


async def ask(h: House, nonce: str, *, stream: bool = False, **fields: Any) -> str:
    """The answer, which must be right if it is one."""
    answer = await h.ask(CHAT, chat(nonce, stream=stream, **fields))
    if answer.status != 200:
        assert GARBAGE.encode() not in answer.body
        return ""
    text = text_of(answer.events) if stream else answer.text
    assert text == told(nonce)
    return str(answer.headers["x-twinpool-path"])


def is_canary(recorded: Recorded) -> bool:
    return "please answer" not in json.dumps(recorded.body)


def _short(count: int) -> list[Script]:
    return [Script(lease_s=2.0) for _ in range(count)]


STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@STREAM
async def test_a_pair_serves_once_a_handoff_of_our_own_has_arrived(stream: bool) -> None:
    async with house(prefill=1, decode=1, is_stock=True, routing=QUICK) as h:
        await proved(h)
        assert await ask(h, "n1", stream=stream) == "disaggregated"
        assert any(map(is_canary, h.d.recorded))
        assert h.d.pulls >= 2


@STREAM
@pytest.mark.parametrize("flavour", ["poisoned_peers", "garbled_peers"])
async def test_a_pair_that_goes_bad_is_set_aside_and_comes_back_when_its_cause_is_gone(flavour: str, stream: bool) -> None:
    """Both ends stay well, and so does every other pair of theirs."""
    async with house(prefill=_short(2), decode=1, is_stock=True, declared=SHORT, routing=QUICK) as h:
        await proved(h)
        await proved(h, "p1")
        setattr(h.d.script, flavour, {h.p.address})
        paths: list[str] = []
        if flavour == "poisoned_peers":  # a request may meet it first: it fails, and is done elsewhere
            paths = [await ask(h, f"n{index}", stream=stream) for index in range(8)]
            assert "" not in paths
        await until(lambda: pair_state(h) is PairState.ASIDE, 10)
        assert pair_state(h, "p1") is PairState.PROVED
        assert {await ask(h, f"m{index}", stream=stream) for index in range(8)} == {"disaggregated"}
        state = (await h.get(f"{h.admin_url}/admin/state")).json()
        assert [(pair["prefill"], pair["state"]) for pair in state["pairs"]["troubled"]] == [("p0", "aside")]
        assert {worker["state"] for worker in state["workers"]} == {"ready"}
        getattr(h.d.script, flavour).clear()
        await proved(h)


async def test_a_pair_that_never_worked_gets_no_request_of_a_client() -> None:
    async with house(prefill=1, decode=Script(), is_stock=True, routing=QUICK) as h:
        h.d.script.garbled_peers = {h.p.address}
        assert {await ask(h, f"n{index}") for index in range(5)} == {"colocated"}
        handed_over = [recorded for recorded in h.d.recorded if recorded.takes_over and not is_canary(recorded)]
        assert handed_over == []


@STREAM
async def test_a_lease_that_ends_before_the_kv_is_read_costs_time_and_never_a_wrong_answer(stream: bool) -> None:
    """D's first handshake takes longer than P keeps the KV."""
    declared = Declared(lease_s=0.5)
    script = Script(lease_s=0.5)
    async with house(prefill=script, decode=Script(), is_stock=True, declared=declared, routing=QUICK) as h:
        await proved(h)
        h.d.script.handoff_s = 0.8
        for index in range(2):
            await ask(h, f"n{index}", stream=stream)
        assert h.p.ledger.pulls_after_expiry, "garbage was read"
        assert await h.metric("twinpool_leg_failures_total", failure="suspect") >= 1
        h.d.script.handoff_s = 0.0


@STREAM
async def test_a_prefill_engine_that_restarts_between_the_legs(stream: bool) -> None:
    async with house(prefill=1, decode=1, is_stock=True, routing=QUICK) as h:
        await proved(h)

        async def restart() -> None:
            before = len(h.p.requests())
            await until(lambda: len(h.p.requests()) > before and not h.p.last.is_running)
            await h.p.restart()

        h.d.script.handoff_s = 0.1
        restarting = asyncio.create_task(restart())
        assert await ask(h, "n1", stream=stream)
        await restarting
        h.d.script.handoff_s = 0.0
        assert await ask(h, "n2", stream=stream)


async def test_a_restart_is_noticed_before_a_handle_crosses_it() -> None:
    """What the engine before it was proved for says nothing of this one."""
    async with house(prefill=1, decode=1, is_stock=True, routing=QUICK) as h:
        await proved(h)
        for index in range(3):
            incarnation = h.controller.cluster["d0"].facts.incarnation
            await h.d.restart()
            assert await ask(h, f"n{index}")
            await until(lambda before=incarnation: h.controller.cluster["d0"].facts.incarnation not in ("", before))
            await proved(h)


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_a_prefill_that_was_cut_short_is_no_prefill(reason: str) -> None:
    async with house(prefill=_short(1), decode=1, is_stock=True, declared=SHORT, routing=QUICK) as h:
        await proved(h)

        def cut(recorded: Recorded) -> Default | None:
            return None if is_canary(recorded) else Default(finish_reason=reason)

        h.p.script.on_request = cut
        assert await ask(h, "n1") in ("", "colocated")
        assert not [
            recorded for recorded in h.d.recorded if recorded.takes_over and not is_canary(recorded) and _is_served(recorded)
        ]
        h.p.script.on_request = None


def _is_served(recorded: Recorded) -> bool:
    """More than one token was asked for: a release asks for one."""
    return recorded.body.get("max_tokens") != 1


async def test_two_engines_that_count_a_prompt_differently_do_not_answer_together() -> None:
    """Another tokenizer or template: the KV is of another prompt than the one that D believes it has."""
    async with house(prefill=_short(1), decode=1, is_stock=True, declared=SHORT, routing=QUICK) as h:
        await proved(h)

        def miscount(recorded: Recorded) -> Default | None:
            return None if is_canary(recorded) else Default(usage={"prompt_tokens": 11})

        h.p.script.on_request = miscount
        assert await ask(h, "n1") in ("", "colocated")
        assert await h.metric("twinpool_leg_failures_total", failure="miscounted") >= 1
        h.p.script.on_request = None


async def test_a_producer_gets_no_handle_whatever_its_role_becomes() -> None:
    declared = Declared(kv_role=KvRole.PRODUCER)
    roles = (Role.PREFILL, Role.DECODE)
    async with house(prefill=2, is_stock=True, declared=declared, routing=QUICK, allowed_roles=roles) as h:
        await h.ask(f"{h.admin_url}/admin/workers/p1/role", {"role": "decode"})
        assert {await ask(h, f"n{index}") for index in range(5)} == {"colocated"}
        assert not any(recorded.takes_over for engine in h.prefill for recorded in engine.recorded)
        why = (await h.get(f"{h.admin_url}/admin/state")).json()["incompatible"]
        assert all("kv_producer" in pair["why"] for pair in why)


async def test_roles_swap_between_requests_where_the_flag_allows_it() -> None:
    roles = (Role.PREFILL, Role.DECODE)
    async with house(prefill=1, decode=1, is_stock=True, routing=QUICK, allowed_roles=roles) as h:
        await proved(h)
        for swap in range(4):
            assert await ask(h, f"n{swap}") == "disaggregated"
            one, other = ("p0", "d0") if swap % 2 else ("d0", "p0")
            await h.ask(f"{h.admin_url}/admin/workers/{one}/role", {"role": "prefill"})
            await h.ask(f"{h.admin_url}/admin/workers/{other}/role", {"role": "decode"})
            await proved(h, one, other)
        assert h.p.incarnation == h.d.incarnation == 1


async def test_log_probabilities_and_tools_pass_through_a_pair() -> None:
    async with house(prefill=1, decode=1, is_stock=True, routing=QUICK) as h:
        await proved(h)
        tools = [{"type": "function", "function": {"name": "f"}}]
        answer = await h.ask(CHAT, chat("n1", logprobs=True, top_logprobs=2, tools=tools, max_tokens=3))
        assert answer.headers["x-twinpool-path"] == "disaggregated"
        assert len(answer.json()["choices"][0]["logprobs"]["content"]) == 3
        assert h.d.last.body["tools"] == tools or is_canary(h.d.last)


async def test_under_load_and_faults_no_answer_is_wrong() -> None:
    """Leases that end, pairs that go bad and come back, engines that restart, while clients ask."""
    scripts = [Script(lease_s=1.0, prefill_s_per_token=0.0005) for _ in range(2)]
    async with house(
        prefill=scripts, decode=[Script(), Script()], is_stock=True, declared=Declared(lease_s=1.0), routing=QUICK
    ) as h:
        await proved(h)

        async def clients(number: int) -> list[str]:
            return [await ask(h, f"c{number}r{index}", stream=bool(index % 2)) for index in range(25)]

        async def faults() -> None:
            for engine in (h.decode[0], h.prefill[0], h.decode[1], h.prefill[1]):
                h.decode[1].script.poisoned_peers = {h.prefill[0].address}
                await asyncio.sleep(0.15)
                await engine.restart()
                h.decode[1].script.poisoned_peers = set()

        paths, *_ = await asyncio.gather(asyncio.gather(*map(clients, range(4))), faults())
        flat = [path for some in paths for path in some]
        assert len(flat) == 100
        assert flat.count("") <= 10, "a few may fail; none may lie"
        shown = h.presented()
        assert len(shown) == len(set(shown)), "a handle is shown once"


@STREAM
@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 1},
        {"max_tokens": 2},
        {"max_completion_tokens": 1},
        {"stop": ["n1.0"]},
        {"stop": ["#"]},
        {"max_tokens": 3, "min_tokens": 3},
        {"max_tokens": 1, "logprobs": True, "top_logprobs": 2},
    ],
    ids=str,
)
async def test_at_the_border_of_the_first_token_a_pair_answers_as_one_engine_does(fields: dict[str, Any], stream: bool) -> None:
    """A prefill that ends with "stop", or has written all that was asked for, is a prefill all the same."""
    async with house(prefill=1, decode=1, is_stock=True, routing=QUICK) as h:
        await proved(h)
        body = chat("n1", stream=stream, **fields)
        pair, alone = await h.ask(CHAT, body), await h.ask(f"{h.d.url}{CHAT}", body)
        assert pair.headers["x-twinpool-path"] == "disaggregated"
        if stream:
            assert _compared(pair.events) == _compared(alone.events)
        else:
            assert pair.json()["choices"] == alone.json()["choices"]
            assert pair.json()["usage"]["completion_tokens"] == alone.json()["usage"]["completion_tokens"]


def _compared(events: list[Any]) -> list[Any]:
    return [event if event == "[DONE]" else event["choices"] for event in events]
