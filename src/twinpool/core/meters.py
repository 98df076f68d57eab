"""What one worker's legs show of its speed, taken down as they end: the estimates are fitted to it.

Reading: an observation is a stretch in which the worker always had something to read, from when it got it to when it had no
more, or to the end of a prompt once it has read `_STRETCH_TOKENS` (a slow one: several prompts for `_STRETCH_S`): in between, a
step has part of one prompt and part of the next. It is void where the worker wrote beside. Writing: the sums over time of what
ran, so that between its first and its last token a request can tell the mean batch it ran in."""

import msgspec

NEWBORN_LEGS = 8
"""Of a new engine, not learnt from: it compiles, captures graphs and fills caches meanwhile."""


_STRETCH_TOKENS = 16_384
_STRETCH_S = 5.0
_STRETCH_PROMPTS = 4


class ReadingSeen(msgspec.Struct, frozen=True, gc=False):
    """`steps` ended with a prompt; `pairs` is the sum of `u·(u + 2·cached)` over the prompts, `tokens` of their uncached tokens
    `u`."""

    steps: int
    prompts: int
    tokens: int
    pairs: float
    seconds: float


class Mark(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Where a worker's sums stood at the first token of a request."""

    at: float
    sequence_s: float
    kv_token_s: float
    read_tokens: int


class WritingSeen(msgspec.Struct, frozen=True, gc=False):
    """Means over the time in which one request was written: sequences in the batch, their prompts' tokens of KV; and the prompt
    tokens that the worker read in this time."""

    seconds: float
    batch: float
    kv_tokens: float
    read_tokens: int

    def without(self, seconds: float) -> "WritingSeen":
        """Of which so many were none of the writing's."""
        return msgspec.structs.replace(self, seconds=self.seconds - seconds)


class Meter(msgspec.Struct, eq=False, omit_defaults=True):
    """One worker's; `newborn` counts down its first legs."""

    newborn: int = NEWBORN_LEGS
    # the stretch under way: since when, and what was read of it up to when
    since: float = 0.0
    until: float = 0.0
    steps: int = 0
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

    def has_to_read(self, at: float) -> None:
        """It had nothing to read, and gets something now."""
        self._begin_stretch(at)

    def read(self, at: float, tokens: int, cached: int, *, is_last: bool) -> ReadingSeen | None:
        """A prompt with `tokens` uncached ones was read by now; `is_last` where no other waits. The observation that this ends,
        if any: with the stretch, or with the step before this one."""
        self.read_tokens += tokens
        seen = None
        if at > self.until and self._is_long():
            seen = self._seen()
            self._begin_stretch(self.until)
        self.steps += at > self.until or not self.prompts
        self.prompts += 1
        self.tokens += tokens
        self.pairs += tokens * (tokens + 2.0 * cached)
        self.is_mixed |= self.writing > 0
        self.until = at
        if is_last:
            seen = self._seen() or seen
            self._begin_stretch(at)
        if self.newborn:
            self.newborn -= 1
            self.is_mixed = True
        return seen

    def _is_long(self) -> bool:
        if self.tokens >= _STRETCH_TOKENS:
            return True
        return self.prompts >= _STRETCH_PROMPTS and self.until - self.since >= _STRETCH_S

    def _seen(self) -> ReadingSeen | None:
        seconds = self.until - self.since
        if self.is_mixed or not self.tokens or seconds <= 0:
            return None
        return ReadingSeen(self.steps, self.prompts, self.tokens, self.pairs, seconds)

    def _begin_stretch(self, at: float) -> None:
        self.since = self.until = at
        self.steps = self.prompts = self.tokens = 0
        self.pairs = 0.0
        self.is_mixed = self.newborn > 0

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
