"""Reads an engine's `/metrics`: what it counts, under whatever name its kind counts it.

A page of vLLM has a thousand lines and is read several times a second, so it is scanned for the few series that matter and not
parsed. Nothing is expected of it: a series that is missing is None, one that is NaN is missing, the order of labels and a
timestamp behind the value are nobody's business. Series of several engines behind one address (data parallel) are added up.
"""

import asyncio
import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import aiohttp
import msgspec

from twinpool.engines.asking import MAX_PAGE_BYTES, ProbeError, fetch

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class EngineMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One scrape. Counters are totals since the engine's start, None where it does not count that.

    `expired_handles` and `late_notifications` are the prefill side's: leases that ran out, and reads that came after. Bytes,
    seconds and `handoffs` are the reading side's. `incarnation` is "" where the page does not tell one life of the engine from
    another. `connector` is what the series show to be configured. KV is
    moved in whole blocks of `block_tokens`; `kv_token_bytes` is the size of one token's on one device of the engine, within a
    thousandth.
    """

    incarnation: str = ""
    connector: str | None = None
    expired_handles: int | None = None
    late_notifications: int | None = None
    failed_transfers: int | None = None
    handoff_bytes: int | None = None
    handoff_seconds: float | None = None
    handoffs: int | None = None
    running: int | None = None
    waiting: int | None = None
    kv_usage_ratio: float | None = None
    prompt_tokens: int | None = None
    computed_prompt_tokens: int | None = None
    cached_prompt_tokens: int | None = None
    handed_over_prompt_tokens: int | None = None
    generated_tokens: int | None = None
    block_tokens: int | None = None
    kv_capacity_tokens: int | None = None
    cache_dtype: str | None = None
    kv_layout: str | None = None
    kv_token_bytes: int | None = None
    is_vllm: bool = False


_TOTALS: dict[bytes, str] = {
    b"vllm:nixl_num_kv_expired_reqs": "expired_handles",
    b"vllm:nixl_num_notifications_after_expiry": "late_notifications",
    b"vllm:nixl_num_failed_transfers": "failed_transfers",
    b"vllm:nixl_bytes_transferred_sum": "handoff_bytes",
    b"vllm:nixl_bytes_transferred_count": "handoffs",
    b"vllm:nixl_xfer_time_seconds_sum": "handoff_seconds",
    b"vllm:num_requests_running": "running",
    b"vllm:num_requests_waiting": "waiting",
    b"vllm:kv_cache_usage_perc": "kv_usage_ratio",
    b"vllm:prompt_tokens": "prompt_tokens",
    b"vllm:generation_tokens": "generated_tokens",
    b"sglang:num_running_reqs": "running",
    b"sglang:num_queue_reqs": "waiting",
    b"sglang:token_usage": "kv_usage_ratio",
    b"sglang:prompt_tokens": "prompt_tokens",
    b"sglang:cached_tokens": "cached_prompt_tokens",
    b"sglang:generation_tokens": "generated_tokens",
    b"llamacpp:requests_processing": "running",
    b"llamacpp:requests_deferred": "waiting",
    b"llamacpp:kv_cache_usage_ratio": "kv_usage_ratio",
    b"llamacpp:prompt_tokens": "computed_prompt_tokens",
    b"llamacpp:tokens_predicted": "generated_tokens",
    b"twinpool_worker_requests_running": "running",
    b"twinpool_worker_requests_waiting": "waiting",
    b"twinpool_worker_prompt_tokens_computed": "computed_prompt_tokens",
    b"twinpool_worker_prompt_tokens_cached": "cached_prompt_tokens",
    b"twinpool_worker_prompt_tokens_handed_over": "handed_over_prompt_tokens",
    b"twinpool_worker_generation_tokens": "generated_tokens",
    b"twinpool_worker_handoff_seconds_sum": "handoff_seconds",
    b"twinpool_worker_handoff_seconds_count": "handoffs",
}
"""Series, without the `_total` of counters, and the field each adds to."""

_BY_LABEL: dict[bytes, dict[bytes, str]] = {
    b"vllm:prompt_tokens_by_source": {
        b'source="local_compute"': "computed_prompt_tokens",
        b'source="local_cache_hit"': "cached_prompt_tokens",
        b'source="external_kv_transfer"': "handed_over_prompt_tokens",
    },
    b"twinpool_worker_handoff_bytes": {b'direction="in"': "handoff_bytes"},
}

_RATIOS = frozenset({"kv_usage_ratio"})  # the fullest of several engines
_SECONDS = frozenset({"handoff_seconds"})
_CACHE = b"vllm:cache_config_info"
_START = b"process_start_time_seconds"
_COMMENT = ord("#")

_LINE = re.compile(rb'[\w:]+(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?[ \t]+(\S+)')
_LABEL = re.compile(rb'(\w+)="((?:[^"\\]|\\.)*)"')


async def scrape(
    session: aiohttp.ClientSession, url: str, timeout_s: float, headers: Mapping[str, str] = NO_HEADERS
) -> EngineMetrics:
    """The engine's counts now; raises `ProbeError` where it has no such page or does not answer in time."""
    try:
        async with asyncio.timeout(timeout_s):
            page = await fetch(session, f"{url}/metrics", headers)
    except TimeoutError:
        raise ProbeError(f"no /metrics within {timeout_s:g} s") from None
    if page is None:
        raise ProbeError("it has no /metrics")
    return read_metrics(page)


def read_metrics(page: bytes) -> EngineMetrics:
    """Never raises: what cannot be read is not there. Beyond `MAX_PAGE_BYTES` nothing is looked at."""
    found: dict[str, float] = {}
    births: list[bytes] = []
    cache: dict[str, Any] = {}
    started: float | None = None
    has_nixl = has_lmcache = is_vllm = False
    for line in page[:MAX_PAGE_BYTES].split(b"\n"):
        if not line or line[0] == _COMMENT or b"_bucket{" in line:  # four lines of five
            continue
        name = line.partition(b" ")[0].partition(b"{")[0]
        if name.startswith(b"vllm:"):
            is_vllm = True
            has_nixl = has_nixl or name.startswith(b"vllm:nixl_")
            if name.endswith(b"_created"):
                births.append(line)
                continue
            if name == _CACHE:
                _add_cache(cache, line)
                continue
        elif name.startswith(b"lmcache:"):
            has_lmcache = True
            continue
        elif name == _START:
            started = next(iter(_values(line)), None)
            continue
        series = name.removesuffix(b"_total")
        field = _TOTALS.get(series) or _labelled(series, line)
        if field is not None:
            for value in _values(line):
                found[field] = max(found.get(field, 0.0), value) if field in _RATIOS else found.get(field, 0.0) + value
    born = started if started is not None else min((value for line in births for value in _values(line)), default=None)
    counted: dict[str, Any] = {
        field: value if field in _RATIOS or field in _SECONDS else int(value) for field, value in found.items()
    }
    return EngineMetrics(
        incarnation="" if born is None else f"{born:.2f}",
        connector="nixl" if has_nixl else "lmcache" if has_lmcache else "none" if is_vllm else None,
        is_vllm=is_vllm,
        **counted,
        **cache,
    )


def _labelled(series: bytes, line: bytes) -> str | None:
    labels = _BY_LABEL.get(series)
    if labels is None:
        return None
    return next((field for label, field in labels.items() if label in line), None)


def _values(line: bytes) -> list[float]:
    """The line's value, if it is a number that counts something."""
    match = _LINE.match(line)
    if match is None:
        return []
    try:
        value = float(match[2])
    except ValueError:
        return []
    return [value] if math.isfinite(value) and value >= 0 else []


def _add_cache(cache: dict[str, Any], line: bytes) -> None:
    """vLLM's description of its KV cache: labels of a series whose value says nothing."""
    match = _LINE.match(line)
    labels = {name: value.decode("utf-8", "replace") for name, value in _LABEL.findall(match[1] or b"" if match else b"")}
    block, blocks = _count(labels.get(b"block_size")), _count(labels.get(b"num_gpu_blocks"))
    tokens = _count(labels.get(b"kv_cache_size_tokens")) or (block * blocks if block and blocks else None)
    size = _count(labels.get(b"kv_cache_memory_bytes"))
    if block:
        cache["block_tokens"] = block
    if size and tokens:
        cache["kv_token_bytes"] = size // tokens
    if tokens:
        cache["kv_capacity_tokens"] = cache.get("kv_capacity_tokens", 0) + tokens
    for field, label in ((b"cache_dtype", "cache_dtype"), (b"kv_cache_layout", "kv_layout")):
        if labels.get(field, "None") != "None":
            cache[label] = labels[field]


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) < 16 else None
