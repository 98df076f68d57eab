"""What a step of an engine takes: the truth of the simulation. `policy` guesses with formulas of its own and never sees this
one.

    pure decode    decode(batch, mean context), from the profile's table
    pure prefill   L(chunk) + b · Σ((done + chunk)² - done²)
    mixed          decode + L(batch + chunk) - L(batch) + b · Σ(…) + what a mixed step costs extra

L is the batch-1 prefill curve without its quadratic part, b that part (attention). A decode step is on its floor until its
batch pays for the weights it reads; a chunk that joins it then costs only what the larger matrix products take. Between the
table's points everything is linear. Beyond them: a longer context goes on in its last line; a larger batch adds the slope of
L and its own KV reads. The share of steps beyond the table is counted, since their figure is a guess."""

from bisect import bisect_left

from twinpool.measure.indicators import UnitCosts
from twinpool.profile import Profile

_TABULATED_TOKENS = 9216
"""L is looked up, not searched, up to here: a step of the usual budget of 8,192 tokens with its batch."""

_Segment = tuple[float, float, float]  # up to this context, seconds at context 0, seconds a token of context


class StepCost:
    """Seconds for one step of an engine with this profile."""

    def __init__(self, profile: Profile) -> None:
        points = [(tokens, ms / 1e3) for tokens, ms in profile.prefill_ms]
        (before, before_s), (last, last_s) = points[-2:]
        self.attention_s = max(0.0, (last_s / last - before_s / before) / (last - before))
        self._lengths = [tokens for tokens, _ in points]
        self._linear_s = [seconds - self.attention_s * tokens * tokens for tokens, seconds in points]
        self._tabulated = [self._interpolated(tokens) for tokens in range(_TABULATED_TOKENS)]
        self._batches = profile.batches
        self._contexts = profile.contexts
        self._cells = {(batch, context): ms / 1e3 for batch, context, ms in profile.decode_step_ms}
        self._rows: dict[int, list[_Segment]] = {}
        self._extra_s = profile.mixed_step_extra_ms / 1e3
        self.largest_batch = self._batches[-1]
        self.longest_context = self._contexts[-1]

    def decode(self, batch: int, context_tokens: float) -> float:
        """A step of `batch` sequences, one token each, whose contexts sum to `context_tokens`."""
        mean = context_tokens / batch
        row = self._rows.get(batch)
        if row is None:
            row = self._rows[batch] = self._row(batch)
        for up_to, at_zero, slope in row:
            if mean <= up_to:
                return at_zero + slope * mean
        raise ValueError(f"a context of {mean} tokens")

    def prefill(self, chunk_tokens: int, attended: float) -> float:
        """A step that only reads: `chunk_tokens` of prompts; `attended` is Σ((done + chunk)² - done²) over them."""
        return self.linear(chunk_tokens) + self.attention_s * attended

    def mixed(self, batch: int, context_tokens: float, chunk_tokens: int, attended: float) -> float:
        """A step that does both. Where a profile's floor for decode lies under that for prefill, a small batch with a chunk
        comes out below the chunk alone: to the good of colocated engines. What it truly costs is to be measured."""
        added = self.linear(batch + chunk_tokens) - self.linear(batch)
        return self.decode(batch, context_tokens) + added + self.attention_s * attended + self._extra_s

    def linear(self, tokens: int) -> float:
        """L: a step over `tokens` tokens, without attention."""
        return self._tabulated[tokens] if tokens < _TABULATED_TOKENS else self._interpolated(tokens)

    def at_full_batches(self, profile: Profile, itl_s: float) -> UnitCosts:
        """What useful work is counted in: a token of a long batch of prompts, and one of the largest batch of a context of
        2,000 tokens that fits and keeps the ITL objective (of the table's, where none does)."""
        full, context = 4096, 2000
        batch = 1
        for more in range(2, profile.max_sequences + 1):
            if more * context > profile.kv_tokens or self.decode(more, more * context) > itl_s:
                break
            batch = more
        return UnitCosts(
            prefill_s_per_token=self.linear(full) / full,
            decode_s_per_token=self.decode(batch, batch * context) / batch,
        )

    def _interpolated(self, tokens: int) -> float:
        lengths, seconds = self._lengths, self._linear_s
        high = min(max(bisect_left(lengths, tokens), 1), len(lengths) - 1)
        slope = (seconds[high] - seconds[high - 1]) / (lengths[high] - lengths[high - 1])
        return max(0.0, seconds[high] + slope * (tokens - lengths[high]))  # a curve that bends upwards meets 0 before no tokens

    def _row(self, batch: int) -> list[_Segment]:
        """The line segments over the context for one batch; the first and the last go on to either side."""
        values = [self._at_grid_context(batch, context) for context in self._contexts]
        beyond = max(0, batch - self.largest_batch)
        segments = []
        for low, high, low_s, high_s in zip(self._contexts, self._contexts[1:], values, values[1:], strict=False):
            slope = (high_s - low_s) / (high - low)
            segments.append((float(high), low_s - slope * low, slope))
        if beyond:
            added = self.linear(batch) - self.linear(self.largest_batch)
            low, high = self._contexts[-2:]
            read_s = (self._cells[self.largest_batch, high] - self._cells[self.largest_batch, low]) / (high - low)
            read_s *= beyond / self.largest_batch
            segments = [(up_to, at_zero + added, slope + read_s) for up_to, at_zero, slope in segments]
        _, at_zero, slope = segments[-1]
        segments[-1] = (float("inf"), at_zero, slope)
        return segments

    def _at_grid_context(self, batch: int, context: int) -> float:
        batches = self._batches
        batch = min(batch, batches[-1])
        high = min(max(bisect_left(batches, batch), 1), len(batches) - 1)
        low_s, high_s = self._cells[batches[high - 1], context], self._cells[batches[high], context]
        return low_s + (high_s - low_s) * (batch - batches[high - 1]) / (batches[high] - batches[high - 1])
