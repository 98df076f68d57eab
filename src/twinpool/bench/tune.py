"""Before a comparison: how much the workers can do, and each arm's best settings.

Every candidate gets the same bursts of requests, all sent at once. What finishes them soonest has the most capacity; of those
within a tenth of it, the one whose streams have the shortest worst gaps is the best. Both arms are tuned by the same rule.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TypeVar

from twinpool.bench.prepare import Prepared
from twinpool.bench.run import offer
from twinpool.config import Objectives
from twinpool.http1 import Pool
from twinpool.measure.blocks import Recorder, Window
from twinpool.measure.digest import Layers
from twinpool.measure.indicators import UnitCosts
from twinpool.workload.offered import Offered

ENOUGH_OF_THE_BEST = 0.9

Name = TypeVar("Name")


@dataclass(frozen=True, slots=True)
class Burst:
    """What one candidate did with the burst."""

    requests_per_s: float
    worst_gap_p99_s: float
    failed: int


async def burst(pool: Pool, prepared: Prepared, requests: Sequence[Offered], *, timeout_s: float) -> Burst:
    """All at once."""
    at_once = [_at_once(request) for request in requests]
    began = monotonic()
    measured = await offer(
        pool,
        prepared,
        at_once,
        duration_s=1.0,
        timeout_s=timeout_s,
        objectives=Objectives(),
        window=Window(0.0, timeout_s),
    )
    took_s = monotonic() - began
    recorder = measured.recorder
    answered = sum(block.requests - block.failed for block in (*recorder.short, *recorder.long))
    failed = sum(block.failed for block in (*recorder.short, *recorder.long))
    return Burst(answered / took_s, _worst_gap_p99_s(recorder), failed)


def _at_once(request: Offered) -> Offered:
    return Offered(0.0, request.prompt_tokens, request.output_tokens, request.is_long, request.prefix)


def best(bursts: Mapping[Name, Burst]) -> Name:
    """By the rule above; the first of equals. Candidates that failed requests come last."""
    whole = {name: found for name, found in bursts.items() if not found.failed} or bursts
    most = max(found.requests_per_s for found in whole.values())
    able = [name for name, found in whole.items() if found.requests_per_s >= ENOUGH_OF_THE_BEST * most]
    return min(able, key=lambda name: whole[name].worst_gap_p99_s)


async def unit_costs(pool: Pool, prepared: Prepared, *, slots: int, timeout_s: float) -> UnitCosts | None:
    """What a token costs on one worker that does nothing else: of a prompt read alone, and of as many streams as it has slots.
    None where the worker did not answer."""
    prompt_tokens, output_tokens = 256, 48
    one = [Offered(0.0, prompt_tokens, 1, is_long=True)]
    many = [Offered(0.0, 8, output_tokens, is_long=False) for _ in range(slots)]
    read = await burst(pool, prepared, one, timeout_s=timeout_s)
    written = await burst(pool, prepared, many, timeout_s=timeout_s)
    if not read.requests_per_s or not written.requests_per_s:
        return None
    return UnitCosts(
        prefill_s_per_token=1 / read.requests_per_s / prompt_tokens,
        decode_s_per_token=1 / written.requests_per_s / output_tokens,
    )


def _worst_gap_p99_s(recorder: Recorder) -> float:
    blocks = [*recorder.short, *recorder.long]
    layers = Layers([block.worst_s for block in blocks])
    return layers.quantiles([1.0] * len(blocks), (0.99,))[0] or 0.0
