"""What is read from an engine's metrics: the few series that matter, whatever stands around them."""

from pathlib import Path

import aiohttp
import pytest

from twinpool.engines.asking import MAX_PAGE_BYTES, ProbeError, Trouble
from twinpool.engines.metrics import EngineMetrics, read_metrics, scrape
from twinpool.engines.scripted import Script, ScriptedEngine

VLLM = b"""\
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.79614356724e+09
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prompt_tokens_total{engine="0",model_name="m"} 1000.0
vllm:prompt_tokens_created{engine="0",model_name="m"} 1.796143580e+09
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 700.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 100.0
vllm:prompt_tokens_by_source_total{source="external_kv_transfer",model_name="m",engine="0"} 200.0
vllm:generation_tokens_total{engine="0",model_name="m"} 55.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="5461"} 1.0
vllm:nixl_bytes_transferred_bucket{engine="0",le="+Inf",model_name="m"} 3.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} 4.6e+06
vllm:nixl_bytes_transferred_count{engine="0",model_name="m"} 3.0
vllm:nixl_xfer_time_seconds_sum{engine="0",model_name="m"} 0.125
vllm:nixl_num_failed_transfers_total{engine="0",model_name="m"} 0.0
vllm:nixl_num_kv_expired_reqs_total{engine="0",model_name="m"} 1.0
vllm:nixl_num_notifications_after_expiry_total{engine="0",model_name="m"} 1.0
"""


def test_a_page_of_vllm() -> None:
    assert read_metrics(VLLM) == EngineMetrics(
        incarnation="1796143567.24",
        connector="nixl",
        is_vllm=True,
        expired_handles=1,
        late_notifications=1,
        failed_transfers=0,
        handoff_bytes=4_600_000,
        handoff_seconds=0.125,
        handoffs=3,
        running=2,
        waiting=1,
        kv_usage_ratio=0.25,
        prompt_tokens=1000,
        computed_prompt_tokens=700,
        cached_prompt_tokens=100,
        handed_over_prompt_tokens=200,
        generated_tokens=55,
        block_tokens=16,
        kv_capacity_tokens=16 * 5461,
        cache_dtype="auto",
    )


def test_what_is_not_there_is_none_and_not_zero() -> None:
    assert read_metrics(b"") == EngineMetrics()
    found = read_metrics(b"vllm:num_requests_running 0.0\n")
    assert found == EngineMetrics(is_vllm=True, connector="none", running=0)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "x", ""])
def test_a_value_that_counts_nothing_is_not_there(value: str) -> None:
    assert read_metrics(f"vllm:num_requests_running {value}\n".encode()).running is None


def test_a_sum_that_is_no_number_is_not_there() -> None:
    page = b'vllm:prompt_tokens_total{engine="0"} 1e308\nvllm:prompt_tokens_total{engine="1"} 1e308\n'
    assert read_metrics(page).prompt_tokens is None


def test_the_order_of_labels_strange_labels_and_a_timestamp_change_nothing() -> None:
    page = rb"""
vllm:prompt_tokens_by_source_total{model_name="a } b\" {,=\\",source="local_compute",} 7 1700000000000
vllm:num_requests_waiting{a="b c"}	3.0
vllm:num_requests_running   4
"""
    found = read_metrics(page)
    assert (found.computed_prompt_tokens, found.waiting, found.running) == (7, 3, 4)


def test_engines_behind_one_address_are_added_up_and_the_fullest_cache_counts() -> None:
    page = b"".join(
        b'vllm:num_requests_running{engine="%d"} 2\nvllm:kv_cache_usage_perc{engine="%d"} 0.%d\n'
        b'vllm:cache_config_info{engine="%d",block_size="16",num_gpu_blocks="100"} 1\n' % (n, n, n + 1, n)
        for n in range(3)
    )
    found = read_metrics(page)
    assert (found.running, found.kv_usage_ratio, found.kv_capacity_tokens) == (6, 0.3, 4800)


@pytest.mark.parametrize("blocks", ["None", "", "-1", "1e3", "9" * 20])
def test_a_capacity_that_is_no_number_is_unknown(blocks: str) -> None:
    found = read_metrics(f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{blocks}"}} 1\n'.encode())
    assert (found.block_tokens, found.kv_capacity_tokens) == (16, None)


def test_where_no_start_is_told_the_first_counter_that_was_made_tells_it() -> None:
    page = b'vllm:b_created{x="1"} 1700000009.5\nvllm:a_created{x="1"} 1700000001.25\nhttp_requests_created 3\n'
    assert read_metrics(page).incarnation == "1700000001.25"
    assert read_metrics(b"vllm:num_requests_running 1\n").incarnation == ""


def test_lmcache_shows_by_its_own_series() -> None:
    assert read_metrics(b"vllm:num_requests_running 1\nlmcache:num_hit_tokens 1\n").connector == "lmcache"


def test_other_kinds_count_under_other_names() -> None:
    sglang = read_metrics(b'sglang:num_running_reqs{a="b"} 3\nsglang:num_queue_reqs 1\nsglang:token_usage 0.5\n')
    assert (sglang.running, sglang.waiting, sglang.kv_usage_ratio, sglang.is_vllm) == (3, 1, 0.5, False)
    llama = read_metrics(b"llamacpp:requests_processing 2\nllamacpp:prompt_tokens_total 99\n")
    assert (llama.running, llama.computed_prompt_tokens) == (2, 99)
    own = read_metrics(b"twinpool_worker_handoff_seconds_count 4.0\ntwinpool_worker_prompt_tokens_handed_over_total 8.0\n")
    assert (own.handoffs, own.handed_over_prompt_tokens) == (4, 8)


@pytest.mark.parametrize("page", [b"\xff\xfe\x00" * 1000, b"{" * 100_000, b'vllm:x{a="' + b"\\" * 100_000, b"\n" * 100_000])
def test_rubbish_is_not_there_either(page: bytes) -> None:
    assert read_metrics(page).running is None


async def test_a_scrape_of_an_engine_that_plays_vllm() -> None:
    async with ScriptedEngine() as engine, aiohttp.ClientSession() as session:
        found = await scrape(session, engine.url, 5)
        assert (found.connector, found.expired_handles, found.handoff_bytes) == ("nixl", 0, 0)
        again = await scrape(session, engine.url, 5)
        assert again.incarnation == found.incarnation != ""
        await engine.restart()
        assert (await scrape(session, engine.url, 5)).incarnation not in (found.incarnation, "")


async def test_an_engine_without_metrics_is_said_to_have_none() -> None:
    async with ScriptedEngine(Script(kind="openai")) as engine, aiohttp.ClientSession() as session:
        with pytest.raises(ProbeError, match="no /metrics"):
            await scrape(session, engine.url, 5)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(ProbeError) as gone:
            await scrape(session, engine.url, 5)
    assert gone.value.trouble is Trouble.UNREACHABLE


async def test_no_page_fills_the_memory(http_page) -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(ProbeError, match="more than 8 MB"):
            await scrape(session, await http_page(200, b"#" * (MAX_PAGE_BYTES + 1)), 5)


async def test_a_redirection_is_not_followed(http_page) -> None:
    """The engine's key would go wherever it points."""
    async with ScriptedEngine() as other, aiohttp.ClientSession() as session:
        url = await http_page(307, b"", location=f"{other.url}/metrics")
        with pytest.raises(ProbeError, match="answered 307"):
            await scrape(session, url, 5, {"authorization": "Bearer W"})
        assert not other.pages


def test_a_real_page() -> None:
    """As vLLM 0.32 writes it, idle, with the NIXL connector."""
    found = read_metrics((Path(__file__).parent / "vllm-0.32-metrics.txt").read_bytes())
    assert found == EngineMetrics(
        incarnation="1796097624.14",
        connector="nixl",
        is_vllm=True,
        expired_handles=0,
        late_notifications=0,
        failed_transfers=0,
        handoff_bytes=0,
        handoff_seconds=0.0,
        handoffs=0,
        running=0,
        waiting=0,
        kv_usage_ratio=0.0,
        prompt_tokens=0,
        computed_prompt_tokens=0,
        cached_prompt_tokens=0,
        handed_over_prompt_tokens=0,
        generated_tokens=0,
        block_tokens=128,
        kv_capacity_tokens=93_184,
        cache_dtype="auto",
        kv_token_bytes=23_045,
    )
