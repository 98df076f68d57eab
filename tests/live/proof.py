"""Proof by the workers' own counters that KV moved, and the comparison of two answers."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.live import wire
from tests.live.service import Service


class Computed(NamedTuple):
    """Prompt tokens that each worker really computed."""

    prefill: float
    decode: float


def counting(service: Service, run: Callable[[], wire.Answer]) -> tuple[wire.Answer, Computed]:
    """An answer, and what the workers computed for it."""
    before = service.prefill.prompt_tokens_computed(), service.decode.prompt_tokens_computed()
    answer = run()
    after = service.prefill.prompt_tokens_computed(), service.decode.prompt_tokens_computed()
    return answer, Computed(after[0] - before[0], after[1] - before[1])


def proves_handoff(computed: Computed, prompt_tokens: int) -> bool:
    """The one token that the prefill worker may leave is the one that the decode worker computes."""
    return computed.decode <= 1 and prompt_tokens - 1 <= computed.prefill <= prompt_tokens


def without_identity(answer: wire.Answer, *, stream: bool) -> list[Any]:
    """All of an answer but what no two answers share: an id and a time."""
    parts: list[Any] = [json.loads(event) for event in answer.events()[:-1]] if stream else [answer.json()]
    return [{key: value for key, value in part.items() if key not in ("id", "created")} for part in parts]
