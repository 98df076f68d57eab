"""The verdict: its limits, and when it cannot tell."""

import msgspec
import pytest

from twinpool.measure.indicators import Indicators, Limits, Load, UnitCosts, judge, use_of, useful_work_ratio

FIT = Indicators(ttft_long_s=1.0, long_requests=30, utilization_mean_ratio=0.7, utilization_at_peak_ratio=0.92, windows=40)


def _but(**other: object) -> Indicators:
    return msgspec.structs.replace(FIT, **other)


def test_both_fit_is_a_pass_with_a_reason_each() -> None:
    judged = judge(FIT, Limits())
    assert judged.verdict == "pass"
    assert judged.reasons == (
        "TTFT of 30 long requests: mean 1.00 s, within the limit of 1.3 s",
        "use at the peak 92% (mean use 70%, 40 windows), at or over the floor of 85%",
    )


@pytest.mark.parametrize(
    ("limits", "verdict"),
    [
        (Limits(), "pass"),
        (Limits(ttft_long_s=1.0), "pass"),
        (Limits(ttft_long_s=0.99), "fail"),
        (Limits(utilization_floor_ratio=0.92), "pass"),
        (Limits(utilization_floor_ratio=0.93), "fail"),
    ],
)
def test_a_change_of_limits_flips_the_verdict(limits: Limits, verdict: str) -> None:
    assert judge(FIT, limits).verdict == verdict


@pytest.mark.parametrize(
    ("seen", "verdict", "says"),
    [
        (_but(utilization_mean_ratio=None, utilization_at_peak_ratio=None), "unknown", "not observable: no metrics"),
        (_but(utilization_at_peak_ratio=None, windows=29), "unknown", "29 windows of 10 s, 30 are needed"),
        (_but(long_requests=19), "unknown", "19 long requests were answered, 20 are needed"),
        (_but(ttft_long_s=None, long_requests=0), "unknown", "0 long requests"),
        (_but(ttft_long_s=9.9, utilization_mean_ratio=None), "fail", "over the limit"),
        (_but(utilization_at_peak_ratio=0.2, long_requests=3), "fail", "under the floor"),
        (_but(long_failed=2), "fail", "2 of 32 long requests got no whole answer"),
        (_but(long_failed=1), "pass", "within"),
    ],
)
def test_what_cannot_be_observed_is_unknown_and_what_is_not_fit_fails(seen: Indicators, verdict: str, says: str) -> None:
    judged = judge(seen, Limits())
    assert judged.verdict == verdict
    assert says in " | ".join(judged.reasons)


def test_use_at_the_peak_is_that_of_the_busiest_tenth_by_offered_load() -> None:
    windows = [Load(offered=float(n), busy_ratio=n / 100) for n in range(40)]
    mean, peak, count = use_of(reversed(windows))
    assert count == 40
    assert mean == pytest.approx(0.195)
    assert peak == pytest.approx((0.36 + 0.37 + 0.38 + 0.39) / 4)


def test_a_peak_that_is_not_the_busiest_shows() -> None:
    """Idle just when most is asked: this is what the indicator is for."""
    windows = [Load(1.0, 0.95)] * 36 + [Load(9.0, 0.3)] * 4
    mean, peak, _ = use_of(windows)
    assert mean == pytest.approx(0.885)
    assert peak == pytest.approx(0.3)


def test_windows_that_nobody_saw_do_not_count() -> None:
    assert use_of([Load(1.0, None)] * 50) == (None, None, 0)
    mean, peak, count = use_of([Load(1.0, None)] * 50 + [Load(1.0, 0.5)] * 29)
    assert (mean, peak, count) == (0.5, None, 29)


def test_useful_work_is_what_the_tokens_would_cost_at_full_batches() -> None:
    costs = UnitCosts(prefill_s_per_token=0.001, decode_s_per_token=0.01)
    assert useful_work_ratio(costs, prompt_tokens=3000, output_tokens=200, workers=2, seconds=10) == pytest.approx(0.25)
    assert useful_work_ratio(costs, prompt_tokens=3000, output_tokens=200, workers=0, seconds=10) is None
