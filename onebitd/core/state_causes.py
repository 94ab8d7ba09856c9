"""What may be wrong with a tensor that is off: each suspicion is tried on some of its rows.

A suspicion is voiced if it leaves less than half of the difference, and little enough in all. So
an honest drift, whatever its size, gets none. One fault at a time: two in one tensor hide each
other.

Cost: some hundred trials on a sample of each tensor that is off, and eight rows of every other
tensor once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from onebitd.core.state_pairs import Pair
from onebitd.core.state_rope import unlike
from onebitd.core.state_trials import Flags, OffRows, Sample, trials
from onebitd.core.state_values import Floats

USUAL_HEAD_DIMS: Final = (256, 128, 96, 80, 64, 32)
"""Tried where the size of a head is not known; the largest that explains is named."""
_PRINTS_ROWS: Final = 8
_MOST_TENSORS: Final = 512
_MOST_LEFT: Final = 0.25


class Suspicions:
    """Finds causes.

    Args:
        pairs: every tensor of the comparison.
        head_dim: values of a head, if it is known.
        scale_tolerance: how far a head's scale may be from 1.
    """

    def __init__(self, pairs: Sequence[Pair], head_dim: int | None, scale_tolerance: float) -> None:
        self._pairs = pairs
        self._head_dim = head_dim
        self._scale_tolerance = scale_tolerance
        self._prints: dict[tuple[int, int], list[tuple[Pair, Floats]]] = {}

    def causes(self, off: Mapping[int, OffRows]) -> dict[int, str]:
        """Return a sentence for each tensor, by its number, for which a cause fits."""
        found: dict[int, str] = {}
        others: dict[int, Pair] = {}
        for number in list(off)[:_MOST_TENSORS]:
            pair, rows = self._pairs[number], off[number]
            sentence = _unwritten(pair, rows)
            if sentence is None:
                sample = Sample.of(pair, rows)
                other = self._other_tensor(sample)
                if other is not None:
                    others[number] = other
                    continue
                sentence = self._best(sample, rows) or _no_numbers(pair, rows)
            if sentence is not None:
                found[number] = sentence
        return found | _misplaced(self._pairs, others)

    def _best(self, sample: Sample, rows: OffRows) -> str | None:
        """Return the suspicion that leaves least; of equal ones the first."""
        with np.errstate(all="ignore"):  # wrong bits are any numbers
            fitting = [
                (left, words)
                for left, words in trials(sample, self._head_dims(sample.pair.width))
                if _explains(left, sample.before)
            ]
        if not fitting:
            return self._scaled(sample, alone=rows.scale_alone)
        least = min(fitting)[0]
        return next(words for left, words in fitting if left <= least * 1.2 + 1e-4)

    def _head_dims(self, width: int) -> list[int]:
        dims = (self._head_dim,) if self._head_dim else USUAL_HEAD_DIMS
        return [dim for dim in dims if width % dim == 0]

    def _scaled(self, sample: Sample, *, alone: bool) -> str | None:
        """See whether heads, or all values, are scaled; a few bad rows do not look so."""
        if not np.isfinite(sample.a).all():
            return None
        dims = self._head_dims(sample.pair.width) if sample.pair.part in ("K", "V") else []
        for dim in [*dims, sample.pair.width]:
            a, b = (x.reshape(len(x), -1, dim) for x in (sample.a, sample.b))
            scale = _head_scales(a, b)
            left = unlike(np.asarray(a / scale[:, None], np.float32), b)
            heads = np.flatnonzero(np.abs(scale - 1) > self._scale_tolerance)
            if not len(heads) or not (alone or _explains(left, sample.before)):
                continue
            if len(heads) == len(scale) and np.ptp(scale) < 0.01 * abs(scale[0]):
                return f"all values are scaled by {scale[0]:.3g}"
            if len(heads) == 1:
                return f"head {heads[0]} is scaled by {scale[heads[0]]:.3g}"
            if len(heads) <= len(scale) // 2:
                words = [f"{head} by {scale[head]:.3g}" for head in heads[:4]]
                return f"heads are scaled: {', '.join(words)}"
        return None

    def _other_tensor(self, sample: Sample) -> Pair | None:
        """Return the tensor of the reference whose rows these are."""
        a = sample.a[:_PRINTS_ROWS]
        best: tuple[float, Pair] | None = None
        for pair, rows in self._prints_of(sample):
            left = unlike(a, rows)
            if pair is not sample.pair and (best is None or left < best[0]):
                best = left, pair
        before = unlike(a, sample.b[:_PRINTS_ROWS])
        return best[1] if best and _explains(best[0], before) else None

    def _prints_of(self, sample: Sample) -> list[tuple[Pair, Floats]]:
        """Return the reference's rows of every tensor of this width at the sample's positions."""
        pos = sample.pos[:_PRINTS_ROWS]
        key = (sample.pair.width, hash(pos.tobytes()))
        if key not in self._prints:
            if len(self._prints) > 3:
                self._prints.clear()
            self._prints[key] = [
                (pair, pair.b.rows_at(np.searchsorted(pair.pos, pos)))
                for pair in self._pairs
                if pair.width == sample.pair.width
                and pair.part in ("K", "V")
                and bool(np.isin(pos, pair.pos).all())
            ]
        return self._prints[key]


def _head_scales(a: Floats, b: Floats) -> npt.NDArray[np.float64]:
    """Return the median scale of each head; a and b have shape (rows, heads, values)."""
    aa, bb, ab = (np.einsum("ihj,ihj->ih", x, y) for x, y in ((a, a), (b, b), (a, b)))
    scale = np.sqrt(np.divide(aa, bb, out=np.ones_like(aa), where=bb > 0))
    median = np.median(np.where(ab < 0, -scale, scale), axis=0)
    return np.where(np.abs(median) > 1e-6, median, 1.0)


def _explains(left: float, before: float) -> bool:
    return left < _MOST_LEFT and left < before / 2


def _unwritten(pair: Pair, rows: OffRows) -> str | None:
    """Say that rows were not written, if that is nearly all that is wrong."""
    if not rows.zero.any() or rows.zero.sum() < 0.9 * rows.off.sum():
        return None
    return f"rows were not written: {_places(pair, rows.zero)} all zero"


def _no_numbers(pair: Pair, rows: OffRows) -> str | None:
    if not rows.no_number.any():
        return None
    return f"rows hold a NaN or an infinity: {_places(pair, rows.no_number)} no numbers"


def _places(pair: Pair, flags: Flags) -> str:
    pos = pair.pos[flags]
    if len(pos) == 1:
        return f"position {pos[0]} is"
    if len(pos) == len(flags):
        return f"all {len(pos)} positions are"
    return f"{len(pos)} positions from {pos[0]} to {pos[-1]} are"


def _misplaced(pairs: Sequence[Pair], others: Mapping[int, Pair]) -> dict[int, str]:
    """Say whose rows tensors hold, and what they have in common."""
    held = {(pairs[n].section, pairs[n].part, pairs[n].layer): pair for n, pair in others.items()}
    shifts = [
        (pairs[n].section, pairs[n].part, pair.layer - pairs[n].layer)
        for n, pair in others.items()
        if (pairs[n].section, pairs[n].part) == (pair.section, pair.part)
    ]
    found = {}
    for number, other in others.items():
        pair = pairs[number]
        shift = (pair.section, pair.part, other.layer - pair.layer)
        back = held.get((other.section, other.part, other.layer))
        words = f"the rows are those of {other.what}"
        if pair.section == other.section and pair.layer == other.layer:
            words = f"the rows are {other.part} rows"
            if back is pair:
                words = "K and V are exchanged"
        elif back is pair:
            words += ", which has this one's"
        elif shifts.count(shift) >= 3:
            words += f": {shifts.count(shift)} {pair.part} tensors are shifted by "
            words += f"{abs(shift[2])} layer{'s'[: abs(shift[2]) != 1]}"
        found[number] = words
    return found
