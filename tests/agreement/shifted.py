"""What `shift` tells of its run; seconds of virtual time."""

from typing import Any, NamedTuple

import msgspec


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    at_s: float
    status: int
    is_right: bool
    ttft_s: float | None


class Split(NamedTuple):
    at_s: float
    prefill: int
    decode: int


class Shifted(msgspec.Struct, frozen=True, kw_only=True):
    answers: list[Answer]
    splits: list[Split]
    decisions: list[dict[str, Any]]
    regret_s: float
    balance: list[dict[str, Any]]
    metrics: list[str]
