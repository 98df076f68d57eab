"""Where the time of a request went: the parts add up to the TTFT, and none is negative."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.measure.timeline import PARTS, Timeline


def test_a_handoff_that_the_engine_measured() -> None:
    timeline = Timeline(arrived=10.0, sent=10.25, prefilled=11.0, first_token=11.5, ended=14.0, handoff_s=0.125)
    assert timeline.ttft_s == 1.5
    assert timeline.e2e_s == 4.0
    assert timeline.ttft_parts_s() == {"queue": 0.25, "prefill": 0.75, "handoff": 0.125, "first_decode": 0.375}


def test_a_handoff_that_nobody_measured_is_one_part_with_the_first_decode() -> None:
    timeline = Timeline(arrived=10.0, sent=10.25, prefilled=11.0, first_token=11.5, ended=14.0)
    assert timeline.ttft_parts_s() == {"queue": 0.25, "prefill": 0.75, "handoff_and_first_decode": 0.5}


def test_one_worker_has_no_handoff() -> None:
    timeline = Timeline(arrived=10.0, sent=10.25, first_token=11.5, ended=14.0)
    assert timeline.ttft_parts_s() == {"queue": 0.25, "prefill": 1.25}


@pytest.mark.parametrize("timeline", [Timeline(arrived=0.0, ended=1.0), Timeline(arrived=0.0, sent=0.5, ended=1.0)])
def test_without_a_first_token_there_is_no_ttft(timeline: Timeline) -> None:
    assert timeline.ttft_s is None
    assert timeline.ttft_parts_s() == {}


def test_a_prefill_that_answers_after_the_first_token_had_ended_by_then() -> None:
    """Where both legs run at once, P's answer can come last."""
    timeline = Timeline(arrived=0.0, sent=1.0, first_token=2.0, prefilled=2.5, ended=3.0)
    assert timeline.ttft_parts_s() == {"queue": 1.0, "prefill": 1.0, "handoff_and_first_decode": 0.0}


def test_a_handoff_cannot_take_longer_than_there_was_time() -> None:
    timeline = Timeline(arrived=0.0, sent=0.0, prefilled=1.0, first_token=2.0, ended=2.0, handoff_s=5.0)
    assert timeline.ttft_parts_s() == {"queue": 0.0, "prefill": 1.0, "handoff": 1.0, "first_decode": 0.0}


TICKS = st.integers(0, 1000)


@given(TICKS, TICKS, TICKS | st.none(), TICKS, TICKS | st.none())
def test_the_parts_add_up(queue: int, first: int, prefill: int | None, rest: int, handoff: int | None) -> None:
    sent = queue / 64
    timeline = Timeline(
        arrived=0.0,
        sent=sent,
        prefilled=None if prefill is None else sent + prefill / 64,
        first_token=sent + first / 64,
        ended=sent + (first + rest) / 64,
        handoff_s=None if handoff is None else handoff / 64,
    )
    parts = timeline.ttft_parts_s()
    assert sum(parts.values()) == timeline.ttft_s
    assert min(parts.values()) >= 0
    assert set(parts) <= set(PARTS)
