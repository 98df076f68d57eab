"""How busy a service's workers are, out of the metrics pages there are: pure, a page's text in, figures out.

| page | what tells | kind |
|---|---|---|
| Twinpool gateway | `twinpool_worker_busy_seconds_total{worker}` | seconds |
| Twinpool worker | `twinpool_worker_busy_seconds_total` | seconds |
| DCGM exporter | `DCGM_FI_PROF_GR_ENGINE_ACTIVE` (of 1), `DCGM_FI_DEV_GPU_UTIL` (of 100) | share now |
| vLLM | `vllm:num_requests_running` | whether anything runs now |
| SGLang | `sglang:num_running_reqs` | whether anything runs now |

vLLM and SGLang do not say how much of the time they compute: an engine that has a request running computes, so the share of
moments with one stands for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_BUSY_SECONDS = "twinpool_worker_busy_seconds_total"
_SHARES = (("DCGM_FI_PROF_GR_ENGINE_ACTIVE", 1.0), ("DCGM_FI_DEV_GPU_UTIL", 100.0))
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_LOAD = (
    "twinpool_requests_live",
    "twinpool_worker_requests_running",
    "twinpool_worker_requests_waiting",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
)


@dataclass(frozen=True, slots=True)
class Page:
    """What one look at one page told. `busy_s` are running totals and `busy_ratios` the moment's shares, by worker."""

    busy_s: Mapping[str, float]
    busy_ratios: Mapping[str, float]
    requests: float | None
    """Running and waiting."""
    source: str | None
    """Which kind of page it is; None for one that tells nothing of use."""
    is_disaggregated: bool | None = None
    """Whether prefill and decode have workers of their own; None where the page does not say."""


def read_page(text: str) -> Page:
    """ValueError for what is no metrics page."""
    busy_s: dict[str, float] = {}
    shares: dict[str, dict[str, float]] = {}
    running: dict[str, float] = {}
    load: float | None = None
    roles: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name, labels = sample.name, sample.labels
            worker = ",".join(f"{key}={value}" for key, value in sorted(labels.items()) if key not in ("role", "modelName"))
            if name == _BUSY_SECONDS:
                busy_s[worker] = busy_s.get(worker, 0.0) + sample.value
            elif name in _RUNNING:
                running[worker] = sample.value
            elif name == "twinpool_pool_workers":
                roles[labels.get("role", "")] = sample.value
            for known, whole in _SHARES:
                if name == known:
                    shares.setdefault(known, {})[worker] = sample.value / whole
            if name in _LOAD:
                load = (load or 0.0) + sample.value
    apart = (roles.get("prefill", 0) > 0 and roles.get("decode", 0) > 0) if roles else None
    if busy_s:
        return Page(busy_s, {}, load, "Twinpool", apart)
    for known, _ in _SHARES:
        if known in shares:
            return Page({}, shares[known], load, "DCGM exporter", apart)
    if running:
        kind = "vLLM" if "vllm:" in text else "SGLang"
        return Page({}, {worker: float(count > 0) for worker, count in running.items()}, load, kind, apart)
    return Page({}, {}, load, None, apart)


def busy_between(before: Sequence[Page], after: Sequence[Page], seconds: float) -> float | None:
    """The mean share of `seconds` that the workers with running totals were busy; None where there are none. A worker that
    began anew counts from nought, one that came or went does not count."""
    ratios = []
    for was, now in zip(before, after, strict=True):
        for worker, busy_s in now.busy_s.items():
            if worker in was.busy_s:
                earlier_s = was.busy_s[worker]
                ratios.append(min(1.0, (busy_s - earlier_s if busy_s >= earlier_s else busy_s) / seconds))
    return sum(ratios) / len(ratios) if ratios else None
