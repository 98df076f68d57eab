"""What a worker counts, in a registry of its own: two workers in one test process do not share numbers."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twinpool.worker.handles import HandleLedger
from twinpool.worker.slots import SlotPool

_HANDOFF_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 15.0, 60.0)


class WorkerMetrics:
    def __init__(self, pool: SlotPool, ledger: HandleLedger) -> None:
        self.registry = CollectorRegistry()
        self.prompt_tokens_computed = self._counter("prompt_tokens_computed", "Prompt tokens that llama.cpp evaluated here")
        self.prompt_tokens_cached = self._counter("prompt_tokens_cached", "Prompt tokens reused from a slot")
        self.prompt_tokens_handed_over = self._counter(
            "prompt_tokens_handed_over", "Prompt tokens whose KV came from another worker"
        )
        self.generation_tokens = self._counter("generation_tokens", "Tokens of finished choices")
        self.handoff_bytes = self._counter("handoff_bytes", "KV handed over", ("direction", "transport"))
        self.handoff_seconds = Histogram(
            "twinpool_worker_handoff_seconds",
            "From a decode leg's arrival until its KV was in place",
            buckets=_HANDOFF_BUCKETS_S,
            registry=self.registry,
        )
        self.requests = self._counter("requests", "Requests by what they were and how they ended", ("leg", "status"))
        self.registry.register(_Live(pool, ledger))

    def _counter(self, name: str, what: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"twinpool_worker_{name}", what, labels, registry=self.registry)


class _Live(Collector):
    """Read when asked: what pool and ledger know anyway is not counted twice."""

    def __init__(self, pool: SlotPool, ledger: HandleLedger) -> None:
        self._pool, self._ledger = pool, ledger

    def collect(self) -> Iterator[Metric]:
        gauges: tuple[tuple[str, str, float], ...] = (
            ("slots", "Requests that can run at once", self._pool.size),
            ("requests_running", "Slots taken", self._pool.running),
            ("requests_waiting", "Requests in the queue", self._pool.waiting),
            ("kv_held_bytes", "KV kept for handles", self._ledger.held_bytes()),
        )
        for name, what, value in gauges:
            yield GaugeMetricFamily(f"twinpool_worker_{name}", what, value)
        yield CounterMetricFamily("twinpool_worker_busy_seconds", "Time with at least one slot taken", self._pool.busy_s())
        held = GaugeMetricFamily("twinpool_worker_kv_handles", "Handles by state", labels=["state"])
        held.add_metric(["held"], len(self._ledger))
        yield held
        ended = CounterMetricFamily("twinpool_worker_kv_handles", "Handles by end", labels=["end"])
        for end in ("spent", "released", "expired"):
            ended.add_metric([end], self._ledger.ends[end])
        yield ended
