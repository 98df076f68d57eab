"""The last decisions: what each way was predicted to take until the first token, and what the chosen one took.

`predicted_ttft_s` and `ttft_s` count from the request's arrival, as a TTFT does: what had gone by before the decision is added
to what was predicted then. The ways, and the errors of their predictions, count from the decision on. The regret is what the
chosen way was predicted to take longer than the least of all: what room or the ITL objective was worth.
"""

from collections import deque
from collections.abc import Iterator
from time import monotonic
from typing import Any

from twinpool.core.decisions import Choice, Decision, Forecast
from twinpool.core.events import FirstTokenArrived
from twinpool.gateway.decision_words import words
from twinpool.gateway.metrics import Metrics

KEPT = 1000


class Recorded:
    """One decision, its moment and the request's arrival on `time.monotonic`. `ttft_s` is None until the first token came, and
    for ever where the answer is not streamed or never began that way."""

    __slots__ = ("arrived", "at", "attempt", "decision", "request", "ttft_s")

    def __init__(self, at: float, arrived: float, request: str, attempt: int, decision: Decision) -> None:
        self.at = at
        self.arrived = arrived
        self.request = request
        self.attempt = attempt
        self.decision = decision
        self.ttft_s: float | None = None

    @property
    def predicted_ttft_s(self) -> float | None:
        predicted_s = self.decision.predicted_ttft_s
        return None if predicted_s is None else self.at - self.arrived + predicted_s


class DecisionLog:
    """The newest are kept, and of live requests those that led to the present attempt."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._kept: deque[Recorded] = deque(maxlen=KEPT)
        self._open: dict[str, list[Recorded]] = {}
        self._answered: set[str] = set()
        self.regret_s = 0.0
        """Of all requests that were sent on their way."""

    def add(self, at: float, arrived: float, request: str, attempt: int, decision: Decision) -> None:
        recorded = Recorded(at, arrived, request, attempt, decision)
        self._kept.append(recorded)
        self._metrics.decided(decision)
        if decision.choice is Choice.REFUSE:
            return
        if request not in self._answered:
            self._open.setdefault(request, []).append(recorded)
        regret_s = regret_of(decision)
        if regret_s is not None and decision.choice is not Choice.WAIT:
            self.regret_s += regret_s
            self._metrics.regretted(decision.choice, regret_s)

    def answered(self, event: FirstTokenArrived) -> None:
        """The first token of that attempt came: of its decision, and of the wait before it where there was one. A stream that
        another worker goes on with has no second one."""
        if event.request not in self._open:
            return
        self._answered.add(event.request)
        for recorded in self._open.pop(event.request):
            if recorded.attempt not in (event.attempt, event.attempt - 1):
                continue
            is_way = recorded.decision.choice is not Choice.WAIT
            if is_way != (recorded.attempt == event.attempt):
                continue
            recorded.ttft_s = event.at - recorded.arrived
            predicted_s, took_s = recorded.decision.predicted_ttft_s, event.at - recorded.at
            if is_way and predicted_s is not None and took_s > 0:
                self._metrics.predicted(recorded.decision.choice, abs(predicted_s - took_s) / took_s)

    def ended(self, request: str) -> None:
        self._open.pop(request, None)
        self._answered.discard(request)

    def recent(self, count: int) -> list[dict[str, Any]]:
        """The newest last, JSON-ready; ages and costs in seconds."""
        return list(self._recent(count))

    def _recent(self, count: int) -> Iterator[dict[str, Any]]:
        now = monotonic()
        for recorded in list(self._kept)[-count:]:
            decision = recorded.decision
            yield {
                "age_s": round(now - recorded.at, 3),
                "request": recorded.request,
                "attempt": recorded.attempt,
                "choice": str(decision.choice),
                "why": str(decision.why),
                "prefill": decision.prefill,
                "decode": decision.decode,
                "words": words(decision),
                "cached_tokens": decision.cached_tokens,
                "ways_s": _ways(decision.forecast),
                "predicted_ttft_s": _rounded(recorded.predicted_ttft_s),
                "ttft_s": _rounded(recorded.ttft_s),
                "regret_s": regret_of(decision),
            }


def regret_of(decision: Decision) -> float | None:
    """Seconds; None where nothing was predicted."""
    predicted_s = decision.predicted_ttft_s
    ways = _ways(decision.forecast)
    if predicted_s is None or ways is None:
        return None
    return round(predicted_s - min((s for s in ways.values() if s is not None), default=predicted_s), 4)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _ways(forecast: Forecast | None) -> dict[str, float | None] | None:
    """None for a way that was not open; no dictionary where nothing is known of costs."""
    if forecast is None:
        return None
    return {"pair": forecast.pair_s, "decode": forecast.decode_s, "prefill": forecast.prefill_s}
