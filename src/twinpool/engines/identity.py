"""What an engine says of itself, whatever its kind."""

from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from twinpool.core.model import Dialect
from twinpool.engines.asking import ProbeError
from twinpool.engines.metrics import EngineMetrics

Ask = Callable[[str], Awaitable[bytes | None]]
"""One page of the engine by its path; None where it has no such page."""

T = TypeVar("T")


class Kind(StrEnum):
    """The engines that are told apart. `OPENAI` is any other with OpenAI's routes."""

    EMBEDDED = "embedded"
    VLLM = "vllm"
    SGLANG = "sglang"
    LLAMA_CPP = "llama.cpp"
    OPENAI = "openai"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """None where it does not tell. `connector` is what its metrics show, `obstacle` why it cannot hand over, where that is
    known already, and `dialect` how it can, where it says so itself."""

    kind: Kind
    version: str | None = None
    incarnation: str = ""
    models: tuple[str, ...]
    loras: tuple[str, ...] = ()
    dialect: Dialect | None = None
    obstacle: str | None = None
    vouches: bool = False
    has_metrics: bool = False
    connector: str | None = None
    slots: int | None = None
    context_tokens: int | None = None
    lease_s: float | None = None
    continues: bool = False
    serves_whole: bool = True
    block_tokens: int | None = None
    cache_dtype: str | None = None
    kv_layout: str | None = None
    kv_token_bytes: int | None = None
    dtype: str | None = None
    kv_capacity_tokens: int | None = None
    budget_tokens: int | None = None
    tensor_parallel: int | None = None
    metrics: EngineMetrics | None = None  # where the probe read them

    @property
    def engine(self) -> str:
        """Name and version; the embedded worker's version names the engine inside it."""
        if self.version is None:
            return str(self.kind)
        return self.version if self.kind is Kind.EMBEDDED else f"{self.kind} {self.version}"


class Model(msgspec.Struct):
    """One of `/v1/models`. `parent` is the model that an adapter stands on."""

    id: str
    owned_by: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[Model]


async def ask_models(ask: Ask) -> list[Model]:
    """Raises `ProbeError` where there is no such page or it is not understood."""
    page = await ask("/v1/models")
    if page is None:
        raise ProbeError("it shows no /v1/models: is this an OpenAI engine?")
    try:
        return msgspec.json.decode(page, type=_Models).data
    except (msgspec.DecodeError, UnicodeDecodeError) as strange:
        raise ProbeError(f"its /v1/models is not understood: {strange}") from strange


def read(page: bytes | None, kind: type[T]) -> T | None:
    """The page as such a record; None where it is none."""
    try:
        return None if page is None else msgspec.json.decode(page, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def names(models: list[Model]) -> dict[str, Any]:
    """The fields of an `Identity` that follow from `/v1/models`."""
    lengths = [model.max_model_len for model in models if model.max_model_len is not None]
    return {
        "models": tuple(dict.fromkeys(model.id for model in models)),
        "loras": tuple(dict.fromkeys(model.id for model in models if model.parent is not None)),
        "context_tokens": min(lengths, default=None),
    }
