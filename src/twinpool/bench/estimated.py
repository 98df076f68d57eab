"""A profile without an engine: asked of NVIDIA AIConfigurator's database (Apache-2.0), where that package is installed.

`ask` puts the questions to the package and keeps its plain answers; `profile_of` makes a profile of them. They are static
estimates, made from kernels that were measured one by one: good to begin with, and no substitute for `twinpool profile URL`."""

import logging
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple, TypeVar

import msgspec

from twinpool.errors import UserError
from twinpool.profile import Profile

_LENGTHS = (64, 128, 256, 512, 1024, 1500, 2048, 3000, 4096, 6144, 8192, 12288, 16384, 32768)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_CONTEXTS = (512, 2048, 8192)
_STEP_TOKENS = 8192
"""Whose activations the KV cache leaves room for: the largest budget that engines are started with."""

_T = TypeVar("_T")


class Asked(NamedTuple):
    """`system` is the database's name for a machine (h100_sxm); `memory_ratio` what an engine takes of each GPU."""

    model: str
    system: str
    tensor_parallel: int = 1
    engine: str = "vllm"
    engine_version: str | None = None
    memory_ratio: float = 0.9
    sequences: int = 256
    context_tokens: int | None = None


class Answers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the package says, in its own terms: `kv_tokens` and `kv_bytes_per_token` of one GPU; `mixed_ms` as (tokens of a
    prompt that is read whole, and of the context of each that decodes; sequences that do; milliseconds)."""

    package: str
    engine_version: str
    context_tokens: int
    kv_tokens: int
    kv_bytes_per_token: int
    prefill_ms: tuple[tuple[int, float], ...]
    decode_step_ms: tuple[tuple[int, int, float], ...]
    mixed_ms: tuple[tuple[int, int, float], ...]


def ask(asked: Asked) -> Answers:
    """Raises `UserError` where the package is not there, or has no answer."""
    try:
        from importlib.metadata import version

        from aiconfigurator_core.sdk import EngineHandle, estimate_kv_cache
        from aiconfigurator_core.sdk.perf_database import get_latest_database_version, get_supported_databases
        from aiconfigurator_core.sdk.utils import get_model_config_from_model_path
    except ImportError as missing:
        raise UserError(
            f"AIConfigurator 0.12 or newer is not installed in this environment ({missing}): pip install aiconfigurator, or "
            "measure an engine with `twinpool profile URL`"
        ) from missing
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)  # it warns of tables that other models would need
    database = _engines_of(get_supported_databases(), asked)
    engine_version = asked.engine_version or get_latest_database_version(asked.system, asked.engine)
    if engine_version not in database:
        raise UserError(
            f"AIConfigurator has no {asked.engine} {engine_version} on {asked.system}: there are {', '.join(database)}"
        )
    what = {
        "model_path": asked.model,
        "system": asked.system,
        "backend": asked.engine,
        "backend_version": engine_version,
        "tp_size": asked.tensor_parallel,
        "moe_tp_size": asked.tensor_parallel,  # experts are split as the rest is, which is what engines do unless told
    }
    config = _answer(asked, lambda: get_model_config_from_model_path(asked.model))
    handle = _answer(asked, lambda: EngineHandle.compile(**what))
    memory = _answer(
        asked,
        lambda: estimate_kv_cache(
            **what,
            max_num_tokens=_STEP_TOKENS,
            max_batch_size=asked.sequences,
            memory_fraction_kind="of_free" if asked.engine == "trtllm" else "of_total",
            memory_fraction_value=asked.memory_ratio,
        ),
    )
    context_tokens = asked.context_tokens or config["raw_config"].get("max_position_embeddings")
    if context_tokens is None:
        raise UserError(f"the configuration of {asked.model} does not say how long its context is: give --context")
    lengths = [tokens for tokens in _LENGTHS if tokens <= context_tokens]
    batches = [batch for batch in _BATCHES if batch <= asked.sequences]
    contexts = [context for context in _CONTEXTS if context < context_tokens]
    return Answers(
        package=f"AIConfigurator {version('aiconfigurator-core')}",
        engine_version=engine_version,
        context_tokens=context_tokens,
        kv_tokens=int(memory["total_kv_size_tokens"]),
        kv_bytes_per_token=int(memory["kv_size_per_token_bytes"]),
        prefill_ms=_answer(
            asked, lambda: tuple((tokens, round(handle.predict_prefill_latency(1, tokens), 3)) for tokens in lengths)
        ),
        decode_step_ms=_answer(
            asked,
            lambda: tuple(
                (batch, context, round(handle.predict_decode_latency(batch, context), 3))
                for batch in batches
                for context in contexts
            ),
        ),
        mixed_ms=_answer(
            asked,
            lambda: tuple(
                (length, batch, round(handle.mixed_step_latency(length, batch, length, 2), 3))
                for length in contexts
                for batch in batches
                if length + batch <= lengths[-1]
            ),
        ),
    )


def _engines_of(databases: Any, asked: Asked) -> list[str]:
    """The versions of the asked engine on the asked system."""
    if asked.system not in databases:
        raise UserError(f"AIConfigurator has no system {asked.system}: there are {', '.join(sorted(databases))}")
    engines = databases[asked.system]
    if asked.engine not in engines:
        raise UserError(f"AIConfigurator has no {asked.engine} on {asked.system}: there are {', '.join(sorted(engines))}")
    return list(engines[asked.engine])


def _answer(asked: Asked, question: Callable[[], _T]) -> _T:
    """The package raises all kinds of errors, assertions too, for what it has no figures for."""
    try:
        return question()
    except Exception as wrong:
        reason = " ".join(str(wrong).split()) or type(wrong).__name__
        if reason.startswith("no KV budget"):
            raise UserError(
                f"{asked.model} does not fit on {asked.tensor_parallel} {asked.system}: give it more GPUs with "
                f"--tensor-parallel (AIConfigurator: {reason})"
            ) from wrong
        raise UserError(
            f"AIConfigurator has no figures for {asked.model} on {asked.tensor_parallel} {asked.system}: {reason}"
        ) from wrong


def profile_of(asked: Asked, answers: Answers, *, name: str) -> Profile:
    """`kv_bytes_per_token` is of all GPUs of the worker together."""
    extra_ms = _mixed_extra_ms(answers)
    mixed = (
        "mixed steps are taken to cost nothing extra; by the same database they take "
        f"{extra_ms:+.1f} ms more than their parts (median of {len(answers.mixed_ms)}): measure it, and set mixed_step_extra_ms"
    )
    return Profile(
        name=name,
        model=asked.model,
        engine=f"{asked.engine} {answers.engine_version}",
        source=f"{answers.package} perf database, static estimates (NVIDIA, Apache-2.0); batch 1 prefill",
        kv_tokens=answers.kv_tokens,
        kv_bytes_per_token=answers.kv_bytes_per_token * asked.tensor_parallel,
        prefill_ms=answers.prefill_ms,
        decode_step_ms=answers.decode_step_ms,
        context_tokens=answers.context_tokens,
        max_sequences=asked.sequences,
        system=asked.system,
        tensor_parallel=asked.tensor_parallel,
        gpus=asked.tensor_parallel,
        flags={"gpu_memory_utilization": asked.memory_ratio},
        kv_source=f"{answers.package}, for {_STEP_TOKENS:,} tokens a step: an engine's own figure is better",
        notes=("the handoff is no part of that database: its bandwidth and latency are assumed", mixed),
    )


def _mixed_extra_ms(answers: Answers) -> float:
    """What the package's mixed steps take beyond the decode step, and what the prompt adds to one as long as the batch."""
    decode = {(batch, context): ms for batch, context, ms in answers.decode_step_ms}

    def read_ms(tokens: int) -> float:
        points = answers.prefill_ms
        high = next((n for n, (length, _) in enumerate(points) if length >= tokens), len(points) - 1) or 1
        (low_tokens, low_ms), (high_tokens, high_ms) = points[high - 1], points[high]
        return low_ms + (high_ms - low_ms) * (tokens - low_tokens) / (high_tokens - low_tokens)

    return median(
        ms - decode[batch, length] - (read_ms(batch + length) - read_ms(batch)) for length, batch, ms in answers.mixed_ms
    )
