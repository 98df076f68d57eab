"""vLLM: known by `/version` together with the owner of its models or its metrics.

It tells neither its connector nor its role, lease or budget. Its metrics show two of these things: series of NIXL are there
from the start where that connector is, and `process_start_time_seconds` (or the moment at which the counters were made) is
another one after a restart.
"""

import msgspec

from twinpool.engines.identity import Ask, Identity, Kind, ask_models, names, read
from twinpool.engines.metrics import EngineMetrics, read_metrics


class _Version(msgspec.Struct):
    version: str


async def ask_vllm(ask: Ask) -> Identity | None:
    """None where it is another engine."""
    said = read(await ask("/version"), _Version)
    if said is None:
        return None
    models = await ask_models(ask)
    page = await ask("/metrics")
    counted = EngineMetrics() if page is None else read_metrics(page)
    if not counted.is_vllm and not any(model.owned_by == "vllm" for model in models):
        return None
    return Identity(
        kind=Kind.VLLM,
        version=said.version,
        incarnation=counted.incarnation,
        has_metrics=counted.is_vllm,
        connector=counted.connector,
        block_tokens=counted.block_tokens,
        cache_dtype=counted.cache_dtype,
        kv_layout=counted.kv_layout,
        kv_token_bytes=counted.kv_token_bytes,
        kv_capacity_tokens=counted.kv_capacity_tokens,
        metrics=counted,
        **names(models),
    )
