"""From samples to the figures that every report has."""

from random import Random
from typing import TypeVar

import msgspec
import pytest

from twinpool.config import Objectives
from twinpool.measure.blocks import Recorder, Window
from twinpool.measure.indicators import Indicators, Limits, judge
from twinpool.measure.report import Figures, Report, Tallied, figures_of, ratio_intervals, report_of
from twinpool.measure.sample import Sample

T = TypeVar("T")
MINUTE = Window(0.0, 60.0)


def sample(at_s: float = 1.0, **but: object) -> Sample:
    """Ten tokens, 20 ms apart, after 100 ms."""
    known: dict[str, object] = {
        "meant_at_s": at_s,
        "is_long": False,
        "prompt_tokens": 100,
        "output_tokens": 10,
        "ttft_s": 0.1,
        "e2e_s": 0.28,
        "gaps_s": [0.02] * 9,
    }
    return Sample(**(known | but))  # type: ignore[arg-type]


def known(told: T | None) -> T:
    assert told is not None
    return told


def report(*samples: Sample, window: Window = MINUTE) -> Report:
    recorder = Recorder(window, Objectives())
    for one in samples:
        recorder.add(one)
    seen = Indicators()
    return report_of([recorder], seen, judge(seen, Limits()), Random(1))


def test_the_keys_are_those_of_every_report() -> None:
    found = msgspec.to_builtins(report(sample()))
    assert set(found) >= {
        *("requests", "failed", "throughput_req_s", "throughput_output_tok_s", "goodput_req_s", "ttft_s", "itl_s", "e2e_s"),
        *("itl_worst_s", "stalled_time_ratio", "short", "long", "utilization_mean_ratio", "utilization_at_peak_ratio"),
        *("useful_work_ratio", "verdict", "reasons"),
    }
    for key in ("ttft_s", "itl_s", "e2e_s"):
        assert set(found[key]) == {"mean", "p50", "p90", "p99"}
    assert set(found["itl_worst_s"]) >= {"p50", "p90", "p99"}
    assert set(found["short"]) >= {"requests", "ttft_s", "itl_worst_s", "stalled_time_ratio", "goodput_req_s"}


def test_a_steady_minute_comes_out_as_it_was() -> None:
    found = report(*(sample(at_s / 10) for at_s in range(600)))
    assert (found.requests, found.failed) == (600, 0)
    assert found.throughput_req_s == pytest.approx(10, rel=0.02)
    assert found.throughput_output_tok_s == pytest.approx(100, rel=0.02)
    assert found.goodput_req_s == pytest.approx(10, rel=0.01)
    assert found.ttft_s is not None
    assert found.ttft_s.mean == pytest.approx(0.1)
    assert found.itl_s is not None
    assert found.itl_s.p99 == pytest.approx(0.02, rel=0.01)
    assert found.e2e_s is not None
    assert found.e2e_s.p50 == pytest.approx(0.28, rel=0.01)
    assert found.stalled_time_ratio == 0
    assert (found.prompt_tokens_mean, found.output_tokens_mean) == (100, 10)


def test_classes_are_told_apart_and_together_they_are_all() -> None:
    found = report(*(sample(at_s, is_long=at_s % 3 == 0, ttft_s=1.0 if at_s % 3 == 0 else 0.1) for at_s in range(60)))
    assert (found.short.requests, found.long.requests, found.requests) == (40, 20, 60)
    assert known(found.long.ttft_s).mean == pytest.approx(1.0)
    assert known(found.short.ttft_s).mean == pytest.approx(0.1)
    assert known(found.ttft_s).mean == pytest.approx(0.4)


def test_a_single_stall_is_seen_where_percentiles_of_gaps_are_blind() -> None:
    streams = [sample(at_s % 60, output_tokens=101, gaps_s=[0.02] * 100) for at_s in range(100)]
    streams[50] = sample(50, output_tokens=101, gaps_s=[0.02] * 50 + [15.0] + [0.02] * 49)
    found = report(*streams)
    assert known(found.itl_s).p99 == pytest.approx(0.02, rel=0.01)
    assert known(found.itl_worst_s).max == 15.0
    assert known(found.itl_worst_s).p99 < 15.0  # one stream in a hundred: only the maximum must show it
    assert found.stalled_time_ratio == pytest.approx(15 / (100 * 100 * 0.02 + 15 - 0.02))
    assert found.goodput_req_s == pytest.approx(99 / 60)


def test_tokens_that_come_five_at_a_time_are_counted_by_the_engine_s_usage() -> None:
    """BM-01: an ITL by pieces would be 100 ms. The piece's own gap is the worst gap."""
    found = report(sample(output_tokens=50, gaps_s=[0.1] * 9))
    assert known(found.itl_s).mean == pytest.approx(0.02)
    assert known(found.itl_worst_s).max == pytest.approx(0.1)
    assert found.throughput_output_tok_s == pytest.approx(50 / 60)


def test_an_answer_of_one_token_has_no_itl_and_is_counted_as_such() -> None:
    """BM-07: neither a division by zero nor an ITL of nought."""
    found = report(sample(output_tokens=1, gaps_s=[]), sample())
    assert (found.without_gaps, found.requests) == (1, 2)
    assert known(found.itl_s).mean == pytest.approx(0.02)
    assert report(sample(output_tokens=1, gaps_s=[])).itl_s is None


def test_what_failed_is_shown_and_none_of_its_times_count() -> None:
    """BM-04."""
    broken = sample(failure="error_in_stream", ttft_s=0.001)
    found = report(*[sample()] * 8, broken, broken)
    assert (found.requests, found.failed, found.failures) == (10, 2, {"error_in_stream": 2})
    assert known(found.ttft_s).mean == pytest.approx(0.1)
    assert found.throughput_output_tok_s == pytest.approx(8 * 10 / 60)


def test_goodput_takes_both_objectives_and_one_gap_in_a_hundred() -> None:
    slow_start = sample(ttft_s=1.31)
    one_in_a_hundred = sample(output_tokens=101, gaps_s=[0.02] * 99 + [0.4])
    two_in_a_hundred = sample(output_tokens=101, gaps_s=[0.02] * 98 + [0.06] * 2)
    one_stall = sample(output_tokens=101, gaps_s=[0.02] * 99 + [0.51])
    for one, met in ((sample(), 1), (slow_start, 0), (one_in_a_hundred, 1), (two_in_a_hundred, 0), (one_stall, 0)):
        assert report(one).goodput_req_s == pytest.approx(met / 60)


def test_the_beginning_and_the_end_of_a_test_are_not_counted() -> None:
    window = Window.of(100)
    assert (window.start_s, window.end_s) == (10, 95)
    found = report(*(sample(at_s, ttft_s=9.0 if at_s < 10 or at_s >= 95 else 0.1) for at_s in range(100)), window=window)
    assert found.requests == 85
    assert known(found.ttft_s).mean == pytest.approx(0.1)
    assert found.measured_s == 85


def test_an_overloaded_service_finishes_less_than_it_is_sent() -> None:
    """BM-03: two a second arrive, one a second is served; each waits for all before it."""
    samples = [sample(n / 2, ttft_s=0.5 * n + 0.1, e2e_s=0.5 * n + 0.28) for n in range(120)]
    found = report(*samples)
    assert found.throughput_req_s == pytest.approx(1.0, rel=0.03)
    assert found.requests == 120
    halves = [known(report(*samples, window=Window(*half)).ttft_s) for half in ((0, 30), (30, 60))]
    assert halves[1].mean - halves[0].mean == pytest.approx(30.0, rel=0.02)  # it grows


def test_twice_as_long_a_test_says_the_same() -> None:
    """BM-11: a queue at 70 % load, from empty; the warm-up is cut, so the length of the test does not show."""

    def queue(duration_s: float, seed: int) -> Report:
        rng, at_s, free_s, samples = Random(seed), 0.0, 0.0, []
        while (at_s := at_s + rng.expovariate(7.0)) < duration_s:
            free_s = max(at_s, free_s) + rng.uniform(0.05, 0.15)
            samples.append(sample(at_s, ttft_s=free_s - at_s, e2e_s=free_s - at_s + 0.2))
        return report(*samples, window=Window.of(duration_s))

    once, twice = queue(1000, 1), queue(2000, 2)
    assert known(once.ttft_s).p50 == pytest.approx(known(twice.ttft_s).p50, rel=0.1)


def test_intervals_hold_the_truth_nearly_always_though_requests_queue() -> None:
    """Requests behind each other share a queue: intervals that took them for independent would be far too narrow."""
    held = 0
    truth = 0.1 * (1 + 0.5 / (1 - 0.5))  # M/M/1 at half load: mean time in the system is 1/(mu - lambda)
    for seed in range(40):
        rng, at_s, free_s = Random(seed), 0.0, 0.0
        recorder = Recorder(Window(0, 300), Objectives())
        while (at_s := at_s + rng.expovariate(5.0)) < 300:
            free_s = max(at_s, free_s) + rng.expovariate(10.0)
            recorder.add(sample(at_s, ttft_s=free_s - at_s))
        low, high = figures_of([[block] for block in recorder.short], Random(1)).intervals["ttft_s"]["mean"]
        held += low <= truth <= high
    assert held >= 35


def test_a_ratio_s_interval_uses_that_both_had_the_same_traffic() -> None:
    """The traffic's own ups and downs, ten times the effect, fall out of the comparison."""
    base, other = Recorder(MINUTE, Objectives()), Recorder(MINUTE, Objectives())
    for n in range(600):
        hard = 1 + 5 * (n // 100 % 2)
        base.add(sample(n / 10, ttft_s=0.1 * hard))
        other.add(sample(n / 10, ttft_s=0.08 * hard))
    tallied, tallied_base = (Tallied([[block] for block in recorder.short]) for recorder in (other, base))
    figures = {"ttft": lambda found: found["ttft_s"]["mean"]}
    ratio, interval = ratio_intervals(tallied, tallied_base, figures, Random(1))["ttft"]
    assert ratio == pytest.approx(0.8)
    assert interval == pytest.approx((0.8, 0.8))


def test_rounds_of_one_test_add_up() -> None:
    rounds = [Recorder(Window(0, 10), Objectives()) for _ in range(3)]
    for number, recorder in enumerate(rounds):
        for _ in range(10 * (number + 1)):
            recorder.add(sample())
    seen = Indicators()
    found = report_of(rounds, seen, judge(seen, Limits()), Random(1))
    assert (found.requests, found.measured_s) == (60, 30)
    assert found.throughput_req_s == pytest.approx(2.0)


def test_without_any_request_there_are_no_times() -> None:
    found = report()
    assert isinstance(found.short, Figures)
    assert (found.requests, found.ttft_s, found.stalled_time_ratio, found.intervals["throughput_req_s"]) == (
        0,
        None,
        None,
        (0, 0),
    )
