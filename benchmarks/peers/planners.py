"""The peers' planners, as their papers and documents describe them, on a fleet of fixed size: one more is one less of the
other.

They get roles changed softly and at once, as the project does it; some of them restart workers in truth, and are better here
than there."""

from collections import deque
from collections.abc import Sequence

from twinpool.config import Objectives
from twinpool.core.cluster import WorkerView
from twinpool.core.model import Role
from twinpool.measure.indicators import UnitCosts
from twinpool.sim.client import Ended

Change = tuple[str, Role]


def _of(workers: Sequence[WorkerView], role: Role) -> list[WorkerView]:
    return [worker for worker in workers if worker.role is role]


def _to_prefill(workers: Sequence[WorkerView]) -> Change | None:
    """The decode worker with least to write; the last one stays."""
    decodes = _of(workers, Role.DECODE)
    if len(decodes) < 2:
        return None
    return min(decodes, key=lambda worker: (worker.sequences, worker.facts.worker)).facts.worker, Role.PREFILL


def _to_decode(workers: Sequence[WorkerView]) -> Change | None:
    prefills = _of(workers, Role.PREFILL)
    if len(prefills) < 2:
        return None
    return min(prefills, key=lambda worker: (worker.prefill_tokens, worker.facts.worker)).facts.worker, Role.DECODE


class Arrow:
    """Arrow (arXiv 2505.11916): instances change pools when the predicted TTFT breaks its objective while decode has room, and
    back when the running tokens of decode exceed what keeps the TPOT, or when prefill has nothing to do."""

    every_s = 1.0

    def __init__(self, objectives: Objectives, costs: UnitCosts, running_most: int) -> None:
        self._objectives = objectives
        self._costs = costs
        self._running_most = running_most  # sequences of one worker whose step keeps the objective

    def ended(self, end: Ended) -> None:
        pass

    def look(self, at: float, workers: Sequence[WorkerView], waiting: int) -> Change | None:
        prefills, decodes = _of(workers, Role.PREFILL), _of(workers, Role.DECODE)
        backlog_s = sum(worker.prefill_tokens for worker in prefills) * self._costs.prefill_s_per_token / max(1, len(prefills))
        running = sum(worker.sequences for worker in decodes)
        if running > self._running_most * len(decodes):
            return _to_decode(workers)
        if backlog_s > self._objectives.slo_ttft_s and running < self._running_most * (len(decodes) - 1):
            return _to_prefill(workers)
        if not backlog_s and running > 0.5 * self._running_most * len(decodes):
            return _to_decode(workers)
        return None


class Dynamo:
    """NVIDIA Dynamo's planner on load: every interval the mean TTFT and ITL of what ended are held against their targets, and
    at most one worker is moved: to prefill when only the TTFT misses, to decode when only the ITL does."""

    every_s = 10.0

    def __init__(self, objectives: Objectives) -> None:
        self._objectives = objectives
        self._ttft_s: list[float] = []
        self._itl_s: list[float] = []

    def ended(self, end: Ended) -> None:
        if end.timeline.ttft_s is not None and end.gaps is not None and end.gaps.gaps:
            self._ttft_s.append(end.timeline.ttft_s)
            self._itl_s.append(end.gaps.total_s / end.gaps.gaps)

    def look(self, at: float, workers: Sequence[WorkerView], waiting: int) -> Change | None:
        if not self._ttft_s:
            return None
        ttft = sum(self._ttft_s) / len(self._ttft_s) / self._objectives.slo_ttft_s
        itl = sum(self._itl_s) / len(self._itl_s) / self._objectives.slo_itl_s
        self._ttft_s.clear()
        self._itl_s.clear()
        if ttft > 1 >= itl:
            return _to_prefill(workers)
        if itl > 1 >= ttft:
            return _to_decode(workers)
        return None


class Dopd:
    """DOPD (arXiv 2511.20982): the ratio of prefill to decode workers that the last minutes' lengths ask for at full batches;
    one worker a look toward it."""

    every_s = 10.0

    def __init__(self, costs: UnitCosts, over_s: float = 60.0) -> None:
        self._costs = costs
        self._over_s = over_s
        self._seen: deque[tuple[float, int, int]] = deque()

    def ended(self, end: Ended) -> None:
        self._seen.append((end.timeline.ended, end.offered.prompt_tokens, end.offered.output_tokens))

    def look(self, at: float, workers: Sequence[WorkerView], waiting: int) -> Change | None:
        while self._seen and self._seen[0][0] < at - self._over_s:
            self._seen.popleft()
        read_s = sum(prompt for _, prompt, _ in self._seen) * self._costs.prefill_s_per_token
        write_s = sum(output for _, _, output in self._seen) * self._costs.decode_s_per_token
        if not read_s + write_s:
            return None
        wanted = min(max(1, round(len(workers) * read_s / (read_s + write_s))), len(workers) - 1)
        now = len(_of(workers, Role.PREFILL))
        if wanted > now:
            return _to_prefill(workers)
        return _to_decode(workers) if wanted < now else None
