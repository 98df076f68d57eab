"""The gaps of one stream."""

from bisect import bisect_left

from hypothesis import given
from hypothesis import strategies as st

from twinpool.measure.gaps import BOUNDS_S, Gaps


def test_a_stream_without_a_second_piece_has_no_gap() -> None:
    gaps = Gaps(5.0)
    assert (sum(gaps.counts), gaps.total_s, gaps.worst_s) == (0, 0.0, 0.0)


def test_gaps_are_counted_from_one_piece_to_the_next() -> None:
    gaps = Gaps(10.0)
    for at in (10.0625, 10.125, 12.125):
        gaps.stamp(at)
    assert gaps.counts[bisect_left(BOUNDS_S, 0.0625)] == 2
    assert gaps.counts[bisect_left(BOUNDS_S, 2.0)] == 1
    assert (gaps.total_s, gaps.worst_s) == (2.125, 2.0)


def test_a_bound_belongs_to_its_own_bucket() -> None:
    gaps = Gaps(0.0)
    gaps.stamp(0.5)
    assert gaps.counts[BOUNDS_S.index(0.5)] == 1


def test_what_is_longer_than_every_bound_has_the_last_bucket() -> None:
    gaps = Gaps(0.0)
    gaps.stamp(31.0)
    assert gaps.counts[-1] == 1
    assert len(gaps.counts) == len(BOUNDS_S) + 1


def test_the_bounds_rise_and_hold_the_usual_objectives() -> None:
    assert list(BOUNDS_S) == sorted(set(BOUNDS_S))
    assert {0.025, 0.05} <= set(BOUNDS_S)


@given(st.lists(st.integers(0, 10_000), min_size=1))
def test_nothing_is_lost(steps: list[int]) -> None:
    gaps, at = Gaps(0.0), 0.0
    for step in steps:
        at += step / 256  # exact in binary
        gaps.stamp(at)
    assert sum(gaps.counts) == len(steps)
    assert gaps.total_s == sum(steps) / 256
    assert gaps.worst_s == max(steps) / 256
