"""Asks an engine what it is.

    /twinpool/identity       the embedded worker: everything
    /version, /metrics       vLLM
    /server_info             SGLang
    /props                   llama.cpp's own server
    /v1/models               any OpenAI engine: its models; it serves colocated, since nothing says that it can hand off

An engine that cannot be asked raises `ProbeError` with the reason that `twinpool status` shows. Who knows of what kind it was
asks for that first: then a probe is one to three small requests.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import aiohttp

from twinpool.engines.asking import ProbeError, Trouble, fetch
from twinpool.engines.embedded import ask_embedded
from twinpool.engines.identity import Ask, Identity, Kind, ask_models, names
from twinpool.engines.llama_cpp import ask_llama_cpp
from twinpool.engines.metrics import NO_HEADERS
from twinpool.engines.sglang import ask_sglang
from twinpool.engines.vllm import ask_vllm

__all__ = ["Identity", "Kind", "ProbeError", "Trouble", "probe"]

_KINDS: dict[Kind, Callable[[Ask], Awaitable[Identity | None]]] = {
    Kind.EMBEDDED: ask_embedded,
    Kind.VLLM: ask_vllm,
    Kind.SGLANG: ask_sglang,
    Kind.LLAMA_CPP: ask_llama_cpp,
}


async def probe(
    session: aiohttp.ClientSession,
    url: str,
    timeout_s: float,
    *,
    headers: Mapping[str, str] = NO_HEADERS,
    expected: Kind | None = None,
) -> Identity:
    """Ask the engine at `url` within the timeout; raises `ProbeError`. `headers` carry its key, `expected` is what it was."""

    async def ask(path: str) -> bytes | None:
        return await fetch(session, url + path, headers)

    try:
        async with asyncio.timeout(timeout_s):
            for kind in sorted(_KINDS, key=lambda kind: kind is not expected):
                identity = await _KINDS[kind](ask)
                if identity is not None:
                    return identity
            return Identity(kind=Kind.OPENAI, obstacle="its engine is not known to hand off", **names(await ask_models(ask)))
    except TimeoutError:
        raise ProbeError(f"no answer within {timeout_s:g} s", Trouble.SILENT) from None
