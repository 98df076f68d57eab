"""The indicators of the service, in its metrics and its state."""

import asyncio

import pytest
from tests.gateway.house import house

from twinpool.engines.scripted import Default, Script


async def test_a_worker_is_busy_while_it_has_a_leg() -> None:
    async with house(prefill=1, decode=Script(token_interval_s=0.05)) as h:
        h.p.script.replies.append(Default(delay_s=0.3))
        began = asyncio.get_running_loop().time()
        assert (await h.chat(stream=True, max_tokens=4)).status == 200
        took_s = asyncio.get_running_loop().time() - began
        prefill = await h.metric("twinpool_worker_busy_seconds_total", role="prefill")
        decode = await h.metric("twinpool_worker_busy_seconds_total", role="decode")
        assert 0.3 <= prefill <= took_s - decode + 0.05
        assert 0.2 <= decode <= took_s - 0.3 + 0.05
        await asyncio.sleep(0)
        again = await h.metric("twinpool_worker_busy_seconds_total", role="prefill")
        assert again == prefill  # it has nothing to do, and is told so


async def test_long_requests_make_the_first_indicator_and_what_is_not_seen_has_no_sample() -> None:
    async with house(prefill=1, decode=1) as h:
        text = (await h.get("/metrics")).body.decode()
        assert "twinpool_indicator_ttft_long_seconds" in text
        assert "\ntwinpool_indicator_ttft_long_seconds " not in text
        assert await h.metric("twinpool_indicator_verdict", verdict="unknown") == 1
        h.p.script.replies.append(Default(delay_s=0.2))
        await h.chat("a " * 1600, stream=True)
        await h.chat("short", stream=True)
        ttft = await h.metric("twinpool_indicator_ttft_long_seconds")
        assert ttft == pytest.approx(await h.metric("twinpool_ttft_seconds_sum", length_class="long"))
        assert ttft >= 0.2


async def test_the_ttft_of_the_last_minutes_is_told_by_length_class() -> None:
    async with house(prefill=1, decode=1) as h:
        none = {"requests": 0, "mean_s": None}
        assert (await h.get(f"{h.admin_url}/admin/state")).json()["ttft_lately"] == {"short": none, "long": none}
        for _ in range(2):
            await h.chat("short", stream=True)
        lately = (await h.get(f"{h.admin_url}/admin/state")).json()["ttft_lately"]
        ttft_s = await h.metric("twinpool_ttft_seconds_sum", length_class="short")
        assert lately == {"short": {"requests": 2, "mean_s": pytest.approx(ttft_s / 2)}, "long": none}
