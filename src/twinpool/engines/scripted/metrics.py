"""Prometheus text, under vLLM's names."""

from typing import TYPE_CHECKING

from twinpool.engines.scripted.ledger import BLOCK_TOKENS

if TYPE_CHECKING:
    from twinpool.engines.scripted.engine import ScriptedEngine

_KV_BLOCKS = 1024
_FIRST_START_S = 1_700_000_000.0  # of the first incarnation, as its clock would have it

_PROCESS = "process_start_time_seconds"
_CACHE = "vllm:cache_config_info"


def render(engine: "ScriptedEngine") -> bytes:
    """The true values, with the script's in their place. Two incarnations never have the same start."""
    script = engine.script
    stamp = "" if script.metrics_timestamp_ms is None else f" {script.metrics_timestamp_ms}"
    common = f'model_name="{script.models[0]}",engine="0"'
    lines = []
    for series, value in (true_values(engine) | script.metrics).items():
        if value is not None:
            name, _, label = series.partition("|")
            kind = "counter" if name.endswith(("_total", "_sum", "_count")) else "gauge"
            labels = "" if name == _PROCESS else f"{{{common}{',' + label if label else ''}}}"
            lines.append(f"# TYPE {name} {kind}")
            lines.append(f"{name}{labels} {value}{stamp}")
    return "\n".join(lines).encode() + b"\n"


def true_values(engine: "ScriptedEngine") -> dict[str, float | None]:
    """By series: a name and, behind a bar, its own label."""
    ledger = engine.ledger
    ledger.expire()
    if ledger.held or engine.running:
        engine.notice_late_reads()
    report = ledger.report()
    computed = engine.computed_prompt_tokens - engine.pulls  # vLLM counts a prompt that was handed over as handed over, whole
    pulled = engine.pulled_tokens
    cached = max(engine.prompt_tokens - computed - pulled, 0)
    size = _KV_BLOCKS * BLOCK_TOKENS * engine.script.bytes_per_token
    cache = f'block_size="{BLOCK_TOKENS}",num_gpu_blocks="{_KV_BLOCKS}",kv_cache_memory_bytes="{size}"'
    cache += f',cache_dtype="{engine.script.cache_dtype}"'
    values: dict[str, float | None] = {
        _PROCESS: _FIRST_START_S + engine.started_s,
        "vllm:num_requests_running": engine.running,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": min(1.0, (ledger.held_blocks + engine.running) / _KV_BLOCKS),
        f"{_CACHE}|{cache}": 1.0,
        "vllm:prompt_tokens_total": engine.prompt_tokens,
        'vllm:prompt_tokens_by_source_total|source="local_compute"': computed,
        'vllm:prompt_tokens_by_source_total|source="local_cache_hit"': cached,
        'vllm:prompt_tokens_by_source_total|source="external_kv_transfer"': pulled,
        "vllm:generation_tokens_total": engine.generated_tokens,
    }
    if engine.script.connector == "nixl":
        values |= {
            "vllm:nixl_bytes_transferred_sum": engine.pulled_bytes,
            "vllm:nixl_bytes_transferred_count": engine.pulls,
            "vllm:nixl_xfer_time_seconds_sum": engine.pulled_s,
            "vllm:nixl_xfer_time_seconds_count": engine.pulls,
            "vllm:nixl_num_failed_transfers_total": engine.failed_transfers,
            "vllm:nixl_num_kv_expired_reqs_total": report["expired"],
            "vllm:nixl_num_notifications_after_expiry_total": engine.noticed_late_reads,
        }
    return values
