"""What one worker's legs show of its speed, taken down as they end: the estimates are fitted to it.

Reading: prompts that end at one moment were read in one step, so they are one observation. It lasts from the end of the one before,
or from when the worker got something to read, and is void where the worker wrote beside. Writing: the sums over time of what
ran, so that between its first and its last token a request can tell the mean batch it ran in.
"""

from typing import NamedTuple

import msgspec

NEWBORN_LEGS = 8
"""Of a new engine, not learnt from: it compiles, captures graphs and fills caches meanwhile."""


class ReadingSeen(NamedTuple):
    """`pairs` is the sum of `u·(u + 2·cached)` over the prompts, `tokens` of their uncached tokens `u`."""

    prompts: int
    tokens: int
    pairs: float
    seconds: float


class Mark(NamedTuple):
    """Where a worker's sums stood at the first token of a request."""

    at: float
    sequence_s: float
    kv_token_s: float
    read_tokens: int


class WritingSeen(NamedTuple):
    """Means over the time in which one request was written: sequences in the batch, their prompts' tokens of KV; and the prompt
    tokens that the worker read in this time."""

    seconds: float
    batch: float
    kv_tokens: float
    read_tokens: int


class Meter(msgspec.Struct, eq=False, omit_defaults=True):
    """One worker's; `newborn` counts down its first legs."""

    newborn: int = NEWBORN_LEGS
    # the group of prompts that ended last, and since when the worker has been at the next one
    since: float = 0.0
    ended: float = 0.0
    began: float = 0.0
    prompts: int = 0
    tokens: int = 0
    pairs: float = 0.0
    is_mixed: bool = False
    # what runs, and the sums over time up to `at`
    at: float = 0.0
    writing: int = 0
    writing_kv: int = 0
    sequence_s: float = 0.0
    kv_token_s: float = 0.0
    read_tokens: int = 0

    def idle_until(self, at: float) -> None:
        """It had nothing to read, and gets something now."""
        self.since = at

    def read(self, at: float, tokens: int, cached: int) -> ReadingSeen | None:
        """A prompt with `tokens` uncached ones was read by now; the observation that this closes, if any."""
        self.read_tokens += tokens
        if self.newborn:
            self.newborn -= 1
            self.since = at
            return None
        seen = None
        if self.prompts and at > self.ended:
            if not self.is_mixed and self.ended > self.began:
                seen = ReadingSeen(self.prompts, self.tokens, self.pairs, self.ended - self.began)
            self.prompts = self.tokens = 0
            self.pairs = 0.0
            self.is_mixed = False
        if not self.prompts:
            self.began = self.since
        self.prompts += 1
        self.tokens += tokens
        self.pairs += tokens * (tokens + 2.0 * cached)
        self.is_mixed |= self.writing > 0
        self.ended = self.since = at
        return seen

    def advance(self, at: float) -> None:
        if at > self.at:
            self.sequence_s += self.writing * (at - self.at)
            self.kv_token_s += self.writing_kv * (at - self.at)
            self.at = at

    def begin(self, at: float, sequences: int, kv_tokens: int) -> None:
        self.advance(at)
        self.writing += sequences
        self.writing_kv += kv_tokens

    def end(self, at: float, sequences: int, kv_tokens: int) -> None:
        self.advance(at)
        self.writing -= sequences
        self.writing_kv -= kv_tokens

    def mark(self) -> Mark:
        return Mark(self.at, self.sequence_s, self.kv_token_s, self.read_tokens)

    def since_mark(self, mark: Mark, at: float) -> WritingSeen | None:
        """None where no time has passed."""
        self.advance(at)
        seconds = at - mark.at
        if seconds <= 0:
            return None
        return WritingSeen(
            seconds,
            (self.sequence_s - mark.sequence_s) / seconds,
            (self.kv_token_s - mark.kv_token_s) / seconds,
            self.read_tokens - mark.read_tokens,
        )
