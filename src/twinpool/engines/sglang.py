"""SGLang: known by `/server_info` (older: `/get_server_info`), which has its arguments.

Its prefill and decode servers find each other by a bootstrap room, both legs at once; that dialect is not spoken here, so only
a server in neither mode can serve, and alone. Source: sglang's http_server and server_args, 0.5.
"""

import msgspec

from twinpool.engines.identity import Ask, Identity, Kind, ask_models, names, read


class _Arguments(msgspec.Struct):
    tp_size: int
    disaggregation_mode: str | None = None
    version: str | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    page_size: int | None = None
    context_length: int | None = None
    chunked_prefill_size: int | None = None
    max_running_requests: int | None = None
    max_total_num_tokens: int | None = None


class _Nested(msgspec.Struct):
    server_args: _Arguments
    version: str | None = None


async def ask_sglang(ask: Ask) -> Identity | None:
    """None where it is another engine."""
    page = await ask("/server_info") or await ask("/get_server_info")
    nested = read(page, _Nested)
    said = nested.server_args if nested is not None else read(page, _Arguments)
    if said is None:
        return None
    models = await ask_models(ask)
    mode = said.disaggregation_mode or "null"
    is_alone = mode == "null"
    known = names(models)
    return Identity(
        kind=Kind.SGLANG,
        version=said.version or (nested.version if nested is not None else None),
        obstacle="SGLang's handoff is not spoken" + ("" if is_alone else f": it was launched as a {mode} server"),
        serves_whole=is_alone,
        connector=None if is_alone else "bootstrap",
        slots=said.max_running_requests,
        dtype=said.dtype,
        cache_dtype=said.kv_cache_dtype,
        block_tokens=said.page_size,
        budget_tokens=said.chunked_prefill_size if (said.chunked_prefill_size or 0) > 0 else None,  # -1: no limit
        kv_capacity_tokens=said.max_total_num_tokens,
        tensor_parallel=said.tp_size,
        models=known["models"],
        loras=known["loras"],
        context_tokens=known["context_tokens"] or said.context_length,
    )
