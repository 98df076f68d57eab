"""Each decision with what every way was predicted to take, and what the chosen one took."""

import pytest

from twinpool.assemble import build_controller
from twinpool.config import Objectives, Routing
from twinpool.core.decisions import Choice, Decision, Forecast, Why
from twinpool.core.events import FirstTokenArrived
from twinpool.gateway.decision_log import DecisionLog, regret_of
from twinpool.gateway.metrics import Metrics

PAIR = Decision(Choice.DISAGGREGATED, Why.PAIR_READY, "p", "d", forecast=Forecast(pair_s=0.5, decode_s=0.2, prefill_s=0.4))
WHOLE = Decision(Choice.COLOCATED, Why.DECODE_SOONER, decode="d", forecast=Forecast(pair_s=0.5, decode_s=0.2))
FULL = Decision(Choice.COLOCATED, Why.DECODE_FULL, decode="p", forecast=Forecast(pair_s=0.3, decode_s=0.2, prefill_s=0.4))
WAIT = Decision(Choice.WAIT, Why.PREFILL_BUSY, forecast=Forecast(pair_s=2.0))
BLIND = Decision(Choice.COLOCATED, Why.NO_PREFILL_WORKER, decode="d")


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(build_controller(Routing()), Objectives())


@pytest.fixture
def log(metrics: Metrics) -> DecisionLog:
    return DecisionLog(metrics)


def sample(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


@pytest.mark.parametrize(
    ("decision", "predicted_s", "regret_s"),
    [
        (PAIR, 0.5, 0.3),
        (WHOLE, 0.2, 0.0),
        (FULL, 0.4, 0.2),
        (WAIT, 2.0, 0.0),
        (BLIND, None, None),
    ],
)
def test_the_chosen_way_and_what_it_costs_more_than_the_least(
    decision: Decision, predicted_s: float | None, regret_s: float | None
) -> None:
    assert decision.predicted_ttft_s == predicted_s
    assert regret_of(decision) == (None if regret_s is None else pytest.approx(regret_s))


def test_what_it_took_from_arrival_stands_beside_what_was_predicted_of_the_wait_too(log: DecisionLog, metrics: Metrics) -> None:
    log.add(1.0, 0.5, "r", 0, WAIT)
    log.add(2.0, 0.5, "r", 1, PAIR)
    assert [shown["ttft_s"] for shown in log.recent(10)] == [None, None]
    log.answered(FirstTokenArrived(at=3.0, request="r", attempt=1))
    assert [(shown["predicted_ttft_s"], shown["ttft_s"]) for shown in log.recent(10)] == [(2.5, 2.5), (2.0, 2.5)]
    assert log.recent(1)[0]["ways_s"] == {"pair": 0.5, "decode": 0.2, "prefill": 0.4}
    name = "twinpool_ttft_prediction_error_ratio"
    assert sample(metrics, f"{name}_sum", choice="disaggregated") == pytest.approx(0.5)
    assert sample(metrics, f"{name}_count", choice="wait") is None, "each request counts once"


def test_an_attempt_that_was_given_up_took_no_time_to_a_token(log: DecisionLog) -> None:
    log.add(1.0, 1.0, "r", 1, PAIR)
    log.add(2.0, 1.0, "r", 2, WHOLE)
    log.answered(FirstTokenArrived(at=3.0, request="r", attempt=2))
    assert [shown["ttft_s"] for shown in log.recent(10)] == [None, 2.0]


def test_a_stream_that_is_gone_on_with_has_one_first_token(log: DecisionLog, metrics: Metrics) -> None:
    log.add(1.0, 1.0, "r", 1, PAIR)
    log.answered(FirstTokenArrived(at=2.0, request="r", attempt=1))
    log.add(5.0, 1.0, "r", 2, WHOLE)
    log.answered(FirstTokenArrived(at=6.0, request="r", attempt=2))
    assert [shown["ttft_s"] for shown in log.recent(10)] == [1.0, None]
    assert sample(metrics, "twinpool_ttft_prediction_error_ratio_count", choice="colocated") is None


def test_regret_is_summed_and_exported(log: DecisionLog, metrics: Metrics) -> None:
    for n, decision in enumerate((PAIR, WHOLE, FULL, WAIT, BLIND)):
        log.add(float(n), float(n), f"r{n}", 1, decision)
    assert log.regret_s == pytest.approx(0.5)
    assert sample(metrics, "twinpool_regret_seconds_total", choice="disaggregated") == pytest.approx(0.3)
    assert sample(metrics, "twinpool_regret_seconds_total", choice="colocated") == pytest.approx(0.2)


def test_nothing_is_kept_of_requests_that_ended(log: DecisionLog) -> None:
    for n in range(2000):
        log.add(0.0, 0.0, f"r{n}", 1, PAIR)
        log.answered(FirstTokenArrived(at=1.0, request=f"r{n}", attempt=1))
        log.ended(f"r{n}")
        log.answered(FirstTokenArrived(at=1.0, request=f"r{n}", attempt=1))
    assert not log._open
    assert not log._answered
    assert len(log.recent(10_000)) == 1000
