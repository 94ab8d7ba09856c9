"""A fitted curve, moved to where the newest measurements lie.

The calibration maps the curve's milliseconds to milliseconds and never falls, so that an estimate
grows with every argument with which its curve grows. Around each size the measurements count the
less the more newer ones of that size there are: two that agree win against any number of older
ones, and one that is slow among others moves nothing. Far from all of them the curve holds.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from typing import Final

from onebitd.core import cost_curve
from onebitd.core.cost_curve import LEAST_MS, MOST_MS, QUANTILE, Point, Terms, weighted_quantile

FADE: Final = 0.6
"""What a measurement counts after each newer one of its size. The two newest of many then have 64 %
of the weight and win; the newest alone has 40 %, and as a slow outlier loses."""
_OVER: Final = 8.0
"""Behind so many newer ones nothing counts any more."""
_REACH_OCTAVES: Final = 0.7
_CUT_OCTAVES: Final = 2.5
_KNOT_OCTAVES: Final = 0.5
_TRUST: Final = 1.2
"""What a curve that others agree with counts against the first measurement of a size."""
_AGREES_OCTAVES: Final = 0.3


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """A curve with its calibration.

    Attributes:
        curve: its coefficients, none negative.
        knots: log2 of the curve's milliseconds, ascending.
        values: log2 of the calibrated milliseconds at the knots, never falling.
    """

    curve: Terms
    knots: tuple[float, ...]
    values: tuple[float, ...]

    def ms(self, terms: Terms) -> float:
        """Return the estimate, from `LEAST_MS` to `MOST_MS`."""
        calibrated = self._calibrated(cost_curve.log_ms(self.curve, terms))
        return float(min(MOST_MS, max(LEAST_MS, 2.0**calibrated)))

    def _calibrated(self, log_ms: float) -> float:
        right = bisect.bisect_right(self.knots, log_ms)
        if right == 0:
            return min(log_ms, self.values[0])
        if right == len(self.knots):
            return max(log_ms, self.values[-1])
        low, high = self.knots[right - 1], self.knots[right]
        before, after = self.values[right - 1], self.values[right]
        return before + (after - before) * (log_ms - low) / (high - low)


def fit(points: Sequence[Point], bounds: Sequence[tuple[int, Point]], *, flat: bool) -> Fit:
    """Fit a curve and calibrate it.

    Args:
        points: oldest first, at least one.
        bounds: runs that were stopped, oldest first, each with how many of `points` are older than
            it: they take longer than their milliseconds say, and count where the estimate is below.
        flat: nothing but a fixed cost is fitted.
    """
    curve = cost_curve.fit_curve(points, flat=flat)
    marks = [_mark(curve, point) for point in points]
    calibrated = _calibrate(curve, marks)
    raised = list(marks)
    for older, point in reversed(bounds):
        if calibrated.ms(point.terms) < point.ms:
            raised.insert(older, _mark(curve, point))
    return calibrated if len(raised) == len(marks) else _calibrate(curve, raised)


_Mark = tuple[float, float, float]
"""log2 of the curve there, log2 of measured / curve, freshness."""


def _mark(curve: Terms, point: Point) -> _Mark:
    at = cost_curve.log_ms(curve, point.terms)
    return at, math.log2(point.ms) - at, point.freshness


def _calibrate(curve: Terms, marks: Sequence[_Mark]) -> Fit:
    """Return the curve with knots where there are marks, and one beyond on either side."""
    places = sorted(at for at, _, _ in marks)
    first = math.floor((places[0] - _CUT_OCTAVES) / _KNOT_OCTAVES)
    last = math.ceil((places[-1] + _CUT_OCTAVES) / _KNOT_OCTAVES)
    agreeing = sum([abs(off) < _AGREES_OCTAVES for _, off, _ in marks])
    trust = _TRUST * min(1.0, agreeing / 3)
    newest_first = marks[::-1]
    knots, values, weights = [], [], []
    for number in range(first, last + 1):
        knot = number * _KNOT_OCTAVES
        off, weight = 0.0, 0.0
        if number not in (first, last):
            distance = _to_nearest(places, knot)
            if distance >= 2 * _KNOT_OCTAVES:
                continue
            off, weight = _correction(newest_first, knot, distance, trust)
        knots.append(knot)
        values.append(knot + off)
        weights.append(weight + 1e-3)
    return Fit(curve, tuple(knots), tuple(_never_falling(values, weights)))


def _to_nearest(places: Sequence[float], knot: float) -> float:
    right = bisect.bisect_left(places, knot)
    return min([abs(place - knot) for place in places[max(0, right - 1) : right + 1]])


def _correction(
    newest_first: Sequence[_Mark], knot: float, nearest: float, trust: float
) -> tuple[float, float]:
    """Return what is to be added to the curve at a knot, and the weight of what says so."""
    whole = _nearness(nearest)
    newer = 0.0
    found = 0.0
    pairs = []
    for at, off, fresh in newest_first:
        distance = at - knot
        if -_CUT_OCTAVES < distance < _CUT_OCTAVES:
            near = _nearness(distance)
            weight = fresh * near * FADE**newer
            pairs.append((off, weight))
            found += weight
            newer += near / whole  # beside all of them they follow each other as amid them
            if newer > _OVER:
                break
    # The curve counts as the oldest measurement of every size.
    pairs.append((0.0, (trust + 1e-3) * FADE**newer))
    return weighted_quantile(pairs, QUANTILE), found


def _nearness(octaves: float) -> float:
    return math.exp(-0.5 * (octaves / _REACH_OCTAVES) ** 2)


def _never_falling(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Pool neighbours that fall into their mean: the nearest values that never fall."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        mean, total, count = value, weight, 1
        while pools and pools[-1][0] > mean:
            other, more, others = pools.pop()
            mean = (mean * total + other * more) / (total + more)
            total += more
            count += others
        pools.append((mean, total, count))
    return [mean for mean, _, count in pools for _ in range(count)]
