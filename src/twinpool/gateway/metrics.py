"""The metrics of `GET /metrics`. Names and labels are a promise to dashboards: add to them, rename nothing."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from twinpool.config import Objectives
from twinpool.core.controller import Controller
from twinpool.core.decisions import Choice, Decision
from twinpool.core.events import HandoffNotProved, HandoffProved
from twinpool.core.lifecycle import HandleState, PairState, WorkerState
from twinpool.core.model import Failure, Leg, Role, Usage
from twinpool.gateway.calls import ClientRequest
from twinpool.gateway.indicators import ServiceIndicators
from twinpool.measure.gaps import BOUNDS_S, Gaps
from twinpool.measure.timeline import Timeline

_TTFT_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.3, 1.8, 2.5, 4.0, 6.0, 10.0, 20.0, 40.0, 80.0)
_E2E_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_HANDOFF_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_ERROR_BOUNDS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)


class Metrics:
    """What the driver tells, and what the controller can be asked at the moment of a scrape."""

    def __init__(self, controller: Controller, objectives: Objectives) -> None:
        self._long_prompt_tokens = objectives.long_prompt_tokens
        self.indicators = ServiceIndicators(controller, objectives)
        self.registry = registry = CollectorRegistry()
        self._requests = Counter(
            "twinpool_requests", "Requests that ended, by path and outcome.", ["path", "outcome"], registry=registry
        )
        self._sequences = Counter(
            "twinpool_sequences", "Answers asked for: a request for n of them counts n.", ["path"], registry=registry
        )
        self._prompt_tokens = Counter(
            "twinpool_prompt_tokens",
            "Prompt tokens of whole answers as engines counted them, each prompt once, however many engines had it.",
            ["path"],
            registry=registry,
        )
        self._ttft = Histogram(
            "twinpool_ttft_seconds",
            "Arrival to first token with content; streamed answers only.",
            ["length_class"],
            buckets=_TTFT_BOUNDS_S,
            registry=registry,
        )
        self._parts = Histogram(
            "twinpool_ttft_part_seconds",
            "The TTFT taken apart; the parts add up to it.",
            ["part"],
            buckets=_TTFT_BOUNDS_S,
            registry=registry,
        )
        self._e2e = Histogram(
            "twinpool_e2e_seconds", "Arrival to the end of a whole answer.", buckets=_E2E_BOUNDS_S, registry=registry
        )
        self._handoff_s = Histogram(
            "twinpool_handoff_seconds",
            "The decode leg's arrival at its worker until the KV is in place; workers that tell.",
            buckets=_HANDOFF_BOUNDS_S,
            registry=registry,
        )
        self._handoff_bytes = Counter(
            "twinpool_handoff_bytes", "KV handed from prefill to decode workers that tell.", registry=registry
        )
        self._decisions = Counter(
            "twinpool_decisions", "Decisions, by choice and reason.", ["choice", "reason"], registry=registry
        )
        self._prediction_errors = Histogram(
            "twinpool_ttft_prediction_error_ratio",
            "How far what was predicted from the decision to the first token lies from what it took, over what it took.",
            ["choice"],
            buckets=_ERROR_BOUNDS,
            registry=registry,
        )
        self._regret = Counter(
            "twinpool_regret_seconds",
            "What chosen ways were predicted to take longer to the first token than the least of all ways.",
            ["choice"],
            registry=registry,
        )
        self._leg_failures = Counter(
            "twinpool_leg_failures",
            "Legs that failed, those that were tried again included.",
            ["leg", "failure"],
            registry=registry,
        )
        self._canaries = Counter(
            "twinpool_canaries",
            "Small handoffs of our own, by what became of them.",
            ["outcome"],
            registry=registry,
        )
        self._pair_changes = Counter("twinpool_pair_changes", "Pairs that were proved or set aside.", ["to"], registry=registry)
        self._role_changes = Counter("twinpool_role_changes", "Workers that changed pool.", ["to", "reason"], registry=registry)
        self._gaps = _GapTotals()
        registry.register(self._gaps)
        registry.register(_ClusterNow(controller))
        registry.register(self.indicators)

    def render(self) -> bytes:
        """The text that a scrape gets."""
        return generate_latest(self.registry)

    def decided(self, decision: Decision) -> None:
        self._decisions.labels(decision.choice, decision.why).inc()

    def predicted(self, choice: Choice, error_ratio: float) -> None:
        self._prediction_errors.labels(choice).observe(error_ratio)

    def regretted(self, choice: Choice, seconds: float) -> None:
        self._regret.labels(choice).inc(max(0.0, seconds))

    def leg_failed(self, leg: Leg, failure: Failure) -> None:
        self._leg_failures.labels(leg, failure).inc()

    def canary_ended(self, event: HandoffProved | HandoffNotProved) -> None:
        outcome = "proved" if isinstance(event, HandoffProved) else "not_proved" if event.was_tried else "not_tried"
        self._canaries.labels(outcome).inc()

    def pair_changed(self, state: PairState) -> None:
        self._pair_changes.labels(state).inc()

    def role_changed(self, role: Role, reason: str) -> None:
        self._role_changes.labels(role, reason).inc()
        self.indicators.roles_changed()

    def turned_away(self) -> None:
        """A request that could not be routed at all: no key, no JSON, no such model. The driver never saw it."""
        self._requests.labels("none", "turned_away").inc()

    def ended(
        self, request: ClientRequest, outcome: str, timeline: Timeline, prompt_tokens: int, usage: Usage | None = None
    ) -> None:
        """One terminal outcome for each client request. What the client saw of a stream counts however it ended: those that
        break or are left are not the fast ones. The time of a whole answer is told of whole answers alone."""
        self._requests.labels(request.path, outcome).inc()
        self._sequences.labels(request.path).inc(request.call.facts.sequences)
        if outcome == "ok":
            self._e2e.observe(timeline.e2e_s)
            self._prompt_tokens.labels(request.path).inc(request.prompt_tokens or 0)
        if timeline.handoff_s is not None:
            self._handoff_s.observe(timeline.handoff_s)
        if request.handoff.moved_bytes is not None:
            self._handoff_bytes.inc(request.handoff.moved_bytes)
        if timeline.ttft_s is not None:
            length_class = "long" if prompt_tokens > self._long_prompt_tokens else "short"
            self._ttft.labels(length_class).observe(timeline.ttft_s)
            for part, seconds in timeline.ttft_parts_s().items():
                self._parts.labels(part).observe(seconds)
        gaps = (request.stream.gaps if request.stream is not None else None) or request.gaps
        if gaps is not None:
            self._gaps.add(gaps)
        worst_gap_s = None if gaps is None else gaps.worst_s
        self.indicators.ended(request, outcome, timeline, prompt_tokens, usage, worst_gap_s)


class _GapTotals(Collector):
    """The gaps of all streams that ended: each stream counts its own in passing, and they are summed here once."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._total_s = 0.0

    def add(self, gaps: Gaps) -> None:
        for bucket, count in enumerate(gaps.counts):
            self._counts[bucket] += count
        self._total_s += gaps.total_s

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily("twinpool_itl_seconds", "Gaps between the pieces of streamed answers.")
        family.add_metric([], list(self._buckets()), self._total_s)
        yield family

    def _buckets(self) -> Iterator[tuple[str, float]]:
        below = 0
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), self._counts, strict=True):
            below += count
            yield bound, below


class _ClusterNow(Collector):
    """The workers and handles as the controller knows them at the moment of the scrape."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def collect(self) -> Iterable[Metric]:
        workers = list(self._controller.cluster)
        states = GaugeMetricFamily("twinpool_workers", "Workers that have joined, by state.", labels=["state"])
        for worker_state in WorkerState:
            states.add_metric([worker_state], sum(worker.story.state is worker_state for worker in workers))
        pool = GaugeMetricFamily("twinpool_pool_workers", "Workers that are up.", labels=["role"])
        queue = GaugeMetricFamily(
            "twinpool_pool_queue_tokens", "Prompt tokens given to a pool and not known to be read.", labels=["role"]
        )
        for role in Role:
            of_role = [worker for worker in workers if worker.role is role]
            pool.add_metric([role], sum(worker.story.state is WorkerState.READY for worker in of_role))
            queue.add_metric([role], sum(worker.prefill_tokens for worker in of_role))
        handles = GaugeMetricFamily("twinpool_kv_handles", "Handles that have not ended.", labels=["state"])
        counts = self._controller.handles_by_state()
        for state in (HandleState.HELD, HandleState.SENT, HandleState.RELEASING, HandleState.ORPHANED):
            handles.add_metric([state], counts.get(state, 0))
        pairs = GaugeMetricFamily("twinpool_pairs", "Two workers that could hand over, by whether they may.", labels=["state"])
        for pair_state in PairState:
            pairs.add_metric([pair_state], sum(pair.state is pair_state for pair in self._controller.pairs()))
        errors = GaugeMetricFamily(
            "twinpool_cost_error_ratio",
            "Mean relative error of recent predictions of what a kind of worker takes.",
            labels=["kind", "predicted"],
        )
        for kind, found in self._controller.cost_errors().items():
            for predicted, ratio in found.items():
                errors.add_metric([kind, predicted], ratio)
        live, waiting = self._controller.live_requests, self._controller.waiting_requests()
        yield from (states, pool, queue, handles, pairs, errors)
        yield GaugeMetricFamily(
            "twinpool_prompt_length_error_ratio",
            "Mean relative error of recent guesses of a prompt's tokens, before an engine has counted them.",
            value=self._controller.prompt_length_error(),
        )
        yield GaugeMetricFamily("twinpool_requests_live", "Requests in the gateway.", value=live)
        yield GaugeMetricFamily("twinpool_requests_waiting", "Requests in the router's queue.", value=waiting)
