"""What an engine says of itself, as each kind says it."""

from typing import Any

from twinpool.engines.scripted.script import Script

_OWNERS = {"vllm": "vllm", "sglang": "sglang", "llama.cpp": "llamacpp", "openai": "somebody"}


def models(script: Script) -> dict[str, Any]:
    """`/v1/models`; only vLLM tells the length of a context and the parents of adapters."""
    common = {"object": "model", "created": 1_700_000_000, "owned_by": _OWNERS[script.kind]}
    vllms: dict[str, Any] = {"max_model_len": script.max_model_tokens} if script.kind == "vllm" else {}
    data = [{"id": model, **common, **vllms, "parent": None} for model in script.models]
    data += [{"id": lora, **common, **vllms, "parent": parent} for lora, parent in script.loras.items()]
    return {"object": "list", "data": data}


def identity(script: Script, engine_id: str) -> dict[str, Any]:
    """The embedded worker's."""
    return {
        "kind": "twinpool-worker",
        "engine": "scripted",
        "engine_version": "1",
        "incarnation": engine_id,
        "model": script.models[0],
        "context_tokens": script.max_model_tokens,
        "slots": script.slots,
        "lease_s": script.lease_s * script.time_scale,
    }


def server_info(script: Script) -> dict[str, Any]:
    """SGLang's."""
    return {
        "version": script.version,
        "tp_size": 1,
        "disaggregation_mode": script.disaggregation_mode,
        "dtype": "auto",
        "kv_cache_dtype": script.cache_dtype,
        "page_size": 1,
        "context_length": script.max_model_tokens,
        "chunked_prefill_size": 8192,
        "max_running_requests": script.slots,
        "max_total_num_tokens": 16_384,
    }


def props(script: Script) -> dict[str, Any]:
    """llama.cpp's."""
    return {
        "default_generation_settings": {"n_ctx": script.max_model_tokens},
        "total_slots": script.slots,
        "build_info": script.version,
    }
