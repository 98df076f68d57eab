"""A cost profile: what one kind of worker takes for its work, with where the figures come from.

Measured (`twinpool profile`), or taken from somebody's database. A profile belongs to one engine with its flags and its room
for KV: figures of another one are no estimate but an error, and are refused (`Profile.require`). Tables that have holes are
refused when they are read; what lies beyond their ends is extrapolated by whoever uses them, and said."""

from collections.abc import Iterable
from operator import le
from typing import Annotated, TypeVar

import msgspec

from twinpool.errors import UserError

MOST_TOKENS = 1_000_000_000
"""Of a context, of a worker's room for KV: more is a slip of the pen."""

MOST_TOKEN_BYTES = 100_000_000
"""Of KV: the largest models have a few million."""

_Bandwidth = Annotated[float, msgspec.Meta(ge=1.0, le=1e15)]  # a byte to a petabyte a second
_StepMs = Annotated[float, msgspec.Meta(ge=1e-3, le=1e7)]  # a microsecond to three hours: no step of any engine is beyond
_ExtraMs = Annotated[float, msgspec.Meta(ge=0, le=1e7)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]

_At = TypeVar("_At", bound=tuple[int, ...])

_NOISE_RATIO = 0.2
"""More work may come out so much quicker than less by chance; a table that falls further is of no engine."""


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`prefill_ms`: (prompt tokens, milliseconds) at batch 1. `decode_step_ms`: (sequences, context tokens of each,
    milliseconds), a full grid. `kv_tokens` is the room for KV that the engine reports with these `flags`;
    `mixed_step_extra_ms` what a step with both prefill and decode costs beyond its parts. Handoff: out of or into one
    worker."""

    name: str
    model: str
    engine: str
    source: str
    kv_tokens: Annotated[int, msgspec.Meta(le=MOST_TOKENS)]
    kv_bytes_per_token: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKEN_BYTES)]
    prefill_ms: tuple[tuple[_Count, _StepMs], ...]
    decode_step_ms: tuple[tuple[_Count, _Count, _StepMs], ...]
    context_tokens: _Count = 131_072
    max_sequences: _Count = 512
    mixed_step_extra_ms: _ExtraMs = 0.0
    handoff_bytes_per_s: _Bandwidth = 100e9
    handoff_latency_ms: _ExtraMs = 3.0
    system: str | None = None
    tensor_parallel: _Count = 1
    gpus: _Count | None = None
    flags: dict[str, str | int | float | bool] = {}
    kv_source: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def batches(self) -> tuple[int, ...]:
        return tuple(sorted({batch for batch, _, _ in self.decode_step_ms}))

    @property
    def contexts(self) -> tuple[int, ...]:
        return tuple(sorted({context for _, context, _ in self.decode_step_ms}))

    def require(
        self,
        *,
        model: str | None = None,
        engine: str | None = None,
        kv_tokens: int | None = None,
        tensor_parallel: int | None = None,
        flags: dict[str, str | int | float | bool] | None = None,
    ) -> None:
        """Raise `UserError` where this is the profile of something else."""
        asked: dict[str, object] = {
            "model": model,
            "engine": engine,
            "kv_tokens": kv_tokens,
            "tensor_parallel": tensor_parallel,
        }
        for key, want in asked.items():
            if want is not None and want != getattr(self, key):
                raise UserError(f"profile {self.name} was taken with {key} {getattr(self, key)}, not {want}: measure that one")
        for key, value in (flags or {}).items():
            if key in self.flags and self.flags[key] != value:
                raise UserError(f"profile {self.name} was taken with {key}={self.flags[key]}, not {value}: measure that one")


def parse_profile(text: str | bytes, origin: str) -> Profile:
    """Read a profile's JSON; `origin` (a path) serves the message of the `UserError` that an unusable one raises."""
    try:
        profile = msgspec.json.decode(text, type=Profile)
    except (msgspec.ValidationError, msgspec.DecodeError) as wrong:
        raise UserError(f"{origin} is not a profile: {wrong}") from wrong
    _check(profile, origin)
    return profile


def _check(profile: Profile, origin: str) -> None:
    if profile.kv_tokens < 1:
        raise UserError(
            f"{origin}: the model does not fit, beside it there is room for {profile.kv_tokens:,} tokens of KV: "
            "a worker needs more or larger GPUs"
        )
    lengths = [tokens for tokens, _ in profile.prefill_ms]
    if len(lengths) < 2 or lengths != sorted(set(lengths)):
        raise UserError(f"{origin}: prefill_ms needs two lengths or more, each once, rising")
    _check_rising(origin, "prefill_ms", [((tokens,), ms) for tokens, ms in profile.prefill_ms])
    cells = {(batch, context) for batch, context, _ in profile.decode_step_ms}
    if len(cells) != len(profile.decode_step_ms):
        raise UserError(f"{origin}: decode_step_ms has a cell twice")
    holes = [(batch, context) for batch in profile.batches for context in profile.contexts if (batch, context) not in cells]
    if holes:
        raise UserError(f"{origin}: decode_step_ms has holes at (batch, context) {', '.join(map(str, holes[:4]))}")
    if len(profile.batches) < 2 or len(profile.contexts) < 2:
        raise UserError(f"{origin}: decode_step_ms needs two batches and two contexts or more")
    _check_rising(origin, "decode_step_ms", [((batch, context), ms) for batch, context, ms in profile.decode_step_ms])


def rising(points: Iterable[tuple[_At, float]]) -> dict[_At, float]:
    """The running maximum: no time is under that of a point which asks for no more in any of its sizes."""
    known = list(points)
    return {at: max(value for other, value in known if all(map(le, other, at))) for at, _ in known}


def _check_rising(origin: str, table: str, points: list[tuple[_At, float]]) -> None:
    highest = rising(points)
    for at, ms in points:
        if ms < highest[at] * (1 - _NOISE_RATIO):
            raise UserError(
                f"{origin}: {table} falls to {ms:g} ms at {', '.join(map(str, at))}, where less work takes {highest[at]:g} ms: "
                "measure it again on an idle engine"
            )
