"""The indicators of a service that runs."""

import pytest

from twinpool.measure.indicators import Limits
from twinpool.measure.live import WINDOWS_KEPT, LiveIndicators


def live(*workers: str) -> LiveIndicators:
    found = LiveIndicators(Limits(), 0.0)
    found.workers_are(0.0, dict.fromkeys(workers or ("a", "b"), "colocated"))
    return found


def test_a_worker_is_busy_while_it_has_a_leg_however_many() -> None:
    seen = live()
    seen.leg_began(1.0, "a")
    seen.leg_began(2.0, "a")
    seen.leg_ended(3.0, "a")
    seen.leg_ended(5.0, "a")
    assert seen.busy(9.0) == {"a": (4.0, 0.0), "b": (0.0, 0.0)}
    assert seen.busy(10.0) == {"a": (4.0, 0.4), "b": (0.0, 0.0)}
    indicators, _ = seen.read(10.0)
    assert (indicators.utilization_mean_ratio, indicators.windows) == (0.2, 1)


def test_a_leg_that_spans_windows_is_counted_in_each() -> None:
    seen = live("a")
    seen.leg_began(5.0, "a")
    indicators, _ = seen.read(40.0)
    assert indicators.utilization_mean_ratio == pytest.approx((0.5 + 1 + 1 + 1) / 4)
    assert seen.busy(41.0) == {"a": (36.0, 1.0)}


def test_the_peak_is_where_most_was_offered() -> None:
    seen = live("a")
    for window in range(40):
        start = window * 10.0
        is_peak = window in (7, 19, 23, 31)
        seen.arrived(start, 5000.0 if is_peak else 100.0)
        seen.leg_began(start, "a")
        seen.leg_ended(start + (9.5 if is_peak else 2.0), "a")
    indicators, judged = seen.read(400.0)
    assert indicators.utilization_at_peak_ratio == pytest.approx(0.95)
    assert indicators.utilization_mean_ratio == pytest.approx((4 * 9.5 + 36 * 2.0) / 400)
    assert judged.verdict == "unknown"  # no long request was seen


def test_long_requests_make_the_first_indicator_and_the_verdict() -> None:
    seen = live("a")
    seen.leg_began(0.0, "a")
    for number in range(20):
        seen.ended(number * 1.0, is_long=True, is_failed=False, ttft_s=1.0, prompt_tokens=3000, output_tokens=10)
        seen.ended(number * 1.0, is_long=False, is_failed=False, ttft_s=99.0)
    indicators, judged = seen.read(400.0)
    assert (indicators.ttft_long_s, indicators.long_requests) == (1.0, 20)
    assert judged.verdict == "pass"
    for _ in range(2):
        seen.ended(401.0, is_long=True, is_failed=True, ttft_s=None)
    assert seen.read(402.0)[1].verdict == "fail"


def test_only_the_last_hour_counts() -> None:
    seen = live("a")
    seen.ended(1.0, is_long=True, is_failed=False, ttft_s=9.0)
    seen.leg_began(1.0, "a")
    seen.leg_ended(9.0, "a")
    later = 10.0 * (WINDOWS_KEPT + 2)
    indicators, _ = seen.read(later)
    assert (indicators.long_requests, indicators.utilization_mean_ratio, indicators.windows) == (0, 0.0, WINDOWS_KEPT)


def test_a_long_silence_costs_no_time_and_loses_no_busy_second() -> None:
    seen = live("a")
    seen.leg_began(0.0, "a")
    assert seen.busy(1e9)["a"] == (pytest.approx(1e9), 1.0)
    assert seen.read(1e9)[0].utilization_mean_ratio == pytest.approx(1.0)


def test_a_worker_that_left_keeps_no_room_and_one_that_came_is_counted() -> None:
    seen = live("a")
    seen.leg_began(0.0, "a")
    seen.leg_ended(10.0, "a")
    seen.workers_are(10.0, {"b": "prefill", "c": "decode"})
    assert set(seen.busy(12.0)) == {"b", "c"}
    assert seen.read(20.0)[0].utilization_mean_ratio == pytest.approx((1.0 + 0.0) / 2)


def test_useful_work_is_measured_against_the_best_that_was_seen() -> None:
    """Half the requests cost twice as much as the cheapest; busy all the time."""
    seen = live("a")
    assert seen.read(5.0)[0].useful_work_ratio is None
    for number in range(40):
        slow = 1 + number % 2
        seen.cost_seen(prefill=(0.1 * slow, 100), decode=(1.0 * slow, 100, 2))
    costs = seen.costs()
    assert costs is not None
    assert costs.prefill_s_per_token == pytest.approx(0.001, rel=0.01)
    assert costs.decode_s_per_token == pytest.approx(0.005, rel=0.01)
    seen.ended(6.0, is_long=False, is_failed=False, ttft_s=0.1, prompt_tokens=1000, output_tokens=800)
    assert seen.read(10.0)[0].useful_work_ratio == pytest.approx((1.0 + 4.0) / 10, rel=0.01)


def test_short_prompts_and_answers_of_one_token_teach_nothing() -> None:
    seen = live("a")
    for _ in range(100):
        seen.cost_seen(prefill=(0.1, 5), decode=(0.0, 1, 1))
    assert seen.costs() is None


def test_a_window_keeps_what_is_drawn_of_it() -> None:
    seen = LiveIndicators(Limits(), 0.0)
    seen.workers_are(0.0, {"a": "prefill", "b": "decode"})
    seen.waiting_are(1.0, 3)
    seen.waiting_are(2.0, 1)
    seen.ended(3.0, is_long=False, is_failed=False, ttft_s=0.2, worst_gap_s=0.05)
    seen.ended(4.0, is_long=True, is_failed=False, ttft_s=0.8, worst_gap_s=0.4)
    seen.ended(5.0, is_long=True, is_failed=True, ttft_s=None, outcome="refused")
    seen.workers_are(12.0, {"a": "prefill", "b": "prefill"})
    (past,), now, passed_s = seen.windows(13.0, 90)
    assert (past.pools, now.pools) == ({"prefill": 1, "decode": 1}, {"prefill": 2})
    assert (past.waiting_most, now.waiting_most) == (3, 1), "who waits when a window ends waits in the next one too"
    assert (past.short_ttft_s, past.short_answered, past.long_ttft_s, past.long_answered) == (0.2, 1, 0.8, 1)
    assert (past.worst_gap_s, now.worst_gap_s) == (0.4, None)
    assert past.ended == {"ok": 2, "refused": 1}
    assert passed_s == pytest.approx(3.0)


def test_only_the_last_windows_are_given() -> None:
    seen = live("a")
    past, _, passed_s = seen.windows(4321.0, 90)
    assert len(past) == 90
    assert passed_s == pytest.approx(1.0)
