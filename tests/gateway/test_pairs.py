"""Pairs of stock engines that fail while both of their engines are well: what clients get, and how the pair comes back."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from tests.gateway.house import Answer, House, chat, house, told, turns, until

from twinpool.config import Declared, Routing
from twinpool.engines.scripted import GARBAGE, Default, Reply, Script, ScriptedEngine
from twinpool.engines.scripted.ledger import HandleState

STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
CLIENTS = 500  # twice: streamed and not
OFTEN = Routing(canary_share=0.5, canary_interval_s=0.2, canary_idle_s=0.3)


SHORT_S = 2.0
"""A lease that ends while a test settles: what failed legs leave behind at a stock engine nobody else can end."""


def stock(**more: Any) -> Any:
    pools = {"prefill": 1, "decode": 1} | more
    return house(is_stock=True, **pools)


def short(prefill: int = 1, **more: Any) -> Any:
    scripts = [Script(lease_s=SHORT_S) for _ in range(prefill)]
    routing = Routing(canary_share=0.5, lease_margin_s=0.2)
    return stock(prefill=scripts, routing=routing, declared=Declared(lease_s=SHORT_S), **more)


async def many(h: House, count: int, first: int = 0) -> list[Answer]:
    """So many requests one after the other; each is answered as it must be."""
    answers = []
    for n in range(first, first + count):
        answer = await h.chat(f"n{n}")
        assert answer.text == told(f"n{n}")
        answers.append(answer)
    return answers


def ways(answers: list[Answer]) -> Counter[str]:
    return Counter(f"{a.headers.get('x-twinpool-prefill', '')}>{a.headers['x-twinpool-decode']}" for a in answers)


async def test_until_a_canary_has_arrived_one_worker_does_all() -> None:
    gate = asyncio.Semaphore(0)
    async with stock(prefill=Script(steps=gate)) as h:
        await until(lambda: h.p.running == 1)
        answer = (await many(h, 1))[0]
        assert answer.headers["x-twinpool-path"] == "colocated"
        assert await h.metric("twinpool_decisions_total", choice="colocated", reason="pair_unproved") == 1
        assert await h.metric("twinpool_pairs", state="unproved") == 1
        h.p.script.steps = None
        gate.release()
        await h.proved()
        assert (await many(h, 1))[0].headers["x-twinpool-path"] == "disaggregated"


async def test_a_pair_poisoned_with_errors_goes_and_both_of_its_workers_stay() -> None:
    """WF-01: everything is "Ready", and every handoff from p0 to d0 fails."""
    async with short(prefill=2, decode=2) as h:
        await h.proved()
        h.d.script.poisoned_peers.add(h.p.address)
        answers: list[Answer] = []
        while h.pair().state == "proved":
            assert len(answers) < 40, "clients are enough to find it"
            answers += await many(h, 1, len(answers))
        assert Counter(pair.state for pair in h.controller.pairs()) == {"aside": 1, "proved": 3}
        workers = {worker.facts.worker: str(worker.story.state) for worker in h.controller.cluster}
        assert set(workers.values()) == {"ready"}
        after = ways(await many(h, 12, 100))
        assert "p0>d0" not in after
        assert {"p0>d1", "p1>d0"} & set(after), "either end goes on with another partner"
        assert await h.metric("twinpool_decisions_total", choice="colocated") == 0
        h.d.script.poisoned_peers.clear()
        await h.proved()


async def test_a_pair_that_has_no_other_serves_whole_meanwhile_and_says_why() -> None:
    async with short() as h:
        await h.proved()
        h.d.script.poisoned_peers.add(h.p.address)
        await many(h, 6)
        await h.aside()
        answer = (await many(h, 1, 50))[0]
        assert answer.headers["x-twinpool-path"] == "colocated"
        assert await h.metric("twinpool_decisions_total", choice="colocated", reason="pair_aside") >= 1
        h.d.script.poisoned_peers.clear()
        await h.proved()
        assert (await many(h, 1, 60))[0].headers["x-twinpool-path"] == "disaggregated"


async def test_silent_garbage_is_found_by_the_next_canary() -> None:
    """HTTP 200, and every counter is well: only a canary can tell."""
    async with stock(prefill=2, decode=2, routing=OFTEN) as h:
        await h.proved()
        h.d.script.garbled_peers.add(h.p.address)
        assert GARBAGE in await h.aside("p0", "d0")
        answers = await many(h, 8)
        assert "p0>d0" not in ways(answers)
        h.d.script.garbled_peers.clear()
        await until(lambda: h.pair().state == "proved", 20)


async def test_a_restart_at_the_same_address_is_proved_anew_before_anything_crosses_it() -> None:
    """WF-02."""
    async with stock(prefill=1, decode=1) as h:
        await h.proved()
        before = h.d.ledger.engine_id
        handed = len(h.d.requests("/chat/completions"))
        await h.p.restart()
        h.p.script.steps = gate = asyncio.Semaphore(0)
        await until(lambda: h.pair().state == "unproved")
        assert (await many(h, 1))[0].headers["x-twinpool-path"] == "colocated"
        h.p.script.steps = None
        gate.release()
        await h.proved()
        await many(h, 1, 5)
        given = [r.kv_transfer_params for r in h.d.requests("/chat/completions")[handed:] if r.takes_over]
        assert [handle["remote_engine_id"] for handle in given if handle] == [h.p.ledger.engine_id]
        assert before == h.d.ledger.engine_id
        assert h.p.ledger.misuses == 0


async def test_a_decode_engine_that_restarted_is_proved_anew() -> None:
    async with stock() as h:
        await h.proved()
        proofs = await h.metric("twinpool_canaries_total", outcome="proved")
        await h.d.restart()
        await until(lambda: h.pair().state != "proved")
        await h.proved()
        assert await h.metric("twinpool_canaries_total", outcome="proved") == proofs + 1
        assert (await many(h, 1))[0].headers["x-twinpool-path"] == "disaggregated"


async def test_a_prefill_engine_that_drains_hands_over_what_it_has_read() -> None:
    """WF-04: a drain costs no request."""
    async with stock(prefill=2, decode=Script(handoff_s=0.1)) as h:
        await h.proved()
        asking = [asyncio.create_task(h.chat(f"n{n}")) for n in range(20)]
        await until(lambda: h.d.running > 0)
        await h.ask(f"{h.admin_url}/admin/workers/p0/drain")
        answers = await asyncio.gather(*asking)
        assert [answer.text for answer in answers] == [told(f"n{n}") for n in range(20)]
        later = await many(h, 3, 50)
        assert {a.headers.get("x-twinpool-prefill") for a in later} == {"p1"}
        assert await h.metric("twinpool_leg_failures_total") == 0


# RP-30: two that count the same prompt differently


def counts(tokens: int) -> Any:
    """As decode, of a client's prompt."""
    return lambda recorded: (
        Default(usage={"prompt_tokens": tokens}) if recorded.takes_over and "messages" in recorded.body else None
    )


async def test_a_whole_answer_of_a_pair_that_counts_differently_is_thrown_away() -> None:
    async with short() as h:
        await h.proved()
        h.p.script.replies.append(Default(usage={"prompt_tokens": 10}))
        h.d.script.on_request = counts(11)
        answer = await h.chat("n1")
        assert answer.text == told("n1")
        assert answer.headers["x-twinpool-path"] == "colocated"
        assert await h.metric("twinpool_leg_failures_total", leg="decode", failure="miscounted") == 1
        assert "count" in await h.aside()
        assert (await many(h, 1, 7))[0].headers["x-twinpool-path"] == "colocated"


@pytest.mark.parametrize("includes_usage", [True, False])
async def test_a_stream_of_such_a_pair_is_out_already_and_is_its_last(includes_usage: bool) -> None:
    """Whether its client asked for the usage or not: the engine was asked."""
    async with stock() as h:
        await h.proved()
        h.p.script.replies.append(Default(usage={"prompt_tokens": 10}))
        h.d.script.on_request = counts(11)
        options = {"stream_options": {"include_usage": True}} if includes_usage else {}
        assert (await h.chat("n1", stream=True, **options)).status == 200
        assert "10 and 11" in await h.aside()
        assert (await many(h, 1, 7))[0].headers["x-twinpool-path"] == "colocated"


@STREAM
@pytest.mark.parametrize(("prefill", "decode"), [(10, 10), (0, 11)])
async def test_who_counts_the_same_or_nothing_goes_on(stream: bool, prefill: int, decode: int) -> None:
    async with stock() as h:
        await h.proved()
        h.p.script.replies.append(Default(usage={"prompt_tokens": prefill}))
        h.d.script.on_request = counts(decode)
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = await h.chat("n1", **options)
        assert answer.headers["x-twinpool-path"] == "disaggregated"
        assert h.pair().state == "proved"


# RP-23: a prefill without a handle


@pytest.mark.parametrize("handle", [None, "absent", {}, {"do_remote_prefill": False}])
async def test_a_missing_handle_is_counted_and_never_decoded_without(handle: Any) -> None:
    async with stock() as h:
        await h.proved()
        computed = h.d.computed_prompt_tokens
        h.p.script.replies.append(Default(handle=handle))
        assert (await h.chat("n1")).text == told("n1")
        assert await h.metric("twinpool_leg_failures_total", leg="prefill", failure="no_handle") == 1
        assert h.d.computed_prompt_tokens == computed + 1, "the last token of the prompt alone"
        assert h.pair().state == "proved", "it is not the pair's fault"


async def test_keys_of_a_handle_that_nobody_knows_go_on_as_they_came() -> None:
    extras = {"x_future": {"a": [1, 2.0, None]}, "remote_block_ids": [[2**53 + 1]], "n": 2**63}
    async with stock(prefill=Script(handle_extras=extras)) as h:
        await h.proved()
        await h.chat("n1")
        given = h.d.requests("/chat/completions")[-1].kv_transfer_params
        assert given is not None
        assert extras.items() <= given.items()


# Handles that are given back


async def test_a_handle_that_was_not_sent_is_read_and_dropped_by_another_partner() -> None:
    """A stock engine has no other way to be told. While the prompt was read, the decode worker that had room for it went, and
    the other one drains: it takes nothing new, but may read."""
    async with stock(decode=2) as h:
        await h.proved()
        h.p.script.steps = gate = asyncio.Semaphore(0)
        asking = asyncio.create_task(h.chat("n1", max_tokens=9))
        await until(lambda: any(recorded.is_running for recorded in h.p.requests("/chat/completions")))
        gone, reader = sorted(("d0", "d1"), key=lambda name: -h.load(name)[2])
        await h.ask(f"{h.admin_url}/admin/workers/{reader}/drain")
        await h.engines[gone].stop()
        await until(lambda: h.controller.cluster[gone].story.state == "lost")
        consumed = h.p.ledger.count(HandleState.CONSUMED)
        h.p.script.steps = None
        gate.release()
        assert (await asking).text == told("n1", 9)
        await until(lambda: h.p.ledger.count(HandleState.CONSUMED) == consumed + 1)
        read = h.engines[reader].last.body
        assert (read["max_tokens"], read["stream"], read["messages"]) == (1, False, chat("n1")["messages"])
        await until(lambda: not h.handles())


@STREAM
async def test_a_thousand_clients_that_leave_at_any_moment_leave_nothing(stream: bool) -> None:
    """KV-01: whatever they leave behind is given back, or ends with its lease; it never grows."""
    async with stock(
        prefill=Script(lease_s=0.3),
        decode=Script(handoff_s=0.002),
        declared=Declared(lease_s=0.3),
        routing=Routing(lease_margin_s=0.05),
    ) as h:
        await h.proved()

        async def one(n: int) -> None:
            async with await h.connect() as wire:
                wire.post(chat(f"n{n}", stream=stream))
                begun = len(h.p.recorded) + len(h.d.recorded)
                if n % 3:
                    await until(lambda: len(h.p.recorded) + len(h.d.recorded) > begun or not h.controller.live_requests)
                await turns(n % 7)

        for batch in range(0, CLIENTS, 10):
            await asyncio.gather(*(one(n) for n in range(batch, batch + 10)))
        await h.settle()
        assert h.handles() == {}
        assert h.p.ledger.held == 0
        presented = h.presented()
        assert len(set(presented)) == len(presented), "each at most once"


# A handle that points elsewhere


async def test_a_prefill_that_points_elsewhere_is_never_proved() -> None:
    """SE-03: its handles send the decode engine to an address that is nobody's of this fleet."""
    async with ScriptedEngine() as foreign:
        extras = {"remote_host": foreign.host, "remote_port": foreign.port}
        async with stock(prefill=Script(handle_extras=extras, lease_s=0.5)) as h:
            await h.aside()
            assert (await many(h, 1))[0].headers["x-twinpool-path"] == "colocated"
            h.p.script.handle_extras.clear()
            await h.proved()


async def test_one_that_does_so_later_is_found_by_the_next_canary() -> None:
    async with ScriptedEngine() as foreign, stock(prefill=Script(lease_s=0.5), routing=OFTEN) as h:
        await h.proved()
        h.p.script.handle_extras |= {"remote_host": foreign.host, "remote_port": foreign.port}
        await h.aside()
        assert foreign.recorded == []
        assert (await many(h, 1))[0].headers["x-twinpool-path"] == "colocated"


async def test_every_handle_is_presented_once_whatever_fails() -> None:
    """KV-05, over stock engines: errors, resets, restarts of the stream, refusals."""
    faults = [Reply.error(500), Reply.reset(), Reply.error(503), Default(stops_after_events=2), Default()]
    async with short(decode=2, colocated=1) as h:
        await h.proved()
        for n in range(60):
            for engine in h.decode:
                engine.script.replies.clear()
            h.decode[n % 2].script.replies.append(faults[n % len(faults)])
            answer = await h.chat(f"n{n}", stream=bool(n % 4 == 0))
            assert GARBAGE.encode() not in answer.body
        for engine in h.decode:
            engine.script.replies.clear()
        presented = h.presented()
        assert len(set(presented)) == len(presented)
        assert h.p.ledger.misuses == 0
        await until(lambda: h.p.ledger.count(HandleState.HELD) == 0)
