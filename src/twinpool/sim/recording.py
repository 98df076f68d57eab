"""What a simulation showed, in the terms of `measure`, in memory that does not grow with it.

The one difference to a load test: an engine knows all gaps of a step at once, so they are counted by batches, in the block of
time in which they came. A request's own gaps, on which its goodput hangs, are exact."""

from collections import Counter

from twinpool.config import Objectives
from twinpool.measure.blocks import OWN_GAPS_SHARE, STALL_FACTOR, Recorder, Window
from twinpool.sim.client import Ended
from twinpool.sim.stream_gaps import GapLimits, StreamGaps


class Recording(Recorder):
    """A recorder that is fed by a simulation's driver (`ended`) and engines (`tokens`)."""

    def __init__(self, window: Window, objectives: Objectives) -> None:
        super().__init__(window, objectives)
        self.gap_limits = GapLimits(objectives.slo_itl_s, STALL_FACTOR * objectives.slo_itl_s)
        self.outcomes: Counter[str] = Counter()
        self.paths: Counter[str] = Counter()  # of what finished
        self.misses = 0  # of the requests of the window
        self.read_tokens = 0  # of finished requests: prompt tokens that were computed
        self.written_tokens = 0
        self.last_end_s = 0.0

    def ended(self, end: Ended) -> None:
        offered, timeline = end.offered, end.timeline
        self.outcomes[end.outcome] += 1
        self.last_end_s = timeline.ended
        blocks = self.long if offered.is_long else self.short
        gaps, ttft_s = end.gaps, timeline.ttft_s
        is_met = self._is_met(gaps, ttft_s)
        if end.gaps is not None:
            self.paths[end.path or "none"] += 1
            self.read_tokens += offered.prompt_tokens - end.cached_tokens
            self.written_tokens += offered.output_tokens
            at = self._block_at(timeline.ended)
            if at is not None:
                blocks[at].finished += 1
        at = self._block_at(timeline.arrived)
        if at is None:
            return
        block = blocks[at]
        block.requests += 1
        block.met += is_met
        self.misses += not is_met
        if gaps is None or ttft_s is None:
            block.failed += 1
            self.failures[end.outcome] = self.failures.get(end.outcome, 0) + 1
            return
        block.prompt_tokens += offered.prompt_tokens
        block.output_tokens += offered.output_tokens
        block.cached_tokens += end.cached_tokens
        block.ttft_s.add(ttft_s)
        block.e2e_s.add(timeline.e2e_s)
        if gaps.gaps:
            block.worst_s.add(gaps.worst_s)
            block.stalled_s += gaps.stalled_s
            block.stream_s += gaps.total_s
        else:
            block.without_gaps += 1

    def _is_met(self, gaps: StreamGaps | None, ttft_s: float | None) -> bool:
        if gaps is None or ttft_s is None or ttft_s > self.objectives.slo_ttft_s:
            return False
        return gaps.worst_s <= self.gap_limits.stall_s and gaps.over <= OWN_GAPS_SHARE * gaps.gaps

    def tokens(self, at: float, short: int, long: int, gap_s: float | None) -> None:
        """A `Meter`."""
        block = self._block_at(at)
        if block is None:
            return
        for count, of in ((short, self.short[block]), (long, self.long[block])):
            if count:
                of.tokens_out += count
                if gap_s is not None:
                    of.itl_s.add(gap_s, count)

    @property
    def attainment_ratio(self) -> float:
        """Of the requests that arrived in the window, those that met the objectives."""
        blocks = [*self.short, *self.long]
        requests = sum(block.requests for block in blocks)
        return sum(block.met for block in blocks) / requests if requests else 0.0
