"""What is asked for: work offered a second, and how long answers get, by class of length.

Work is summed prompt by prompt, since a mean over short and long prompts lies about both. All of it decays: after traffic has
stopped nothing of its shape is left to keep workers for.
"""

from math import exp, fsum

import msgspec

from twinpool.core.model import RequestFacts, Usage
from twinpool.policy.capacity import Asked

_OUTPUT_TOKENS = 200.0  # before any answer has ended
_OUTPUT_RATE = 0.02  # the mean of about the last 50 answers of the class
_READ_RATE = 0.02  # the same, of prompts with a beginning that others may share
_MEMORY_S = 6.0


class DemandRecord(msgspec.Struct):
    at: float
    rate: list[float]
    prompt_tokens: list[float]
    square_tokens: list[float]
    output_tokens: list[float]
    began: float | None
    answers: list[int]
    of_prompts: list[list[float]] = msgspec.field(default_factory=lambda: [[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    """By class, of prompts with a beginning that others may share: tokens, those that had to be read, and the same for the
    pairs that are attended to."""


class Demand:
    """Classes: 0 short, 1 long."""

    def __init__(self, long_prompt_tokens: int) -> None:
        self._border = long_prompt_tokens
        self._now = DemandRecord(0.0, [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [_OUTPUT_TOKENS, _OUTPUT_TOKENS], None, [0, 0])

    def class_of(self, prompt_tokens: int) -> int:
        return int(prompt_tokens > self._border)

    def output_tokens(self, prompt_tokens: int, facts: RequestFacts) -> float:
        """How long its answer should get."""
        usual = self._now.output_tokens[prompt_tokens > self._border]
        return usual if facts.max_tokens is None else min(usual, facts.max_tokens)

    def arrived(self, at: float, prompt_tokens: int) -> None:
        now = self._now
        self._fade(at)
        if now.began is None:
            now.began = at
        of = int(prompt_tokens > self._border)
        now.rate[of] += 1.0
        now.prompt_tokens[of] += prompt_tokens
        now.square_tokens[of] += prompt_tokens * prompt_tokens

    def reused(self, unread: int, cached: int) -> None:
        """One that others may share was read: so much of it anew."""
        tokens = unread + cached
        sums = self._now.of_prompts[tokens > self._border]
        for n, value in enumerate((tokens, unread, tokens * tokens, unread * (unread + 2 * cached))):
            sums[n] += value - _READ_RATE * sums[n]

    def finished(self, usage: Usage) -> None:
        of = int(usage.prompt_tokens > self._border)
        usual = self._now.output_tokens
        self._now.answers[of] += 1
        usual[of] += max(_OUTPUT_RATE, 1 / self._now.answers[of]) * (usage.completion_tokens - usual[of])

    @property
    def answers(self) -> int:
        """That have ended."""
        return sum(self._now.answers)

    def seen_s(self, at: float) -> float:
        """Since when something is asked for."""
        return at - self._now.began if self._now.began is not None else 0.0

    def asked(self, at: float) -> Asked:
        """A second, by what arrived lately, how much of it workers hold already, and how long answers are."""
        self._fade(at)
        now = self._now
        seen_s = self.seen_s(at)
        span_s = _MEMORY_S * (1.0 - exp(-seen_s / _MEMORY_S)) if seen_s > 0 else _MEMORY_S
        (short, long), (short_tokens, long_tokens) = now.rate, now.prompt_tokens
        requests = short + long
        writes = fsum(rate * output for rate, output in zip(now.rate, now.output_tokens, strict=True))
        written_at = fsum(
            output * (of_prompts + rate * output / 2)
            for rate, of_prompts, output in zip(now.rate, now.prompt_tokens, now.output_tokens, strict=True)
        )
        (short_ratio, short_pairs), (long_ratio, long_pairs) = map(_to_read, now.of_prompts)
        short_tokens, long_tokens = short_tokens * short_ratio, long_tokens * long_ratio
        tokens = short_tokens + long_tokens
        return Asked(
            reads=tokens / span_s,
            squares=(now.square_tokens[0] * short_pairs + now.square_tokens[1] * long_pairs) / span_s,
            writes=writes / span_s,
            context=written_at / writes if writes else 1.0,
            requests=requests / span_s,
            short_share=short_tokens / tokens if tokens else 1.0,
            short_tokens=short_tokens / short if short else 0.0,
            long_tokens=long_tokens / long if long else 0.0,
        )

    def _fade(self, at: float) -> None:
        now = self._now
        passed = at - now.at
        if passed <= 0:
            return
        now.at = at
        keep = exp(-passed / _MEMORY_S)
        if keep < 1e-6:
            now.began = None
            keep = 0.0
        for sums in (now.rate, now.prompt_tokens, now.square_tokens):
            sums[0] *= keep
            sums[1] *= keep

    def remember(self) -> DemandRecord:
        return self._now

    def recall(self, record: DemandRecord) -> None:
        self._now = record


def _to_read(sums: list[float]) -> tuple[float, float]:
    """Of a class's tokens and pairs, the share that is read anew: all, where nothing is shared."""
    tokens, unread, squares, pairs = sums
    return (unread / tokens, pairs / squares) if tokens else (1.0, 1.0)
