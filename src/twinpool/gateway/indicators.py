"""The indicators of this service, as its gateway sees them: what the driver tells, by the definitions of `measure`."""

import asyncio
from collections.abc import Iterable
from time import monotonic
from typing import Any

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twinpool.config import Objectives
from twinpool.core.controller import Controller
from twinpool.core.lifecycle import WorkerState
from twinpool.core.model import RequestFacts, Usage
from twinpool.gateway.calls import ClientRequest
from twinpool.gateway.history import describe_history
from twinpool.measure.indicators import WINDOW_S, Limits
from twinpool.measure.live import LiveIndicators
from twinpool.measure.timeline import Timeline

_NOT_OURS = frozenset({"ok", "client_left", "rejected"})
"""Ends of requests that are no failure of the service."""

LATELY_S = 300.0
HISTORY_WINDOWS = 90  # a quarter of an hour


class ServiceIndicators(Collector):
    """Told by the driver; read by a scrape and by `twinpool status`."""

    def __init__(self, controller: Controller, objectives: Objectives) -> None:
        self._controller = controller
        self._objectives = objectives
        self._limits = Limits(ttft_long_s=objectives.slo_ttft_s)
        self._live = LiveIndicators(self._limits, monotonic())
        self._workers_known_until = 0.0

    def arrived(self, facts: RequestFacts) -> None:
        self._know_workers(monotonic())
        self._live.arrived(monotonic(), self._controller.estimate_prompt_tokens(facts))
        self._know_queue()

    def leg_runs(self, task: "asyncio.Task[None]", worker: str) -> None:
        """The worker is busy until the leg's task is over."""
        self._live.leg_began(monotonic(), worker)
        self._know_queue()
        task.add_done_callback(lambda _: self._live.leg_ended(monotonic(), worker))

    def roles_changed(self) -> None:
        self._know_workers(monotonic(), is_asked=True)

    def ended(
        self,
        request: ClientRequest,
        outcome: str,
        timeline: Timeline,
        prompt_tokens: int,
        usage: Usage | None,
        worst_gap_s: float | None,
    ) -> None:
        """A client's request is over; `usage` where it got a whole answer."""
        computed = max(0, usage.prompt_tokens - (request.cached_tokens or 0)) if usage is not None else 0
        written = usage.completion_tokens if usage is not None else 0
        self._live.ended(
            monotonic(),
            is_long=prompt_tokens > self._objectives.long_prompt_tokens,
            is_failed=outcome not in _NOT_OURS,
            ttft_s=timeline.ttft_s,
            prompt_tokens=computed,
            output_tokens=written,
            worst_gap_s=worst_gap_s,
            outcome=outcome,
        )
        self._know_queue()
        read_until = timeline.prefilled or timeline.first_token
        prefill = decode = None
        if usage is not None and timeline.sent is not None and read_until is not None:
            prefill = (read_until - timeline.sent, computed)
        if usage is not None and timeline.first_token is not None:
            decode = (timeline.ended - timeline.first_token, written - 1, self._live.legs_of(request.decode))
        self._live.cost_seen(prefill=prefill, decode=decode)

    def now(self) -> dict[str, Any]:
        """For `/admin/state`: JSON-ready, with the verdict and its reasons."""
        self._know_workers(monotonic(), is_asked=True)
        seen, judged = self._live.read(monotonic())
        return {
            "ttft_long_s": seen.ttft_long_s,
            "long_requests": seen.long_requests,
            "utilization_mean_ratio": seen.utilization_mean_ratio,
            "utilization_at_peak_ratio": seen.utilization_at_peak_ratio,
            "windows": seen.windows,
            "useful_work_ratio": seen.useful_work_ratio,
            **msgspec.to_builtins(judged),
            "limits": {
                "ttft_long_s": self._limits.ttft_long_s,
                "utilization_floor_ratio": self._limits.utilization_floor_ratio,
                "itl_s": self._objectives.slo_itl_s,
                "long_prompt_tokens": self._objectives.long_prompt_tokens,
            },
        }

    def busy_ratios(self) -> dict[str, float]:
        """Of each worker that is up: the share of the last whole window that it had work."""
        return {worker: ratio for worker, (_, ratio) in self._live.busy(monotonic()).items()}

    def ended_lately(self) -> dict[str, int]:
        """How many requests ended how in the last `LATELY_S`."""
        past, now, _ = self._live.windows(monotonic(), int(LATELY_S / WINDOW_S))
        return dict(sum((window.ended for window in past), now.ended))

    def ttft_lately(self) -> dict[str, dict[str, Any]]:
        """By length class: how many first tokens of the requests that ended in the last `LATELY_S`, and their mean in seconds
        (None without any)."""
        past, now, _ = self._live.windows(monotonic(), int(LATELY_S / WINDOW_S))
        windows = [*past, now]
        sums = {
            "short": (sum(each.short_ttft_s for each in windows), sum(each.short_answered for each in windows)),
            "long": (sum(each.long_ttft_s for each in windows), sum(each.long_answered for each in windows)),
        }
        return {
            name: {"requests": count, "mean_s": total_s / count if count else None} for name, (total_s, count) in sums.items()
        }

    def history(self) -> dict[str, Any]:
        """For `/admin/history`."""
        self._know_workers(monotonic(), is_asked=True)
        self._know_queue()
        return describe_history(*self._live.windows(monotonic(), HISTORY_WINDOWS))

    def collect(self) -> Iterable[Metric]:
        """What could not be seen yet has no sample: nought would be a figure."""
        found = self.now()
        ratio = GaugeMetricFamily(
            "twinpool_worker_busy_ratio", "Share of the last ten seconds that the worker had work.", labels=["worker", "role"]
        )
        total = CounterMetricFamily(
            "twinpool_worker_busy_seconds", "Time in which the worker had work.", labels=["worker", "role"]
        )
        for worker, (busy_s, last_ratio) in self._live.busy(monotonic()).items():
            known = self._controller.cluster.get(worker)
            labels = [worker, str(known.role) if known is not None else ""]
            ratio.add_metric(labels, last_ratio)
            total.add_metric(labels, busy_s)
        yield from (ratio, total)
        for name, what, key in _GAUGES:
            gauge = GaugeMetricFamily(name, f"{what}, of the last hour.")
            if found[key] is not None:
                gauge.add_metric([], found[key])
            yield gauge
        verdict = GaugeMetricFamily("twinpool_indicator_verdict", "1 for the verdict that holds.", labels=["verdict"])
        for name in ("pass", "fail", "unknown"):
            verdict.add_metric([name], float(found["verdict"] == name))
        yield verdict

    def _know_workers(self, now: float, *, is_asked: bool = False) -> None:
        """Once a window is enough: a worker that came or went changes its mean, not the sums."""
        if now < self._workers_known_until and not is_asked:
            return
        up = (worker for worker in self._controller.cluster if worker.story.state is not WorkerState.LOST)
        self._live.workers_are(now, {worker.facts.worker: str(worker.role) for worker in up})
        self._workers_known_until = now + WINDOW_S

    def _know_queue(self) -> None:
        self._live.waiting_are(monotonic(), self._controller.waiting_requests())


_GAUGES = (
    ("twinpool_indicator_ttft_long_seconds", "Mean TTFT of long requests", "ttft_long_s"),
    ("twinpool_indicator_utilization_mean_ratio", "Mean share of the time that workers had work", "utilization_mean_ratio"),
    (
        "twinpool_indicator_utilization_at_peak_ratio",
        "The same in the busiest tenth of ten-second windows by offered load",
        "utilization_at_peak_ratio",
    ),
    (
        "twinpool_indicator_useful_work_ratio",
        "What the finished tokens would cost at full batches over workers times time",
        "useful_work_ratio",
    ),
)
