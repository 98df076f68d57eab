"""Streams beside long prompts."""

from itertools import pairwise
from random import Random

import pytest

from twinpool.measure.interference import Span, judge_interference

READS = [Span(10.0 * n, 10.0 * n + 4) for n in range(1, 9)]
CONTROLS = [Span(10.0 * n + 5, 10.0 * n + 9) for n in range(1, 9)]


def stream(pace_in_reads: float, *, gap_s: float = 0.05, until: float = 100.0, seed: int = 1) -> list[float]:
    """Tokens every `gap_s`, and in the reads as much slower."""
    rng, at, found = Random(seed), 0.0, []
    while at < until:
        is_slow = any(span.start <= at < span.end for span in READS)
        at += gap_s * rng.uniform(0.8, 1.2) / (pace_in_reads if is_slow else 1.0)
        found.append(at)
    return found


@pytest.mark.parametrize(("pace", "found"), [(0.02, "yes"), (0.3, "yes"), (0.7, "no"), (1.0, "no")])
def test_streams_that_slow_down_to_less_than_half_are_interfered_with(pace: float, found: str) -> None:
    seen = judge_interference([stream(pace, seed=seed) for seed in range(3)], READS, CONTROLS)
    assert seen.found == found
    assert seen.pace_ratio == pytest.approx(pace, abs=0.15)
    assert seen.control_pace_ratio == pytest.approx(1.0, abs=0.15)


def test_one_stream_that_stands_still_is_enough() -> None:
    """Many engines: the prompt's own is one of them."""
    assert judge_interference([stream(1.0), stream(0.05), stream(1.0, seed=3)], READS, CONTROLS).found == "yes"


def test_a_service_that_is_always_jerky_is_not_interfered_with() -> None:
    """Gaps of a second now and then, whether prompts are read or not: something else is wrong there."""
    at, jerky = 0.0, []
    while at < 100.0:
        at += 0.05 if len(jerky) % 20 else 1.0
        jerky.append(at)
    assert judge_interference([jerky], READS, CONTROLS).found == "no"


def test_the_worst_gap_is_the_one_that_touches_a_read() -> None:
    seen = judge_interference([stream(0.02)], READS, CONTROLS)
    assert seen.worst_gap_s == pytest.approx(2.5, abs=0.7)
    whole = max(b - a for a, b in pairwise(stream(0.02)))
    assert seen.worst_gap_s == whole


@pytest.mark.parametrize(("pace", "found"), [(0.1, "yes"), (1.0, "no")])
def test_streams_shorter_than_a_read_are_judged_by_the_part_they_ran_in(pace: float, found: str) -> None:
    """One begins and ends with each read, some begin between two: none runs all through a read."""
    whole = stream(pace)
    during = [[at for at in whole if span.start - 1 < at < span.end - 0.5] for span in READS]
    calm = [[at for at in whole if span.start <= at < span.end] for span in CONTROLS]
    assert judge_interference([*during, *calm], READS, CONTROLS).found == found


@pytest.mark.parametrize(
    ("streams", "reads", "controls", "why"),
    [
        ([], READS, CONTROLS, "no stream ran"),
        ([stream(0.1)], READS[:4], CONTROLS, "4 long prompts were read"),
        ([stream(0.1)], READS, [], "no stream ran"),
        ([stream(1.0, until=5.0), stream(1.0)[1720:]], READS, CONTROLS, "no stream ran long enough while 8 of 8"),
        ([stream(1.0)], [Span(span.start, span.start + 0.1) for span in READS], CONTROLS, "too short a time"),
    ],
)
def test_it_says_when_it_cannot_tell(streams: list[list[float]], reads: list[Span], controls: list[Span], why: str) -> None:
    seen = judge_interference(streams, reads, controls)
    assert seen.found == "unknown"
    assert why in seen.why
