"""Do running streams stand still while a long prompt is read?

    a stream's tokens  ||||||||||            |         |||||||||||||||||||||||||
    long prompts             |── read ──────────────|      |── nothing else ──|
                                the window              its control

A stream's pace in a window is its tokens there by those it writes in as long a time otherwise. Of each window the slowest
stream counts: where prompts and streams are spread over many engines, only those on the prompt's own engine stand still. A pool
of engines that reads prompts elsewhere leaves the pace as it is.
"""

from bisect import bisect_left
from collections.abc import Sequence
from statistics import median
from typing import Literal

import msgspec

STOOD_STILL_PACE = 0.5
"""Under half of its usual pace, a reader notices."""

FEWEST_WINDOWS = 5
FEWEST_TOKENS = 3.0
"""That a stream would usually write in a window: fewer cannot tell."""

FEWEST_OF_A_PART = 10.0
"""The same, of a stream that begins or ends within the window."""


class Span(msgspec.Struct, frozen=True):
    """Seconds on the streams' clock."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Interference(msgspec.Struct, frozen=True, kw_only=True):
    """`pace_ratio`: of the slowest stream while a long prompt was read, the median over the prompts; `control_pace_ratio`: the
    same where none was. `worst_gap_s` is the longest gap that touches a window in which a prompt was read."""

    found: Literal["yes", "no", "unknown"]
    windows: int
    pace_ratio: float | None = None
    control_pace_ratio: float | None = None
    usual_gap_s: float | None = None
    worst_gap_s: float | None = None
    why: str = ""


def judge_interference(streams: Sequence[Sequence[float]], reads: Sequence[Span], controls: Sequence[Span]) -> Interference:
    """`streams` are the moments of each stream's tokens, rising; `reads` the windows from a long prompt's sending to its first
    token, `controls` windows without one."""
    usual_gap_s = _usual_gap(streams, controls)
    if usual_gap_s is None:
        return Interference(found="unknown", windows=0, why="no stream ran while no long prompt was read")
    during = _paces(streams, reads, usual_gap_s)
    calm = _paces(streams, controls, usual_gap_s)
    worst = max((gap for stream in streams for span in reads for gap in _gaps_touching(stream, span)), default=None)
    seen = Interference(found="unknown", windows=len(during), usual_gap_s=usual_gap_s, worst_gap_s=worst)
    if len(during) < FEWEST_WINDOWS or len(calm) < FEWEST_WINDOWS:
        why = f"{len(during)} long prompts were read beside running streams, {FEWEST_WINDOWS} are needed"
        short = sum(_expected(span, usual_gap_s) < FEWEST_TOKENS for span in reads)
        if short > len(reads) / 2:
            why = f"long prompts are read within {FEWEST_TOKENS:g} tokens of a stream: too short a time to see it in"
        elif (alone := len(reads) - short - len(during)) > len(reads) / 2:
            why = f"no stream ran long enough while {alone} of {len(reads)} long prompts were read"
        return msgspec.structs.replace(seen, why=why)
    pace, control = median(during), median(calm)
    found = "yes" if pace < STOOD_STILL_PACE * control else "no"
    return msgspec.structs.replace(seen, found=found, pace_ratio=pace, control_pace_ratio=control)


def _usual_gap(streams: Sequence[Sequence[float]], controls: Sequence[Span]) -> float | None:
    gaps = [gap for stream in streams for span in controls for gap in _gaps_within(stream, span)]
    return median(gaps) if gaps else None


def _paces(streams: Sequence[Sequence[float]], spans: Sequence[Span], usual_gap_s: float) -> list[float]:
    """The slowest stream's in each span, of the streams that ran all through it; where none did, of those in a part."""
    flowing = [stream for stream in streams if len(stream) > 1]
    found = []
    for span in spans:
        if _expected(span, usual_gap_s) < FEWEST_TOKENS:
            continue
        parts = [(stream, Span(max(span.start, stream[0]), min(span.end, stream[-1]))) for stream in flowing]
        whole = [(stream, part) for stream, part in parts if part == span]
        enough = whole or [(stream, part) for stream, part in parts if _expected(part, usual_gap_s) >= FEWEST_OF_A_PART]
        if enough:
            found.append(min(_tokens_in(stream, part) / _expected(part, usual_gap_s) for stream, part in enough))
    return found


def _expected(span: Span, usual_gap_s: float) -> float:
    """Tokens that a stream usually writes in it."""
    return span.seconds / usual_gap_s if usual_gap_s else 0.0


def _tokens_in(stream: Sequence[float], span: Span) -> int:
    return bisect_left(stream, span.end) - bisect_left(stream, span.start)


def _gaps_within(stream: Sequence[float], span: Span) -> list[float]:
    first, last = bisect_left(stream, span.start), bisect_left(stream, span.end)
    return [stream[at + 1] - stream[at] for at in range(first, last - 1)]


def _gaps_touching(stream: Sequence[float], span: Span) -> list[float]:
    first, last = max(bisect_left(stream, span.start) - 1, 0), min(bisect_left(stream, span.end), len(stream) - 1)
    return [stream[at + 1] - stream[at] for at in range(first, last)]
