"""A curve with two or three coefficients, none negative, through few and noisy measurements.

Errors are relative ones, so that long prompts do not outweigh short ones, and what lies far off
has little weight. As many coefficients are fitted as the measurements can tell: one length gives
a rate, two different ones a fixed cost and a rate, and only many that are far apart a bend.

Plain lists, and sums over them that run in C: `onebitctl` starts without numpy, and the daemon has
milliseconds for this.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from operator import mul
from typing import Final

QUANTILE: Final = 0.4
"""Slow outliers are what happens (a cold start, a busy box), fast ones are not."""
LEAST_MS: Final = 1e-3
MOST_MS: Final = 1e9
_ROUNDS: Final = 5
_SETTLED: Final = 0.01
_LEAST_SCALE: Final = 0.1
_OFFSET_SPAN: Final = 1.4
_FLAT_POINTS: Final = 5
_BEND_SPAN: Final = 4.0
_BEND_POINTS: Final = 7
_BEND_GAIN: Final = 0.75
_MOST_MISFIT: Final = 0.5

Terms = tuple[float, float, float]
"""What the coefficients are multiplied with: 1, the length, and what bends the curve, or 0."""


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One measurement, ready to be fitted.

    Attributes:
        terms: where it was made.
        ms: from `LEAST_MS` to `MOST_MS`.
        weight: in the curve, more than 0.
        freshness: in the calibration, from 0 to 1, by its age alone.
    """

    terms: Terms
    ms: float
    weight: float
    freshness: float


def weighted_quantile(pairs: Iterable[tuple[float, float]], share: float) -> float:
    """Return the least value at which that share of the weight is reached.

    Args:
        pairs: value and weight, at least one, the weights not all 0.
        share: from 0 to 1.
    """
    ordered = sorted(pairs)
    goal = share * sum([weight for _, weight in ordered])
    reached = 0.0
    for value, weight in ordered:
        reached += weight
        if reached >= goal:
            return value
    return ordered[-1][0]


def log_ms(curve: Terms, terms: Terms) -> float:
    """Return log2 of a curve's milliseconds, which are held between `LEAST_MS` and `MOST_MS`."""
    total = curve[0] * terms[0] + curve[1] * terms[1] + curve[2] * terms[2]
    return math.log2(min(MOST_MS, max(LEAST_MS, total)))


def fit_curve(points: Sequence[Point], *, flat: bool) -> Terms:
    """Return the coefficients, none negative, not all 0.

    Args:
        points: at least one.
        flat: the fixed cost carries the curve, not the rate; then it is all that is fitted.
    """
    if flat:
        return _quantile(points, 0), 0.0, 0.0
    proportional = (0.0, _quantile(points, 1), 0.0)
    if _span([point.terms[1] for point in points]) < _OFFSET_SPAN:
        return proportional
    table = _Table(points)
    straight = table.fit([0, 1]) or proportional
    if not straight[1] and len(points) < _FLAT_POINTS:
        return proportional  # nothing takes as long for any length; this was noise
    bends = [point.terms[2] / point.terms[1] for point in points]
    if len(points) < _BEND_POINTS or min(bends) <= 0.0 or _span(bends) < _BEND_SPAN:
        return straight
    if sum([bend > max(bends) / 2 for bend in bends]) < 2:
        return straight  # any single point at the end lies on some bent curve
    bent = table.fit([0, 1, 2])
    # Noise bends a straight line too, and lengths far off would pay for it.
    if bent and table.misfit(bent) < _BEND_GAIN * table.misfit(straight):
        return bent
    return straight


def _quantile(points: Sequence[Point], term: int) -> float:
    return weighted_quantile([(p.ms / p.terms[term], p.weight) for p in points], QUANTILE)


def _span(values: Sequence[float]) -> float:
    return max(values) / min(values)


class _Table:
    """Points by columns, with the products that the normal equations need."""

    def __init__(self, points: Sequence[Point]) -> None:
        self._terms = [point.terms for point in points]
        self._weights = [point.weight for point in points]
        self._ms = [point.ms for point in points]
        self._logs = [math.log2(ms) for ms in self._ms]
        columns = [[terms[index] for terms in self._terms] for index in range(3)]
        self._products = {
            (i, j): list(map(mul, columns[i], columns[j])) for i in range(3) for j in range(i, 3)
        }
        self._sides = [list(map(mul, column, self._ms)) for column in columns]

    def misfit(self, curve: Terms) -> float:
        """Return the mean distance in octaves; no point counts for more than half a one."""
        distances = [min(_MOST_MISFIT, abs(off)) for off in self._off(self._curve_logs(curve))]
        return math.fsum(map(mul, self._weights, distances)) / sum(self._weights)

    def fit(self, columns: list[int]) -> Terms | None:
        """Fit these columns; one with a negative coefficient is dropped, and the rest fitted."""
        while columns:
            found = self._robust(columns)
            if found is None:
                return None
            negative = [column for column in columns if found[column] < 0.0]
            if not negative:
                return found if any(found) else None
            columns = [column for column in columns if column != negative[-1]]
        return None

    def _robust(self, columns: Sequence[int]) -> Terms | None:
        """Least squares, again and again with less weight for what lies far off."""
        weights = [w / (ms * ms) for w, ms in zip(self._weights, self._ms, strict=True)]
        found: Terms | None = None
        before = [0.0] * len(weights)
        for _ in range(_ROUNDS):
            solved = self._least_squares(weights, columns)
            if solved is None:
                break
            found = solved
            logs = self._curve_logs(found)
            if all(abs(a - b) < _SETTLED for a, b in zip(logs, before, strict=True)):
                break
            before = logs
            off = [abs(octaves) for octaves in self._off(logs)]
            middle = weighted_quantile(zip(off, self._weights, strict=True), 0.5)
            scale = max(_LEAST_SCALE, 1.5 * middle)
            weights = [
                w / (1.0 + (o / scale) ** 2) / 4.0**log
                for w, o, log in zip(self._weights, off, logs, strict=True)
            ]
        return found

    def _curve_logs(self, curve: Terms) -> list[float]:
        a, b, c = curve  # `log_ms` for all of them, without its calls
        totals = [a * x + b * y + c * z for x, y, z in self._terms]
        return [math.log2(min(MOST_MS, max(LEAST_MS, total))) for total in totals]

    def _off(self, logs: Sequence[float]) -> list[float]:
        return [log - other for log, other in zip(self._logs, logs, strict=True)]

    def _least_squares(self, weights: Sequence[float], columns: Sequence[int]) -> Terms | None:
        """Solve the normal equations; None where they say nothing."""
        sums = {
            (i, j): sum(map(mul, weights, self._products[i, j]))
            for i in columns
            for j in columns
            if i <= j
        }
        scales = [math.sqrt(sums[i, i]) for i in columns]
        if not all(0.0 < scale < math.inf for scale in scales):
            return None
        rows = []
        for i, scale in zip(columns, scales, strict=True):
            row = [sums[min(i, j), max(i, j)] for j in columns]
            row = [value / scale / other for value, other in zip(row, scales, strict=True)]
            rows.append([*row, sum(map(mul, weights, self._sides[i])) / scale])
        solved = _eliminate(rows)
        if solved is None:
            return None
        found = [0.0, 0.0, 0.0]
        for column, value, scale in zip(columns, solved, scales, strict=True):
            found[column] = value / scale
        return found[0], found[1], found[2]


def _eliminate(rows: list[list[float]]) -> list[float] | None:
    """Solve a small positive system, in place; None if it is singular, or nearly so."""
    size = len(rows)
    for i in range(size):
        if rows[i][i] < 1e-9:
            return None
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            for k in range(i, size + 1):
                rows[j][k] -= factor * rows[i][k]
    found = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(rows[i][k] * found[k] for k in range(i + 1, size))
        found[i] = (rows[i][size] - rest) / rows[i][i]
    return found if all(math.isfinite(value) for value in found) else None
