"""llama.cpp's own server: known by `/props`.

It can write a slot to a file and read it again, which is what the embedded worker is built on; but nothing of it hands KV to
another process over its own routes, so it serves alone. Source: llama.cpp's tools/server.
"""

import msgspec

from twinpool.engines.identity import Ask, Identity, Kind, ask_models, names, read


class _Settings(msgspec.Struct):
    n_ctx: int | None = None


class _Props(msgspec.Struct):
    default_generation_settings: _Settings
    total_slots: int | None = None
    build_info: str | None = None


async def ask_llama_cpp(ask: Ask) -> Identity | None:
    """None where it is another engine."""
    said = read(await ask("/props"), _Props)
    if said is None:
        return None
    known = names(await ask_models(ask))
    return Identity(
        kind=Kind.LLAMA_CPP,
        version=said.build_info,
        obstacle="a plain llama.cpp server has no handoff",
        slots=said.total_slots,
        models=known["models"],
        context_tokens=said.default_generation_settings.n_ctx,
    )
