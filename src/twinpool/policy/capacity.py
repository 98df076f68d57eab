"""How much of the present traffic a split of the workers would carry, by the estimates: a small model of two pools that lend a
hand.

A worker that decodes takes `s` steps a second. With `w` tokens a second to write it needs `e·s + a·w` of each second for that
(`e` a step, `a` a sequence's share of it with its KV); what is left it can read prompts beside, if their chunks keep its steps
within the objective: `s` is at least 1/objective, more where the batch `w/s` would not fit its KV, and as many as it takes to
read a budget's tokens in each where those end sooner. A worker that prefills only reads.

    carried(split) = the largest m with  reading(prefill) + reading(decode, beside m·writes) ≥ m·reads

What it needs to know of traffic is proportions more than rates, so it hardly moves while traffic is steady.
"""

from collections.abc import Callable, Mapping
from math import fsum
from typing import NamedTuple

from twinpool.policy.costs import KindCosts

_MOST = 1e6  # times the present traffic: nothing is asked for
_SAME = 1.0 + 1e-9  # a sum of shares may come out below its whole


class Kind(NamedTuple):
    """Workers that take the same time for the same work."""

    costs: KindCosts
    kv_tokens: float | None
    sequences: int
    budget_tokens: int


class Asked(NamedTuple):
    """A second: tokens to read and Σ of their prompts' squares, tokens to write; the context a token is written with; requests;
    and of the tokens to read, those in short prompts, whose mean is `short_tokens`, and the others'."""

    reads: float
    squares: float
    writes: float
    context: float
    requests: float
    short_share: float
    short_tokens: float
    long_tokens: float


Counts = Mapping[str, int]
"""Workers by the name of their kind."""


def carried(asked: Asked, kinds: Mapping[str, Kind], prefills: Counts, decodes: Counts) -> float:
    """How many times the present traffic they carry; 0 where a pool is missing."""
    if not asked.reads and not asked.writes:
        return _MOST
    return _highest(_carries(asked, kinds, prefills, decodes))


def carried_by_one_pool(asked: Asked, kinds: Mapping[str, Kind], everybody: Counts, *, leeway: float = 1.0) -> float:
    """The same where everybody does everything: prompts of any length must be readable beside what is written. Steps may take
    `leeway` times the limit."""
    if not asked.reads and not asked.writes:
        return _MOST
    return _highest(_carries(asked, kinds, {}, everybody, leeway))


def _highest(is_carried: Callable[[float], bool]) -> float:
    low, high = 0.0, 1.0
    while is_carried(high):
        low, high = high, high * 2
        if high > _MOST:
            return _MOST
    for _ in range(10):
        middle = (low + high) / 2
        if is_carried(middle):
            low = middle
        else:
            high = middle
    return low


def _carries(
    asked: Asked, kinds: Mapping[str, Kind], prefills: Counts, decodes: Counts, leeway: float = 1.0
) -> Callable[[float], bool]:
    """Whether so many times the present traffic is carried."""
    able_s = {name: _alone_tokens_s(kinds[name], asked.context) for name, count in decodes.items() if count}
    total_s = fsum(decodes[name] * tokens_s for name, tokens_s in able_s.items())
    reading = fsum(count * _reading_tokens_s(asked, kinds[name].costs) for name, count in prefills.items() if count)

    def is_carried(times: float) -> bool:
        reads, writes = asked.reads * times, asked.writes * times
        if not total_s:
            return False
        beside = 0.0
        for name, tokens_s in able_s.items():
            found = _beside(asked, kinds[name], writes * tokens_s / total_s, leeway * kinds[name].costs.limit_s)
            if found is None:
                return False
            reading_s, share = found
            beside += decodes[name] * min(reading_s, share * reads * tokens_s / total_s)
        return (reading + min(beside, reads)) * _SAME >= reads

    return is_carried


def _alone_tokens_s(kind: Kind, context: float) -> float:
    """What it writes when it does nothing else, at the largest batch that keeps the objective (at batch 1, where none does)."""
    costs = kind.costs
    a_sequence_s = costs.step_sequence_s + costs.step_kv_token_s * context
    batch = most_sequences(kind, context)
    if a_sequence_s > 0:
        batch = min(batch, (costs.limit_s - costs.step_s) / a_sequence_s)
    batch = max(1.0, batch)
    return batch / (costs.step_s + a_sequence_s * batch)


def most_sequences(kind: Kind, context: float) -> float:
    """That fit at once."""
    batch = float(kind.sequences)
    if kind.kv_tokens is not None:
        batch = min(batch, 0.95 * kind.kv_tokens / max(context, 1.0))
    return max(1.0, min(batch, 1.5 * kind.costs.most_batch))


def _beside(asked: Asked, kind: Kind, writes: float, limit_s: float) -> tuple[float, float] | None:
    """Prompt tokens a second that it reads beside `writes` tokens a second in steps of at most `limit_s`, and the share of the
    prompt tokens that come in prompts it may read; None where the writing alone is too much."""
    costs = kind.costs
    a_sequence_s = costs.step_sequence_s + costs.step_kv_token_s * asked.context
    fewest = max(1.0 / limit_s, writes / most_sequences(kind, asked.context))
    if fewest * costs.step_s + writes * a_sequence_s > 1.0:
        return None
    steps = max(fewest, _full_steps(costs, kind.budget_tokens, writes, a_sequence_s))
    batch = writes / steps
    step_s = costs.step_s + a_sequence_s * batch
    free = kind.budget_tokens - batch
    chunk = costs.largest_chunk(batch, step_s, 1.0 / steps)
    if free <= 0 or chunk <= 0:
        return 0.0, 0.0
    allowed = costs.largest_chunk(batch, step_s, limit_s)
    return steps * min(chunk, free), 1.0 if free <= allowed * _SAME else _readable_share(asked, allowed)


def _full_steps(costs: KindCosts, budget_tokens: int, writes: float, a_sequence_s: float) -> float:
    """Steps a second, if each is as full as its budget: `s` with s·(a step for w/s sequences and a chunk of the rest) = 1.
    First as if each had some tokens for nothing, and where its batch leaves it none, without."""
    token_s = costs.mixed_token_s
    for free, of_each in ((costs.free_tokens, costs.free_sequence_tokens), (0.0, 0.0)):
        a_step_s = costs.step_s + costs.mixed_s + token_s * (budget_tokens - free)
        left = 1.0 - writes * (a_sequence_s - token_s * (1.0 - of_each))
        steps = left / a_step_s if a_step_s > 0 and left > 0 else 0.0
        if steps and free >= of_each * writes / steps:
            break
    return steps


def _readable_share(asked: Asked, chunk: float) -> float:
    """Of prompt tokens, those in prompts of one chunk at most; a class's prompts are taken to lie evenly from 0 to twice its
    mean."""
    short = min(1.0, chunk / (2 * asked.short_tokens)) if asked.short_tokens else 0.0
    long = max(0.0, min(1.0, chunk / asked.long_tokens - 1.0)) if asked.long_tokens else 0.0
    return asked.short_share * short * short + (1 - asked.short_share) * long


def _reading_tokens_s(asked: Asked, costs: KindCosts) -> float:
    seconds = costs.a_prompt_s * asked.requests + costs.read_token_s * asked.reads + costs.read_pair_s * asked.squares
    return asked.reads / seconds if seconds > 0 else _MOST
