"""What each kind of worker takes for its work: straight lines, fitted online to legs that ended, a profile's figures as the
prior.

It shares no formula with the simulator's engines, and knows less: no step is seen from here, only prompts that were read and
answers that were written."""

from math import fsum, inf

import msgspec

from twinpool.core.law import CostPrior
from twinpool.core.meters import ReadingSeen, WritingSeen
from twinpool.policy.fits import Fit, FitRecord

_Rows = list[tuple[tuple[float, ...], float, float]]

_PRIOR_WEIGHT = 10.0
_SHAPE_WEIGHT = 1.0

# What engines take, up to a factor, where nobody measured: then samples that hardly differ say nothing wrong of others.
_READING: _Rows = [((1.0, n, n * n), 100.0 + n + n * n / 32_000.0, _SHAPE_WEIGHT) for n in (64.0, 512.0, 2048.0, 8192.0)]
_STEP: _Rows = [
    ((1.0, batch, kv, 0.0), 1.0 + 0.05 * batch + 1e-5 * kv, _SHAPE_WEIGHT)
    for batch, kv in ((1.0, 512.0), (16.0, 4096.0), (16.0, 65_536.0), (128.0, 65_536.0))
]
_HANDOFF: _Rows = [((1.0, n), 200.0 + n, _SHAPE_WEIGHT) for n in (64.0, 1024.0, 8192.0)]

ITL_SHARE = 0.9
"""Of the ITL objective, that a step may take by the estimate."""


class KindCosts:
    """The present estimates for one kind; seconds. `limit_s` is how long a step may take by the ITL objective. Where not even
    the smallest keeps that, it is twice a usual step: who cannot keep an objective is not left idle for it."""

    def __init__(
        self,
        reading: list[float],
        step: list[float],
        handoff: list[float],
        *,
        mixed_s: float,
        free_tokens: float,
        free_sequence_tokens: float,
        most_batch: float,
        a_prompt_s: float,
        itl_s: float,
    ) -> None:
        self.read_s, self.read_token_s, self.read_pair_s = reading
        self.a_prompt_s = a_prompt_s
        self.step_s, self.step_sequence_s, self.step_kv_token_s, self.mixed_token_s = step
        self.handoff_s, self.handoff_token_s = handoff
        self.mixed_s = mixed_s
        self.free_tokens = free_tokens
        self.free_sequence_tokens = free_sequence_tokens
        self.most_batch = most_batch
        self.is_hopeless = self.step(2, 4000) >= ITL_SHARE * itl_s
        self.limit_s = 2 * self.step(64, 128_000) if self.is_hopeless else ITL_SHARE * itl_s

    def as_prior(self) -> CostPrior:
        """For another one to start from."""
        return CostPrior(
            read_s=self.read_s,
            read_token_s=self.read_token_s,
            read_pair_s=self.read_pair_s,
            step_s=self.step_s,
            step_sequence_s=self.step_sequence_s,
            step_kv_token_s=self.step_kv_token_s,
            mixed_s=self.mixed_s,
            mixed_token_s=self.mixed_token_s,
            free_tokens=self.free_tokens,
            free_sequence_tokens=self.free_sequence_tokens,
            handoff_s=self.handoff_s,
            handoff_token_s=self.handoff_token_s,
            most_batch=None if self.most_batch == inf else self.most_batch,
        )

    def read(self, tokens: int, cached: int) -> float:
        """One prompt among others: what a worker that has more to read takes for it."""
        return self.a_prompt_s + tokens * (self.read_token_s + self.read_pair_s * (tokens + 2.0 * cached))

    def step(self, batch: float, kv_tokens: float, chunk: float = 0.0) -> float:
        seconds = self.step_s + self.step_sequence_s * batch + self.step_kv_token_s * kv_tokens
        return seconds + self.added(batch, chunk) if chunk else seconds

    def added(self, batch: float, chunk: float) -> float:
        """By a chunk of so many prompt tokens to a step that writes for `batch` sequences."""
        return max(0.0, self.mixed_s + self.mixed_token_s * (chunk - self.free(batch)))

    def free(self, batch: float) -> float:
        """Prompt tokens that such a step takes along for nothing: it is on its floor."""
        return max(0.0, self.free_tokens - self.free_sequence_tokens * batch)

    def largest_chunk(self, batch: float, step_s: float, limit_s: float) -> float:
        """Prompt tokens that a step which takes `step_s` for `batch` sequences can take along within the limit."""
        left = limit_s - step_s - self.mixed_s
        if self.mixed_token_s <= 0:
            return inf if left > 0 else 0.0
        return left / self.mixed_token_s + self.free(batch)

    def handoff(self, tokens: int) -> float:
        return self.handoff_s + self.handoff_token_s * tokens


class _Kind:
    """The fits of one kind."""

    def __init__(self, prior: CostPrior | None, itl_s: float) -> None:
        self._itl_s = itl_s
        self.reading = Fit(3, prior=_reading_prior(prior), shape=_READING, enough=8)
        self.step = Fit(4, prior=_step_prior(prior), shape=_STEP, enough=16)
        self.handoff = Fit(2, prior=_handoff_prior(prior), shape=_HANDOFF, enough=8, above=0.05)  # others on the link
        self.mixed_s = prior.mixed_s if prior is not None else 0.0
        self.free_tokens = prior.free_tokens if prior is not None else 0.0
        self.free_sequence_tokens = prior.free_sequence_tokens if prior is not None else 0.0
        self._most_batch = prior.most_batch if prior is not None else 0.0
        self.steps_a_prompt = 0.5  # that end with a prompt: short ones are read several at once
        self.costs: KindCosts | None = None
        self.renew()

    def renew(self) -> None:
        reading, step = self.reading.coefficients, self.step.coefficients
        if reading is None and step is not None and step[3]:
            reading = [0.0, step[3], 0.0]  # seen only beside writing, as where no answer is streamed
        if reading is None or step is None:
            return
        handoff = self.handoff.coefficients or [0.0, 0.0]
        most = inf if self._most_batch is None else max(self._most_batch, self.step.seen_most[1])
        if not step[3]:  # nobody has read beside writing yet
            step = [*step[:3], reading[1]]
        self.costs = KindCosts(
            reading,
            step,
            handoff,
            mixed_s=self.mixed_s,
            free_tokens=self.free_tokens,
            free_sequence_tokens=self.free_sequence_tokens,
            most_batch=most,
            a_prompt_s=reading[0] * self.steps_a_prompt,
            itl_s=self._itl_s,
        )


class KindRecord(msgspec.Struct):
    reading: FitRecord
    step: FitRecord
    handoff: FitRecord
    steps_a_prompt: float


class Costs:
    """By kind of worker."""

    def __init__(self, priors: dict[str, CostPrior], itl_s: float) -> None:
        self._itl_s = itl_s
        self._priors = priors
        self._kinds: dict[str, _Kind] = {}

    def of(self, kind: str) -> KindCosts | None:
        """None until enough is known."""
        found = self._kinds.get(kind)
        return (found or self._kind(kind)).costs

    def quickest_read(self, tokens: int) -> float | None:
        """Seconds that such a prompt takes the quickest kind, alone; None where nothing is known."""
        known = [kind.costs.read_s + kind.costs.read(tokens, 0) for kind in self._kinds.values() if kind.costs is not None]
        return min(known, default=None)

    def read(self, kind: str, seen: ReadingSeen) -> None:
        of = self._kind(kind)
        of.steps_a_prompt += 0.02 * (seen.steps / seen.prompts - of.steps_a_prompt)
        self._learn(of, "reading", (seen.steps, seen.tokens, seen.pairs), seen.seconds)

    def wrote(self, kind: str, seen: WritingSeen, steps: int) -> None:
        x = (1.0, seen.batch, seen.kv_tokens, seen.read_tokens / steps)
        self._learn(self._kind(kind), "step", x, seen.seconds / steps)

    def handed_over(self, kind: str, tokens: int, seconds: float) -> None:
        self._learn(self._kind(kind), "handoff", (1.0, tokens), seconds)

    def learnt(self) -> dict[str, CostPrior]:
        """By kind, of which enough was seen."""
        seen = {name: kind.costs for name, kind in sorted(self._kinds.items()) if kind.step.samples}
        return {name: costs.as_prior() for name, costs in seen.items() if costs is not None}

    def errors(self) -> dict[str, dict[str, float]]:
        """The mean relative error of recent predictions, by kind and by what was predicted, where something was."""
        found: dict[str, dict[str, float]] = {}
        for name, kind in sorted(self._kinds.items()):
            fits = {"reading": kind.reading, "step": kind.step, "handoff": kind.handoff}
            found[name] = {what: fit.error_ratio for what, fit in fits.items() if fit.samples and fit.coefficients is not None}
        return {name: errors for name, errors in found.items() if errors}

    def remember(self) -> dict[str, KindRecord]:
        return {
            name: KindRecord(kind.reading.remember(), kind.step.remember(), kind.handoff.remember(), kind.steps_a_prompt)
            for name, kind in self._kinds.items()
        }

    def recall(self, record: dict[str, KindRecord]) -> None:
        self._kinds = {}
        for name, of in record.items():
            kind = self._kind(name)
            kind.reading.recall(of.reading)
            kind.step.recall(of.step)
            kind.handoff.recall(of.handoff)
            kind.steps_a_prompt = of.steps_a_prompt
            kind.renew()

    def _kind(self, name: str) -> _Kind:
        found = self._kinds.get(name)
        if found is None:
            found = self._kinds[name] = _Kind(self._priors.get(name, self._priors.get("")), self._itl_s)
        return found

    @staticmethod
    def _learn(kind: _Kind, what: str, x: tuple[float, ...], y: float) -> None:
        fit: Fit = getattr(kind, what)
        before = fit.coefficients
        fit.add(x, y)
        if fit.coefficients is not before:
            kind.renew()


def _reading_prior(prior: CostPrior | None) -> _Rows:
    if prior is None:
        return []
    rows: _Rows = []
    for tokens in (128.0, 512.0, 2048.0, 8192.0):
        x = (1.0, tokens, tokens * tokens)
        rows.append((x, _dot((prior.read_s, prior.read_token_s, prior.read_pair_s), x), _PRIOR_WEIGHT))
    return rows


def _step_prior(prior: CostPrior | None) -> _Rows:
    if prior is None:
        return []
    rows: _Rows = []
    for batch in (1.0, 16.0, 64.0, 192.0):
        for context in (512.0, 4096.0):
            for chunk in (0.0, 512.0):
                x = (1.0, batch, batch * context, chunk)
                mixed = prior.mixed_token_s * chunk
                y = _dot((prior.step_s, prior.step_sequence_s, prior.step_kv_token_s), x[:3]) + mixed
                rows.append((x, y, _PRIOR_WEIGHT))
    return rows


def _handoff_prior(prior: CostPrior | None) -> _Rows:
    if prior is None:
        return []
    return [((1.0, tokens), prior.handoff_s + prior.handoff_token_s * tokens + 1e-6, _PRIOR_WEIGHT) for tokens in (0.0, 4096.0)]


def _dot(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    return fsum(a * b for a, b in zip(one, other, strict=True))
