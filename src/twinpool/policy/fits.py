"""Least squares for a few coefficients, kept up online.

Old samples fade, a prior stays; what is far from the fit counts only as far as twice or half of it, so that one engine's bad minute
moves little and a lasting change still wins.
"""

from collections.abc import Sequence
from math import inf

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
    """`y ≈ Σ coefficient·x`, all of them taken to be 0 or more. `prior`: samples that never fade."""

    def __init__(
        self, size: int, *, prior: Sequence[tuple[Sequence[float], float, float]] = (), horizon: float = 400.0, enough: int = 12
    ) -> None:
        """`prior` has (x, y, weight); `horizon` is how many samples' weight is kept; without a prior of everything, it takes
        `enough` samples to know."""
        self._size = size
        self._horizon = horizon
        self._enough = enough
        self._prior = [[0.0] * size for _ in range(size)]
        self._prior_values = [0.0] * size
        for x, y, weight in prior:
            _add(self._prior, self._prior_values, x, y, weight / (y * y))
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
        if self.coefficients is not None:
            guess = sum(map(_times, self.coefficients, x))
            if guess > 0:
                self.error_ratio += 0.05 * (min(abs(y - guess) / y, 1.0) - self.error_ratio)
                y = min(max(y, guess / _FAR), guess * _FAR)
        for n, value in enumerate(x):
            if value > self.seen_most[n]:
                self.seen_most[n] = value
        _add(self._products, self._values, x, y, 1.0 / (y * y))  # the error that counts is the relative one
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
        products = [
            [a + b for a, b in zip(row, prior, strict=True)] for row, prior in zip(self._products, self._prior, strict=True)
        ]
        values = [a + b for a, b in zip(self._values, self._prior_values, strict=True)]
        self.coefficients = _solved(products, values)

    def remember(self) -> FitRecord:
        return FitRecord(
            self._products, self._values, self._weight, self.samples, self.coefficients, self.error_ratio, self.seen_most
        )

    def recall(self, record: FitRecord) -> None:
        self._products, self._values, self._weight = record.products, record.values, record.weight
        self.samples, self.coefficients, self.error_ratio = record.samples, record.coefficients, record.error
        self.seen_most = record.seen_most


def _times(one: float, other: float) -> float:
    return one * other


def _add(products: list[list[float]], values: list[float], x: Sequence[float], y: float, weight: float) -> None:
    for row, left in zip(products, x, strict=True):
        if left:
            scaled = left * weight
            for n, right in enumerate(x):
                row[n] += scaled * right
    for n, value in enumerate(x):
        values[n] += value * y * weight


def _solved(products: list[list[float]], values: list[float]) -> list[float]:
    """Non-negative least squares by coordinate descent: at most five unknowns, and a warm start is not worth keeping."""
    size = len(values)
    scales = [products[n][n] for n in range(size)]
    found = [0.0] * size
    for _ in range(400):
        moved = 0.0
        for n in range(size):
            if scales[n] <= 0:
                continue
            row = products[n]
            rest = sum(row[m] * found[m] for m in range(size) if m != n)
            new = max(0.0, (values[n] - rest) / scales[n])
            moved = max(moved, abs(new - found[n]) * scales[n] ** 0.5)
            found[n] = new
        if moved < 1e-7:
            break
    return found if max(found, default=0.0) < inf else [0.0] * size
