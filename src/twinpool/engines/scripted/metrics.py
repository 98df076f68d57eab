"""Prometheus text, under vLLM's names."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinpool.engines.scripted.engine import ScriptedEngine

_KV_BLOCKS = 1024


def render(engine: "ScriptedEngine") -> bytes:
    """The true values, with the script's in their place."""
    script = engine.script
    stamp = "" if script.metrics_timestamp_ms is None else f" {script.metrics_timestamp_ms}"
    lines = []
    for name, value in (_true_values(engine) | script.metrics).items():
        if value is not None:
            kind = "counter" if name.endswith(("_total", "_sum", "_count")) else "gauge"
            lines.append(f"# TYPE {name} {kind}")
            lines.append(f'{name}{{model_name="{script.models[0]}",engine="0"}} {value}{stamp}')
    return "\n".join(lines).encode() + b"\n"


def _true_values(engine: "ScriptedEngine") -> dict[str, float | None]:
    ledger = engine.ledger
    ledger.expire()
    report = ledger.report()
    return {
        "vllm:num_requests_running": engine.running,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": min(1.0, (ledger.held_blocks + engine.running) / _KV_BLOCKS),
        "vllm:prompt_tokens_total": engine.prompt_tokens,
        "vllm:generation_tokens_total": engine.generated_tokens,
        "vllm:nixl_bytes_transferred_sum": engine.pulled_tokens * engine.script.bytes_per_token,
        "vllm:nixl_num_failed_transfers_total": engine.failed_transfers,
        "vllm:nixl_num_kv_expired_reqs_total": report["expired"],
        "vllm:nixl_num_notifications_after_expiry_total": ledger.pulls_after_expiry,
    }
