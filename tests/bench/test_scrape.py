"""How busy workers are, out of others' metrics. The pages are excerpts as these programs write them."""

import pytest

from twinpool.bench.scrape import Page, busy_between, read_page

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 0.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
"""
SGLANG = """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m"} 1.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="m"} 4.0
"""
DCGM = """# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",device="nvidia0",modelName="NVIDIA H100"} 97
DCGM_FI_DEV_GPU_UTIL{gpu="1",UUID="GPU-b",device="nvidia1",modelName="NVIDIA H100"} 41
# TYPE DCGM_FI_PROF_GR_ENGINE_ACTIVE gauge
DCGM_FI_PROF_GR_ENGINE_ACTIVE{gpu="0",UUID="GPU-a",device="nvidia0",modelName="NVIDIA H100"} 0.91
DCGM_FI_PROF_GR_ENGINE_ACTIVE{gpu="1",UUID="GPU-b",device="nvidia1",modelName="NVIDIA H100"} 0.35
"""
GATEWAY = """# TYPE twinpool_worker_busy_seconds_total counter
twinpool_worker_busy_seconds_total{role="prefill",worker="prefill-0"} 10.0
twinpool_worker_busy_seconds_total{role="decode",worker="decode-0"} 20.0
# TYPE twinpool_pool_workers gauge
twinpool_pool_workers{role="prefill"} 1.0
twinpool_pool_workers{role="decode"} 1.0
twinpool_pool_workers{role="colocated"} 0.0
# TYPE twinpool_requests_live gauge
twinpool_requests_live 7.0
"""


@pytest.mark.parametrize(
    ("text", "source", "ratios", "requests"),
    [
        (VLLM, "vLLM", [1.0, 0.0], 5.0),
        (SGLANG, "SGLang", [1.0], 5.0),
        (DCGM, "DCGM exporter", [0.91, 0.35], None),
        (DCGM.partition("# TYPE DCGM_FI_PROF")[0], "DCGM exporter", [0.97, 0.41], None),
        ("# TYPE up gauge\nup 1\n", None, [], None),
    ],
)
def test_each_page_tells_in_its_own_way(text: str, source: str | None, ratios: list[float], requests: float | None) -> None:
    page = read_page(text)
    assert (page.source, list(page.busy_ratios.values()), page.requests) == (source, ratios, requests)


def test_twinpool_tells_seconds_and_whether_the_pools_are_apart() -> None:
    page = read_page(GATEWAY)
    assert (page.source, sorted(page.busy_s.values()), page.requests, page.is_disaggregated) == ("Twinpool", [10, 20], 7, True)
    assert read_page(GATEWAY.replace('"decode"} 1.0', '"decode"} 0.0')).is_disaggregated is False
    assert read_page(VLLM).is_disaggregated is None


def test_a_worker_that_changes_its_role_is_the_same_worker() -> None:
    later = GATEWAY.replace('role="prefill",worker="prefill-0"} 10.0', 'role="decode",worker="prefill-0"} 15.0')
    assert busy_between([read_page(GATEWAY)], [read_page(later)], 10.0) == pytest.approx(0.25)


def _page(**busy_s: float) -> Page:
    return Page(busy_s, {}, None, "Twinpool")


@pytest.mark.parametrize(
    ("before", "after", "ratio"),
    [
        ({"a": 0.0, "b": 5.0}, {"a": 10.0, "b": 5.0}, 0.5),
        ({"a": 90.0}, {"a": 4.0}, 0.4),  # it began anew
        ({"a": 0.0}, {"a": 11.0}, 1.0),  # clocks differ a little
        ({"a": 0.0}, {"a": 5.0, "b": 9.0}, 0.5),  # b has just come
        ({"a": 0.0}, {"b": 1.0}, None),
    ],
)
def test_seconds_between_two_looks(before: dict[str, float], after: dict[str, float], ratio: float | None) -> None:
    assert busy_between([_page(**before)], [_page(**after)], 10.0) == ratio


def test_what_is_no_page_of_metrics_is_an_error() -> None:
    with pytest.raises(ValueError, match=r".+"):
        read_page('{"object": "list", "data": []}')
