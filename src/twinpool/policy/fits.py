"""Least squares for a few coefficients, kept up online.

Old samples fade, a prior stays; what is far from the fit counts only as far as twice or half of it, so that one engine's bad
minute moves little and a lasting change still wins. Of the prior it is the shape that stays: where samples say that everything
takes twice as long, it is taken to say so too. So samples that hardly differ (all prompts of one length) teach how fast an
engine is, and not wrongly what another length would take."""

from collections.abc import Sequence
from math import fsum
from operator import mul

import msgspec

_FAR = 2.0


class FitRecord(msgspec.Struct):
    """Of a snapshot: sums, samples seen, coefficients, error."""

    products: list[list[float]]
    values: list[float]
    weight: float
    samples: int
    coefficients: list[float] | None
    error: float
    seen_most: list[float]


class Fit:
    """`y ≈ Σ coefficient·x`, all of them taken to be 0 or more. `prior`: samples that never fade. `shape`: the same where there
    is no prior and only proportions are known."""

    def __init__(
        self,
        size: int,
        *,
        prior: Sequence[tuple[Sequence[float], float, float]] = (),
        shape: Sequence[tuple[Sequence[float], float, float]] = (),
        horizon: float = 400.0,
        enough: int = 12,
        above: float = 1.0,
    ) -> None:
        """`prior` and `shape` have (x, y, weight); `horizon`: how many samples' weight is kept; without a prior of everything,
        it takes `enough` samples to know. `above` weighs samples above the fit: under 1, what else made them long is no part of
        it."""
        self._size = size
        self._horizon = horizon
        self._enough = enough
        self._above = above
        self._prior = [[0.0] * size for _ in range(size)]
        self._prior_values = [0.0] * size
        rows = [row for row in prior or shape if row[1] > 0]
        for x, y, weight in rows:
            _add(self._prior, self._prior_values, x, y, weight / (y * y))
        self._shape = _solved(self._prior, self._prior_values)
        self._scale_weight = fsum(weight for _, _, weight in rows) if prior else 0.0
        self.is_prior_whole = len(prior) >= size
        self._products = [[0.0] * size for _ in range(size)]
        self._values = [0.0] * size
        self._weight = 0.0
        self.samples = 0
        self.error_ratio = 0.0
        self.seen_most = [0.0] * size
        self.coefficients: list[float] | None = None
        if self.is_prior_whole:
            self.solve()

    def add(self, x: Sequence[float], y: float) -> None:
        """One sample; `y` is above 0."""
        if y <= 0:
            return
        self.samples += 1
        guess = 0.0
        if self.coefficients is not None:
            guess = fsum(map(mul, self.coefficients, x))
            if guess > 0:
                self.error_ratio += 0.05 * (min(abs(y - guess) / y, 1.0) - self.error_ratio)
                y = min(max(y, guess / _FAR), guess * _FAR)
        for n, value in enumerate(x):
            if value > self.seen_most[n]:
                self.seen_most[n] = value
        # relative errors count, and by the guess: by `y` itself, what came out short by chance would weigh more
        scale = guess if guess > 0 else y
        weight = self._above if 0 < guess < y else 1.0
        _add(self._products, self._values, x, y, weight / (scale * scale))
        self._weight += 1.0
        if self.samples % 16 == 0 or (self.coefficients is None and self.samples >= self._enough):
            self.solve()

    def solve(self) -> None:
        if self._weight > self._horizon:
            keep = self._horizon / self._weight
            self._products = [[keep * value for value in row] for row in self._products]
            self._values = [keep * value for value in self._values]
            self._weight = self._horizon
        if self.samples < self._enough and not self.is_prior_whole:
            return
        scale = self._scale()
        products = [
            [a + b / (scale * scale) for a, b in zip(row, prior, strict=True)]
            for row, prior in zip(self._products, self._prior, strict=True)
        ]
        values = [a + b / scale for a, b in zip(self._values, self._prior_values, strict=True)]
        self.coefficients = _solved(products, values)

    def _scale(self) -> float:
        """How many times what the prior says it takes, by the samples; columns that the prior is silent on explain what they
        can."""
        if not self._weight or not any(self._shape):
            return 1.0
        size = len(self._shape)
        silent = [n for n in range(size) if not self._prior[n][n] and self._products[n][n] > 0]
        mixes = [self._shape, *([float(m == n) for m in range(size)] for n in silent)]
        applied = [[fsum(map(mul, row, mix)) for row in self._products] for mix in mixes]
        products = [[fsum(map(mul, mix, of)) for of in applied] for mix in mixes]
        values = [fsum(map(mul, mix, self._values)) for mix in mixes]
        found = _solved(products, values)[0]
        return float(found ** (self._weight / (self._weight + self._scale_weight))) if found > 0 else 1.0

    def remember(self) -> FitRecord:
        return FitRecord(
            self._products, self._values, self._weight, self.samples, self.coefficients, self.error_ratio, self.seen_most
        )

    def recall(self, record: FitRecord) -> None:
        self._products, self._values, self._weight = record.products, record.values, record.weight
        self.samples, self.coefficients, self.error_ratio = record.samples, record.coefficients, record.error
        self.seen_most = record.seen_most


def _add(products: list[list[float]], values: list[float], x: Sequence[float], y: float, weight: float) -> None:
    for row, left in zip(products, x, strict=True):
        if left:
            scaled = left * weight
            for n, right in enumerate(x):
                row[n] += scaled * right
    for n, value in enumerate(x):
        values[n] += value * y * weight


def _solved(products: list[list[float]], values: list[float]) -> list[float]:
    """Least squares without negative coefficients: what comes out below 0 is held at 0, the worst first."""
    free = [n for n in range(len(values)) if products[n][n] > 0]
    while free:
        found = _eliminated([[products[n][m] for m in free] for n in free], [values[n] for n in free])
        worst = min(range(len(free)), key=lambda n: found[n] * products[free[n]][free[n]] ** 0.5)
        if found[worst] >= 0:
            coefficients = [0.0] * len(values)
            for n, value in zip(free, found, strict=True):
                coefficients[n] = value
            return coefficients
        del free[worst]
    return [0.0] * len(values)


def _eliminated(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss on a symmetric matrix, scaled to a diagonal of 1 with a ridge: two columns that say the same share what they
    say."""
    size = len(right)
    scale = [matrix[n][n] ** -0.5 for n in range(size)]
    rows = [[matrix[n][m] * scale[n] * scale[m] for m in range(size)] + [right[n] * scale[n]] for n in range(size)]
    for n in range(size):
        rows[n][n] += 1e-6
    for n in range(size):
        for below in range(n + 1, size):
            factor = rows[below][n] / rows[n][n]
            if factor:
                rows[below] = [a - factor * b for a, b in zip(rows[below], rows[n], strict=True)]
    found = [0.0] * size
    for n in reversed(range(size)):
        rest = rows[n][size] - fsum(rows[n][m] * found[m] for m in range(n + 1, size))
        found[n] = rest / rows[n][n]
    return [value * factor for value, factor in zip(found, scale, strict=True)]
