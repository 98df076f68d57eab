"""The samples of one test, counted into equal stretches of its time.

    |── warm-up ──|── block 1 ──|── block 2 ──| … |── block 20 ──|── the last twentieth ──|
                  └──────────────── counted ─────────────────────┘

What a request felt counts in the block in which it was meant to be sent; a finished answer, and each token, in the block in
which it came: an overloaded service finishes less than it is sent. The blocks are what confidence intervals are drawn from:
requests that follow each other share a queue, so they are no independent draws, but stretches of time nearly are.
"""

from math import fsum
from typing import Self

import msgspec

from twinpool.config import Objectives
from twinpool.measure.digest import Digest
from twinpool.measure.sample import Sample

BLOCKS = 20
WARM_UP_SHARE = 0.1
COOL_DOWN_SHARE = 0.05
STALL_FACTOR = 10
"""A gap over this many times the ITL objective is a stall."""
OWN_GAPS_SHARE = 0.01
"""Of a request's own gaps, so many may be over the ITL objective."""

WARM_UP_RULE = (
    f"requests meant to be sent in the first {WARM_UP_SHARE:.0%} and the last {COOL_DOWN_SHARE:.0%} of the time load the "
    "service and are not counted; the counted time is the time between"
)


class Window(msgspec.Struct, frozen=True):
    """The counted seconds of a test, from the beginning of its traffic."""

    start_s: float
    end_s: float

    @classmethod
    def of(cls, duration_s: float) -> Self:
        """By `WARM_UP_RULE`."""
        return cls(WARM_UP_SHARE * duration_s, (1 - COOL_DOWN_SHARE) * duration_s)

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class Block:
    """Counts and digests of one length class in one stretch of time."""

    __slots__ = (
        "cached_tokens",
        "e2e_s",
        "failed",
        "finished",
        "itl_s",
        "met",
        "output_tokens",
        "prompt_tokens",
        "requests",
        "seconds",
        "stalled_s",
        "stream_s",
        "tokens_out",
        "ttft_s",
        "without_gaps",
        "worst_s",
    )

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.requests = self.failed = self.met = self.finished = self.without_gaps = 0
        self.prompt_tokens = self.output_tokens = self.cached_tokens = 0  # of answered requests
        self.tokens_out = 0.0  # that came within the block
        self.stalled_s = self.stream_s = 0.0
        self.ttft_s, self.itl_s, self.e2e_s, self.worst_s = Digest(), Digest(), Digest(), Digest()


class Recorder:
    """Counts samples, in any order. Its memory does not grow with them."""

    def __init__(self, window: Window, objectives: Objectives, blocks: int = BLOCKS) -> None:
        self.window = window
        self.objectives = objectives
        self.failures: dict[str, int] = {}
        self._seconds = window.seconds
        self.short = [Block(self._seconds / blocks) for _ in range(blocks)]
        self.long = [Block(self._seconds / blocks) for _ in range(blocks)]

    def add(self, sample: Sample) -> None:
        blocks = self.long if sample.is_long else self.short
        if sample.failure is None and sample.e2e_s is not None:
            self._count_output(sample, blocks)
        at = self._block_at(sample.meant_at_s)
        if at is None:
            return
        block = blocks[at]
        block.requests += 1
        if sample.failure is not None:
            block.failed += 1
            self.failures[sample.failure] = self.failures.get(sample.failure, 0) + 1
            return
        block.prompt_tokens += sample.prompt_tokens
        block.output_tokens += sample.output_tokens
        block.cached_tokens += sample.cached_tokens
        if sample.ttft_s is not None:
            block.ttft_s.add(sample.ttft_s)
        if sample.e2e_s is not None:
            block.e2e_s.add(sample.e2e_s)
        self._count_gaps(sample, block)

    def _count_gaps(self, sample: Sample, block: Block) -> None:
        """Each gap spread over the tokens of its piece for the ITL, and as it was for the worst and for stalls."""
        limit_s, stall_s = self.objectives.slo_itl_s, STALL_FACTOR * self.objectives.slo_itl_s
        gaps = sample.gaps_s
        over = worst_s = stalled_s = 0.0
        if not gaps:
            block.without_gaps += 1
        else:
            tokens = _tokens_a_piece(sample)
            add = block.itl_s.add
            for gap_s in gaps:
                add(gap_s / tokens, tokens)
                if gap_s > limit_s * tokens:
                    over += 1
                if gap_s > stall_s:
                    stalled_s += gap_s
                if gap_s > worst_s:
                    worst_s = gap_s
            block.worst_s.add(worst_s)
            block.stalled_s += stalled_s
            block.stream_s += fsum(gaps)
        in_time = sample.ttft_s is not None and sample.ttft_s <= self.objectives.slo_ttft_s
        block.met += in_time and worst_s <= stall_s and over <= OWN_GAPS_SHARE * len(gaps)

    def _count_output(self, sample: Sample, blocks: list[Block]) -> None:
        """The answer, and its tokens, where in time they came."""
        if sample.e2e_s is None:
            return
        at = self._block_at(sample.meant_at_s + sample.e2e_s)
        if at is not None:
            blocks[at].finished += 1
        if sample.ttft_s is None:
            if at is not None:
                blocks[at].tokens_out += sample.output_tokens
            return
        tokens = _tokens_a_piece(sample)
        moment_s = sample.meant_at_s + sample.ttft_s
        for gap_s in (0.0, *sample.gaps_s):
            moment_s += gap_s
            at = self._block_at(moment_s)
            if at is not None:
                blocks[at].tokens_out += tokens

    def _block_at(self, at_s: float) -> int | None:
        window = self.window
        if not window.start_s <= at_s < window.end_s:
            return None
        return min(int((at_s - window.start_s) / self._seconds * len(self.short)), len(self.short) - 1)


def _tokens_a_piece(sample: Sample) -> float:
    return max(1, sample.output_tokens) / (len(sample.gaps_s) + 1)
