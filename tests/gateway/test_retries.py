"""A leg that fails before the client has a token: prefilled again elsewhere with a new handle, within the deadline, or a clean
error. No handle is shown twice, and no answer is another's."""

import asyncio
from typing import Any

import pytest
from tests.gateway.house import House, chat, house, text_of, told, until

from twinpool.config import Routing, Timeouts
from twinpool.engines.scripted import Default, End, Reply, Script

QUICK = Timeouts(connect_s=0.2, prefill_s=0.15, first_byte_s=0.15, idle_s=0.15, release_s=0.2)
FAULTS: dict[str, Any] = {
    "500": Reply.error(500),
    "hang": Reply.hang(),
    "reset": Reply.reset(),
    "close": Reply(chunks=(), is_raw=True),
    "half an answer": Reply(chunks=((0, b'{"choices":['),), end=End.CLOSE),
    "half then hang": Reply(chunks=((0, b'{"choices":['),), end=End.HANG),
}
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


async def said(h: House, nonce: str, stream: bool) -> str:
    answer = await h.chat(nonce, stream=stream)
    assert answer.status == 200, answer
    return text_of(answer.events) if stream else answer.text


def all_once(handles: list[str]) -> bool:
    return len(set(handles)) == len(handles)


@STREAM
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_prefill_that_fails_is_done_elsewhere(fault: str, stream: bool) -> None:
    async with house(prefill=2, decode=1, timeouts=QUICK) as h:
        h.p.script.replies.append(FAULTS[fault])
        assert await said(h, "n1", stream) == told("n1")
        assert [len(engine.recorded) for engine in h.prefill] == [1, 1]
        assert len(h.presented()) == 1


@STREAM
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_decode_that_fails_begins_anew_with_a_new_handle(fault: str, stream: bool) -> None:
    async with house(prefill=1, decode=2, timeouts=QUICK) as h:
        h.d.script.replies.append(FAULTS[fault])
        assert await said(h, "n2", stream) == told("n2")
        assert [len(engine.recorded) for engine in h.decode] == [1, 1]
        assert len(h.presented()) == 2
        assert all_once(h.presented())
        assert h.p.ledger.misuses == 0


async def test_a_decode_that_fails_after_it_has_read_the_kv_gets_no_second_use_of_it() -> None:
    async with house(prefill=1, decode=2) as h:
        h.d.script.replies.append(Default(end=End.RESET))
        assert await said(h, "n3", False) == told("n3")
        assert all_once(h.presented())
        assert len(h.presented()) == 2
        assert h.p.ledger.misuses == 0


@STREAM
@pytest.mark.parametrize("leg", ["prefill", "decode", "colocated"])
async def test_a_worker_that_refuses_connections_is_gone_round(leg: str, stream: bool) -> None:
    pools = {"colocated": 2} if leg == "colocated" else {"prefill": 1, "decode": 1, leg: 2}
    async with house(**pools, server={"probe_interval_s": 30.0}) as h:
        gone = getattr(h, leg)[0]
        await gone.stop()
        assert await said(h, "n4", stream) == told("n4")
        assert gone.recorded == []
        assert all_once(h.presented())


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_when_nobody_is_left_the_error_is_clean_and_in_time(leg: str) -> None:
    async with house(prefill=1, decode=1, timeouts=QUICK) as h:
        getattr(h, leg)[0].script.on_request = lambda recorded: Reply.hang()
        answer = await h.chat()
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
        assert await h.outcomes() == {"failed": 1}
        assert len(getattr(h, leg)[0].recorded) == 3


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_connection_that_the_engine_closed_while_it_rested_costs_no_attempt(leg: str) -> None:
    async with house(prefill=1, decode=1, routing=Routing(max_attempts=1)) as h:
        await h.chat("n5")
        getattr(h, leg)[0].script.replies.append(Reply.reset())
        assert await said(h, "n6", False) == told("n6")
        assert all_once(h.presented())


async def test_an_engine_that_is_slow_and_alive_is_not_cut() -> None:
    async with house(prefill=Script(prefill_s_per_token=0.1), decode=1, timeouts=Timeouts(idle_s=0.1)) as h:
        assert await said(h, "n7", True) == told("n7")
        assert len(h.p.recorded) == 1


async def test_a_prefill_worker_that_restarts_between_the_legs_gives_nobody_anothers_answer() -> None:
    """Its KV is gone, and to the handle of the life before it answers with what is no KV of this prompt."""
    async with house(prefill=1, decode=Script(handoff_s=0.5)) as h:
        asking = asyncio.create_task(h.chat("n8", stream=True))
        await until(lambda: h.d.running == 1)
        incarnation = h.controller.cluster["p0"].facts.incarnation
        await h.p.restart()
        await until(lambda: h.controller.cluster["p0"].facts.incarnation != incarnation)
        answer = await asking
        assert text_of(answer.events) == told("n8")
        assert all_once(h.presented())


async def test_a_prefill_worker_that_restarts_while_it_reads_is_asked_again() -> None:
    async with house(prefill=1, decode=1) as h:
        h.p.script.replies.append(Reply.hang())
        asking = asyncio.create_task(h.chat("n9"))
        await until(lambda: h.p.running == 1)
        await h.p.restart()
        assert (await asking).text == told("n9")
        assert h.presented() == []


@STREAM
async def test_a_decode_worker_that_restarts_before_its_first_token_is_given_a_new_handle(stream: bool) -> None:
    async with house(prefill=1, decode=1) as h:
        h.d.script.replies.append(Reply.hang())
        asking = asyncio.create_task(said(h, "n10", stream))
        await until(lambda: h.d.running == 1)
        await h.d.restart()
        assert await asking == told("n10")
        assert all_once(h.presented())
        assert h.p.ledger.misuses == 0


async def test_kv_that_is_not_yet_readable_is_no_reason_to_answer_without_it() -> None:
    async with house(
        prefill=Script(kv_readable_after_s=0.1), decode=Script(unreadable_kv="refuse"), routing=Routing(pause_s=0.02)
    ) as h:
        assert (await h.chat("n11")).text == told("n11")
        assert all_once(h.presented())
        assert h.p.ledger.misuses == 0
        assert await h.metric("twinpool_leg_failures_total", leg="decode", failure="busy") >= 1


async def test_a_poisoned_pair_is_left_for_one_that_works() -> None:
    async with house(prefill=2, decode=1) as h:
        h.d.script.poisoned_peers.add(h.p.address)
        for n in range(10):
            assert await said(h, f"m{n}", False) == told(f"m{n}")
        assert h.p.ledger.misuses == 0
        assert all_once(h.presented())
        assert all(worker.story.state == "ready" for worker in h.controller.cluster)


async def test_a_handle_that_nobody_frees_is_counted_until_its_lease_ends() -> None:
    """As with an engine that has no route for it."""
    unsigned = Script(lease_s=0.4, handle_extras={"twinpool_signature": None})
    async with house(prefill=unsigned, decode=2) as h:
        h.d.script.replies.append(Reply.error(500))
        assert await said(h, "n12", False) == told("n12")
        assert await h.metric("twinpool_kv_handles", state="orphaned") == 1
        assert h.p.ledger.held == 1
        await until(lambda: not h.handles())
        assert h.p.ledger.held == 0


async def test_a_release_that_hangs_or_fails_holds_up_nobody() -> None:
    async with house(prefill=Script(lease_s=0.5), decode=2, timeouts=QUICK) as h:
        h.d.script.replies.append(Reply.error(500))
        h.p.script.handle_extras["twinpool_signature"] = "forged"
        assert await said(h, "n13", False) == told("n13")
        await until(lambda: not h.handles())


async def test_no_request_outlives_its_deadline() -> None:
    async with house(prefill=1, decode=1, routing=Routing(request_timeout_s=0.2), timeouts=Timeouts(prefill_s=1.0)) as h:
        h.p.script.on_request = lambda recorded: Reply.hang()
        began = asyncio.get_running_loop().time()
        answer = await h.ask("/v1/chat/completions", chat())
        assert answer.status == 504
        assert asyncio.get_running_loop().time() - began < 0.6


async def test_a_thousand_faults_never_show_a_handle_twice_nor_a_wrong_answer() -> None:
    faults = list(FAULTS.values())
    scripts = [Script(lease_s=2.0), Script(lease_s=2.0)]  # a release that fails leaves its handle to the lease
    async with house(prefill=scripts, decode=2, timeouts=QUICK, routing=Routing(max_attempts=12)) as h:
        for index, engine in enumerate((*h.prefill, *h.decode)):
            engine.script.replies.extend(
                faults[(n * 7 + index) % len(faults)] if n % 3 == index % 3 else Default() for n in range(60)
            )
        answers = await asyncio.gather(*(h.chat(f"k{n}", stream=n % 2 == 0) for n in range(60)))
        for n, answer in enumerate(answers):
            assert (text_of(answer.events) if n % 2 == 0 else answer.text) == told(f"k{n}")
        assert all_once(h.presented())
        assert sum(engine.ledger.misuses for engine in h.prefill) == 0


async def test_a_request_that_ends_engines_is_not_tried_on_all_of_them() -> None:
    """What three engines died of would end the fourth, too; whoever else is served by them goes on."""
    async with house(colocated=5) as h:
        for engine in h.colocated:
            engine.script.on_request = lambda recorded: Reply.reset() if "deadly" in str(recorded.body) else None
        assert (await h.chat("deadly")).status == 502
        seen = sum("deadly" in str(recorded.body) for engine in h.colocated for recorded in engine.recorded)
        assert seen == Routing().max_attempts
        await h.up()
        assert [(await h.chat(f"n{index}")).text for index in range(5)] == [told(f"n{index}") for index in range(5)]
