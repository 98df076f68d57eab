"""Asks an engine what it is.

    GET /twinpool/identity   the embedded worker: everything
    GET /v1/models           any OpenAI engine: its models; it serves colocated, since nothing says that it can hand off

An engine that cannot be asked raises `ProbeError` with the reason that `twinpool status` shows.
"""

import asyncio
import os

import aiohttp
import msgspec

from twinpool.core.model import Dialect
from twinpool.errors import TwinpoolError


class ProbeError(TwinpoolError):
    """Why an engine is not known to be well."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself; None where it does not tell."""

    engine: str
    incarnation: str
    models: tuple[str, ...]
    dialect: Dialect | None = None
    slots: int | None = None
    context_tokens: int | None = None
    lease_s: float | None = None
    continues: bool = False


class _Embedded(msgspec.Struct):
    engine: str
    engine_version: str
    incarnation: str
    model: str
    slots: int
    context_tokens: int
    lease_s: float
    continues: bool = False


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


async def probe(session: aiohttp.ClientSession, url: str, timeout_s: float) -> Identity:
    """Ask the engine at `url` within the timeout; raises `ProbeError`."""
    try:
        async with asyncio.timeout(timeout_s):
            said = await _get(session, f"{url}/twinpool/identity")
            if said is not None:
                return _embedded(msgspec.json.decode(said, type=_Embedded))
            said = await _get(session, f"{url}/v1/models")
    except TimeoutError:
        raise ProbeError(f"no answer within {timeout_s:g} s") from None
    except aiohttp.ClientConnectorError as lost:
        raise ProbeError(f"no connection: {_reason(lost.os_error)}") from lost
    except (aiohttp.ClientError, OSError) as lost:
        raise ProbeError(str(lost) or type(lost).__name__) from lost
    except msgspec.DecodeError as strange:
        raise ProbeError(f"its answer is not understood: {strange}") from strange
    if said is None:
        raise ProbeError("it has no /v1/models: is this an OpenAI engine?")
    try:
        models = msgspec.json.decode(said, type=_Models)
    except msgspec.DecodeError as strange:
        raise ProbeError(f"its /v1/models is not understood: {strange}") from strange
    lengths = [model.max_model_len for model in models.data if model.max_model_len is not None]
    return Identity(
        engine="openai",
        incarnation="",  # nobody tells; it holds no handles, so nothing depends on it
        models=tuple(model.id for model in models.data),
        context_tokens=min(lengths, default=None),
    )


def _embedded(said: _Embedded) -> Identity:
    return Identity(
        engine=f"{said.engine} {said.engine_version}",
        incarnation=said.incarnation,
        models=(said.model,),
        dialect=Dialect.NIXL,
        slots=said.slots,
        context_tokens=said.context_tokens,
        lease_s=said.lease_s,
        continues=said.continues,
    )


def _reason(problem: OSError) -> str:
    """The system's own words: the library's name the address once more. Name look-ups have numbers of their own."""
    number = problem.errno or 0
    return os.strerror(number) if number > 0 else problem.strerror or str(problem)


async def _get(session: aiohttp.ClientSession, url: str) -> bytes | None:
    """The page; None where there is no such page. Anything else than 200 and 404 is an engine that is not well."""
    async with session.get(url) as answer:
        if answer.status == 404:
            return None
        if answer.status == 401:
            raise ProbeError("it wants an API key (401)")
        if answer.status != 200:
            raise ProbeError(f"{url} answered {answer.status}")
        return await answer.read()
