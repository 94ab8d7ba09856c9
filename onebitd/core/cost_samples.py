"""Measurements that are kept, and what follows from them: bounded, and free of a clock.

Their order is the order of arrival. Their times only say how old one is in comparison with
another, so that a clock that was set wrong for a while spoils nothing for good.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from onebitd.core import cost_fit
from onebitd.core.cost_curve import LEAST_MS, MOST_MS, QUANTILE, Point, Terms, weighted_quantile
from onebitd.core.cost_fit import FADE, Fit

MOST_SIZE: Final = 1 << 50
MOST_TIME: Final = 1e12
MOST_NUMBER: Final = 1e16
_PER_CLASS: Final = 6
_FEW_PER_CLASS: Final = 2
_HALF_LIFE_S: Final = 7 * 86400.0
_LEAST_FRESHNESS: Final = 1 / 16
_CLASS_FADE: Final = 0.7
_MOST_OVERLAP: Final = 16.0
_BEYOND: Final = 1.25
"""A run that was stopped is taken to have needed so much more: the way it is going, not its end."""
_RECENT: Final = 12
_RECENT_FADE: Final = 0.9
_CLIPPED: Final = 0.25

OVERLAPPED: Final = 1
COLD: Final = 2
STOPPED: Final = 4
_MOST_FLAGS: Final = 7

_Kind: TypeAlias = tuple[int, int, int]
Shape = Callable[[int, int], Terms]
"""Length and depth to what the coefficients of a curve are multiplied with."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One measurement: tokens or bytes, the depth below them, milliseconds, when, and flags."""

    size: int
    depth: int
    ms: float
    when: int
    flags: int

    def kind(self) -> _Kind:
        """Return which class of lengths it belongs to: half octaves, octaves of the depth."""
        return int(2 * math.log2(self.size)), (self.depth >> 6).bit_length(), self.flags

    def row(self) -> list[float]:
        """Return it as JSON has it."""
        return [self.size, self.depth, self.ms, self.when, self.flags]

    @classmethod
    def of_row(cls, row: object) -> Sample:
        """Read a row.

        Raises:
            ValueError: it is none.
        """
        size, depth, ms, when, flags = _numbers(row, 5)
        whole = all(isinstance(part, int) for part in (size, depth, when, flags))
        if not whole or not (1 <= size <= MOST_SIZE and 0 <= depth <= MOST_SIZE):
            raise ValueError("a figure is of no length")
        if not (LEAST_MS <= ms <= MOST_MS and 0 <= when <= MOST_TIME and 0 <= flags <= _MOST_FLAGS):
            raise ValueError("a figure is no measurement")
        return cls(int(size), int(depth), float(ms), int(when), int(flags))


class LearnedCost:
    """What one kind of work costs, by its length and depth.

    Args:
        shape: of the curve.
        flat: it depends on nothing but a fixed cost.
        overlap: how much longer it takes while the other device is busy, until that is known.
        most: measurements that are kept.
    """

    def __init__(
        self, shape: Shape, *, flat: bool = False, overlap: float = 1.0, most: int = 64
    ) -> None:
        self._shape = shape
        self._flat = flat
        self._prior = overlap
        self._most = most
        self._samples: list[Sample] = []
        self._kinds: list[_Kind] = []  # of each of them
        self._fitted: tuple[Fit, float] | None = None

    def __len__(self) -> int:
        """How many measurements are kept."""
        return len(self._samples)

    def note(self, size: int, ms: float, now: float, *, depth: int = 0, flags: int = 0) -> None:
        """Learn one measurement; what cannot be one is ignored."""
        if not (math.isfinite(ms) and math.isfinite(now) and ms >= 0 and size >= 1 and depth >= 0):
            return
        when = int(min(MOST_TIME, max(0.0, now)))
        # Nothing is from the future: the clock was wrong then, or is now.
        self._samples = [
            s if s.when <= when else dataclasses.replace(s, when=when) for s in self._samples
        ]
        kept_ms = round(min(MOST_MS, max(LEAST_MS, ms)), 3)
        size, depth = min(size, MOST_SIZE), min(depth, MOST_SIZE)
        self._samples.append(Sample(size, depth, kept_ms, when, flags))
        self._kinds.append(self._samples[-1].kind())
        self._drop_one()
        self._fitted = None

    def estimate(self, size: int, depth: int = 0, *, overlapped: bool = False) -> float | None:
        """Return milliseconds, None when nothing is known."""
        if not self._samples:
            return None
        if self._fitted is None:
            self._fitted = _fit(self._samples, self._shape, self._flat, self._prior)
        fit, ratio = self._fitted
        size, depth = min(max(1, size), MOST_SIZE), min(max(0, depth), MOST_SIZE)
        return min(MOST_MS, fit.ms(self._shape(size, depth)) * (ratio if overlapped else 1.0))

    def ended_well(self, least_size: int = 1) -> list[Sample]:
        """Return the measurements of whole runs of at least that length; cold ones if all are."""
        return [s for s in _warm(self._samples) if s.size >= least_size]

    def rows(self) -> list[list[float]]:
        """Return the measurements as JSON has them."""
        return [sample.row() for sample in self._samples]

    def load(self, rows: object) -> None:
        """Take the measurements of `rows`.

        Raises:
            ValueError: there are too many, or one is none.
        """
        self._samples = [Sample.of_row(row) for row in _list_of(rows, self._most)]
        self._kinds = [sample.kind() for sample in self._samples]
        self._fitted = None

    def _drop_one(self) -> None:
        """Make room for the newest, if need be."""
        kinds = self._kinds
        few = kinds[-1][2] & (COLD | STOPPED)
        if kinds.count(kinds[-1]) > (_FEW_PER_CLASS if few else _PER_CLASS):
            dropped = kinds.index(kinds[-1])
        elif len(kinds) > self._most:
            dropped = kinds.index(Counter(kinds).most_common(1)[0][0])
        else:
            return
        del self._samples[dropped], kinds[dropped]


class Recent:
    """The last few values of something that depends on no length; each with a weight."""

    def __init__(self) -> None:
        self._values: list[tuple[float, float]] = []

    def note(self, value: float, weight: float = 1.0) -> None:
        """Learn one value; what is no number or is negative is ignored."""
        if math.isfinite(value) and value >= 0 and math.isfinite(weight) and weight > 0:
            kept = (round(min(MOST_MS, value), 4), round(min(1e6, max(1e-3, weight)), 4))
            self._values = [*self._values, kept][-_RECENT:]

    def middle(self) -> float | None:
        """Return the usual value: of two kinds of values, one."""
        pairs = self._faded()
        return weighted_quantile(pairs, 0.5) if pairs else None

    def mean(self) -> float | None:
        """Return what to expect: of two kinds of values, something between. Extremes are cut."""
        pairs = self._faded()
        if not pairs:
            return None
        low = weighted_quantile(pairs, _CLIPPED)
        high = weighted_quantile(pairs, 1.0 - _CLIPPED)
        total = math.fsum([min(high, max(low, value)) * weight for value, weight in pairs])
        return min(high, max(low, total / math.fsum([weight for _, weight in pairs])))

    def rows(self) -> list[list[float]]:
        """Return the values as JSON has them."""
        return [list(pair) for pair in self._values]

    def load(self, rows: object) -> None:
        """Take the values of `rows`.

        Raises:
            ValueError: there are too many, or one is none.
        """
        found = []
        for row in _list_of(rows, _RECENT):
            value, weight = _numbers(row, 2)
            if not (0 <= value <= MOST_MS and 1e-3 <= weight <= 1e6):
                raise ValueError("a figure is no value with a weight")
            found.append((float(value), float(weight)))
        self._values = found

    def _faded(self) -> list[tuple[float, float]]:
        newest_first = reversed(self._values)
        return [(value, weight * _RECENT_FADE**k) for k, (value, weight) in enumerate(newest_first)]


def _fit(samples: Sequence[Sample], shape: Shape, flat: bool, prior: float) -> tuple[Fit, float]:
    """Return the fit of quiet runs, and how much longer overlapped ones take."""
    whole = _warm(samples)
    stopped = [s for s in samples if s.flags & STOPPED]
    if not whole:  # only that it takes longer is known, and that is better than nothing
        whole, stopped = stopped, []
    ratio = _overlap(whole, shape, flat, prior)
    newest = max(s.when for s in samples)
    place = {id(sample): index for index, sample in enumerate(samples)}
    older = [sum([place[id(w)] < place[id(s)] for w in whole]) for s in stopped]
    bounds = zip(older, _points(stopped, shape, newest, ratio, _BEYOND), strict=True)
    return cost_fit.fit(_points(whole, shape, newest, ratio), list(bounds), flat=flat), ratio


def _points(
    samples: Sequence[Sample], shape: Shape, newest: int, ratio: float, times: float = 1.0
) -> list[Point]:
    """Return what to fit: overlapped ones divided by the ratio, all multiplied with `times`."""
    found = []
    for sample, rank in zip(samples, _ranks(samples), strict=True):
        slower = ratio if sample.flags & OVERLAPPED else 1.0
        ms = min(MOST_MS, max(LEAST_MS, sample.ms * times / slower))
        fresh = max(_LEAST_FRESHNESS, 0.5 ** ((newest - sample.when) / _HALF_LIFE_S))
        weight = fresh * _CLASS_FADE**rank
        found.append(Point(shape(sample.size, sample.depth), ms, weight, fresh))
    return found


def _ranks(samples: Sequence[Sample]) -> list[int]:
    """Return for each how many newer ones of its class there are."""
    seen: Counter[tuple[int, int]] = Counter()
    ranks = []
    for sample in reversed(samples):
        place = sample.kind()[:2]
        ranks.append(seen[place])
        seen[place] += 1
    return ranks[::-1]


def _warm(samples: Sequence[Sample]) -> list[Sample]:
    whole = [s for s in samples if not s.flags & STOPPED]
    return [s for s in whole if not s.flags & COLD] or whole


def _overlap(whole: Sequence[Sample], shape: Shape, flat: bool, prior: float) -> float:
    quiet = [s for s in whole if not s.flags & OVERLAPPED]
    overlapped = [s for s in whole if s.flags & OVERLAPPED]
    if not quiet or not overlapped:
        return prior
    fit = cost_fit.fit(_points(quiet, shape, max(s.when for s in quiet), 1.0), [], flat=flat)
    pairs = [
        (s.ms / fit.ms(shape(s.size, s.depth)), FADE**k) for k, s in enumerate(reversed(overlapped))
    ]
    ratio = weighted_quantile([*pairs, (prior, 1.0)], QUANTILE)
    return min(_MOST_OVERLAP, max(1.0, ratio))


def _list_of(rows: object, most: int) -> list[object]:
    if not isinstance(rows, list):
        raise ValueError("the figures are no list")
    if len(rows) > most:
        raise ValueError(f"there are {len(rows)} figures where {most} are kept")
    return rows


def _numbers(row: object, count: int) -> list[Any]:
    if not isinstance(row, list) or len(row) != count:
        raise ValueError("a figure is no list of numbers")
    for part in row:
        if isinstance(part, bool) or not isinstance(part, int | float):
            raise ValueError("a figure has something that is no number")
        if not abs(part) <= MOST_NUMBER:  # nor is NaN
            raise ValueError("a figure has a number beyond all reason")
    return row
