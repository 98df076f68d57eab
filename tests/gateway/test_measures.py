"""What the metrics tell is what happened."""

import asyncio
from typing import Any

import pytest
from tests.core.stage import Stage, prompt, worker
from tests.gateway.house import chat, house, until

from twinpool.assemble import build_controller
from twinpool.config import Objectives, Routing, Timeouts
from twinpool.core.law import CostPrior, Law
from twinpool.core.meters import NEWBORN_LEGS
from twinpool.engines.scripted import Default, End, Reply, Script
from twinpool.gateway.metrics import Metrics

PARTS = ("queue", "prefill", "handoff", "first_decode", "handoff_and_first_decode")


@pytest.mark.parametrize("tells", [True, False])
async def test_the_parts_of_the_ttft_are_what_each_took_and_add_up(tells: bool) -> None:
    decode = Script(handoff_s=0.04, token_interval_s=0.06, tells_handoff=tells)
    async with house(prefill=Script(slots=1), decode=decode) as h:
        h.p.script.replies.append(Default(delay_s=0.12))
        began = asyncio.get_running_loop().time()
        async with h.stream("n1", max_tokens=2) as stream:
            await stream.event()
            await stream.event()
            seen_s = asyncio.get_running_loop().time() - began
            await stream.rest()
        parts = {part: await h.metric("twinpool_ttft_part_seconds_sum", part=part) for part in PARTS}
        ttft = await h.metric("twinpool_ttft_seconds_sum", length_class="short")
        assert sum(parts.values()) == pytest.approx(ttft)
        assert ttft == pytest.approx(seen_s, abs=0.03)
        slack_s = seen_s - 0.22 + 0.01  # what this machine added, wherever
        assert parts["queue"] < slack_s
        assert 0.119 <= parts["prefill"] < 0.12 + slack_s  # timers round
        if tells:
            assert 0.039 <= parts["handoff"] < 0.04 + slack_s
            assert 0.059 <= parts["first_decode"] < 0.06 + slack_s
            assert parts["handoff_and_first_decode"] == 0
        else:
            assert 0.099 <= parts["handoff_and_first_decode"] < 0.10 + slack_s
            assert parts["handoff"] == parts["first_decode"] == 0


async def test_time_in_the_queue_and_in_attempts_that_failed_is_queue() -> None:
    async with house(prefill=1, decode=2, timeouts=Timeouts(first_byte_s=0.1)) as h:
        h.d.script.replies.append(Reply.hang())
        assert (await h.chat(stream=True)).status == 200
        assert 0.1 <= await h.metric("twinpool_ttft_part_seconds_sum", part="queue") < 0.2
        assert await h.metric("twinpool_ttft_part_seconds_sum") == pytest.approx(await h.metric("twinpool_ttft_seconds_sum"))


async def test_bytes_and_seconds_of_handoffs_are_those_that_the_workers_tell() -> None:
    async with house(prefill=1, decode=Script(handoff_s=0.02, bytes_per_token=1000)) as h:
        for stream in (True, False):
            await h.chat("n2", stream=stream)
        assert await h.metric("twinpool_handoff_bytes_total") == 2 * 4 * 1000
        assert await h.metric("twinpool_handoff_seconds_count") == 2
        assert 0.04 <= await h.metric("twinpool_handoff_seconds_sum") < 0.1


async def test_long_prompts_are_told_apart_by_the_engines_own_count() -> None:
    async with house(prefill=1, decode=1) as h:
        await h.chat("a " * 1600, stream=True)
        await h.chat("n3", stream=True)
        assert await h.metric("twinpool_ttft_seconds_count", length_class="long") == 1
        assert await h.metric("twinpool_ttft_seconds_count", length_class="short") == 1


async def test_an_answer_that_is_not_streamed_has_no_ttft() -> None:
    async with house(prefill=1, decode=1) as h:
        await h.chat()
        assert await h.metric("twinpool_ttft_seconds_count") == 0
        assert await h.metric("twinpool_e2e_seconds_count") == 1


async def test_each_request_ends_once_whatever_became_of_it() -> None:
    async with house(
        prefill=1,
        decode=Script(slots=1),
        routing=Routing(max_waiting=2, queue_timeout_s=5.0),
        timeouts=Timeouts(first_byte_s=0.2),
    ) as h:
        await h.chat("ok")
        await h.chat("ok too", stream=True)
        h.p.script.replies.append(Reply.error(500))
        await h.chat("once more")
        h.d.script.replies.append(Default(stops_after_events=3, end=End.RESET))
        await h.chat("breaks", stream=True)
        h.p.script.replies.append(Reply.error(400))
        await h.chat("wrong")
        h.p.script.on_request = lambda recorded: Reply.error(500)
        await h.chat("fails")
        h.p.script.on_request = None
        await h.up()
        h.d.script.steps = asyncio.Semaphore(0)
        async with await h.connect() as leaver:
            leaver.post(chat("leaves"))
            await until(lambda: h.d.running == 1)
        await until(lambda: not h.controller.live_requests)
        h.d.script.steps = steps = asyncio.Semaphore(0)
        asking = [asyncio.create_task(h.chat(f"n{n}")) for n in range(9)]
        await until(lambda: sum(task.done() for task in asking) == 6)
        for _ in range(100):
            steps.release()
        assert sorted(answer.status for answer in await asyncio.gather(*asking)) == [200] * 3 + [429] * 6
        assert await h.outcomes() == {"ok": 6, "failed": 2, "rejected": 1, "client_left": 1, "refused": 6}
        await until(lambda: h.arrivals() == 16)  # the journal is written a moment later
        assert await h.metric("twinpool_e2e_seconds_count") == 6


async def test_a_request_of_three_choices_is_one_request() -> None:
    async with house(colocated=1) as h:
        await h.chat(n=3)
        assert await h.outcomes() == {"ok": 1}
        assert await h.metric("twinpool_sequences_total", path="colocated") == 3


async def test_a_prompt_is_counted_once_however_many_engines_had_it() -> None:
    """The decode engine's own series count it again, as handed over."""
    async with house(prefill=1, decode=1) as h:
        h.p.script.replies.append(Reply.error(500))  # tried again
        answers = [await h.chat(f"n{index}", stream=bool(index % 2), **_with_usage(index)) for index in range(10)]
        assert [answer.status for answer in answers] == [200] * 10
        assert await h.metric("twinpool_prompt_tokens_total") == 10 * 4
        assert await h.metric("twinpool_sequences_total", path="disaggregated") == 10
        scrapes = [await h.gateway._members.scrape(worker) for worker in ("p0", "d0")]
        assert sum(scrape.computed_prompt_tokens or 0 for scrape in scrapes) == 40
        assert scrapes[1].handed_over_prompt_tokens == 40


def _with_usage(index: int) -> dict[str, Any]:
    return {"stream_options": {"include_usage": True}} if index % 2 else {}


async def test_the_promised_names_are_there_before_anything_happened() -> None:
    async with house(prefill=1, decode=1) as h:
        scraped = (await h.get("/metrics")).body.decode()
        for name in (
            "twinpool_requests_total",
            "twinpool_ttft_seconds",
            "twinpool_ttft_part_seconds",
            "twinpool_itl_seconds",
            "twinpool_e2e_seconds",
            "twinpool_handoff_bytes_total",
            "twinpool_handoff_seconds",
            "twinpool_kv_handles",
            "twinpool_pool_workers",
            "twinpool_pool_queue_tokens",
            "twinpool_role_changes_total",
            "twinpool_decisions_total",
        ):
            assert f"# TYPE {name.removesuffix('_total')}" in scraped, name
        assert await h.metric("twinpool_pool_workers", role="prefill") == 1


async def test_the_error_of_guessed_prompt_lengths_is_told() -> None:
    async with house(prefill=1, decode=1) as h:
        assert await h.metric("twinpool_prompt_length_error_ratio") == 0
        await h.chat(" ".join("n" * 300))
        assert 0 < await h.metric("twinpool_prompt_length_error_ratio") <= 0.05
        assert h.controller.prompt_length_error() > 0


def test_the_errors_of_what_was_predicted_are_told_by_kind_of_worker() -> None:
    """Prompts of 1,000 tokens take twice as long as the profile says."""
    prior = CostPrior(
        read_s=0.0,
        read_token_s=4e-5,
        read_pair_s=0.0,
        step_s=0.01,
        step_sequence_s=0.0,
        step_kv_token_s=0.0,
        mixed_s=0.0,
        mixed_token_s=4e-5,
    )
    controller = build_controller(Routing(), law=Law(priors={"": prior}))
    page = Metrics(controller, Objectives())
    stage = Stage()
    stage.controller = controller
    for name in ("p1", "d1"):
        stage.joins(worker(name))
    assert b"twinpool_cost_error_ratio{" not in page.render()
    for n in range(NEWBORN_LEGS + 1):
        stage.arrives(f"r{n}", prompt(1000))
        stage.at += 0.08
        stage.prefilled(f"r{n}", tokens=1000)
        stage.at += 0.1
        stage.finishes(f"r{n}")
    told = [line for line in page.render().decode().splitlines() if line.startswith("twinpool_cost_error_ratio{")]
    assert len(told) == 1
    assert 'predicted="reading"' in told[0]
    assert f'kind="{stage.worker("p1").kind}"' in told[0]
    assert float(told[0].split()[-1]) == pytest.approx(0.05 * 0.5, abs=1e-4)


async def test_gauges_show_what_is_under_way() -> None:
    async with house(prefill=Script(steps=asyncio.Semaphore(0)), decode=Script(slots=1)) as h:
        asking = [asyncio.create_task(h.chat(f"n{n}")) for n in range(2)]
        await until(lambda: h.p.running == 1 and h.controller.waiting_requests() == 1)
        assert await h.metric("twinpool_requests_live") == 2
        assert await h.metric("twinpool_requests_waiting") == 1
        assert await h.metric("twinpool_pool_queue_tokens", role="prefill") > 0
        for _ in range(2):
            h.p.script.steps.release()
        await asyncio.gather(*asking)
        assert await h.metric("twinpool_requests_live") == 0
        assert await h.metric("twinpool_pool_queue_tokens", role="prefill") == 0
