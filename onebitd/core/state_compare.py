"""How far two state files are apart, tensor by tensor, and what may be the cause.

What to tolerate was measured between honest states, computed by two llama-server builds on one CPU
from prompts of 40 to 900 tokens, prose and random ids; SmolLM2 135M Q4_1, Gemma 3 270M Q4_K_M.
The first figure is the largest of all tensors for prose, the second for random ids:

    pair                            row error       rms of a tensor   head scale - 1
    SmolLM2, build B and X          0               0                 0
    SmolLM2, flash attention or not 0.09  0.10      0.045  0.046      0.0040  0.0022
    SmolLM2, -b 32 or 512           0.10  0.16      0.044  0.048      0.0015  0.0026
    SmolLM2, q8_0 cache or f16      0.12  0.16      0.052  0.053      0.0047  0.0046
    Gemma 3, build B and X          0.20  0.18      0.083  0.082      0.0035  0.0015
    Gemma 3, flash attention or not 0.14  0.34      0.087  0.122      0.0034  0.0033
    Gemma 3, -b 32 or 512           0.19  0.41      0.088  0.127      0.0016  0.0039

That much comes from quantized weights, for which activations are rounded to 8 bits: a last bit
that differs flips some of them, and deep layers and late positions collect it. Rows that belong
elsewhere are off by 0.8 to 9, rows not written by 1. The scale of short prompts is the least
certain; positions that are off by one only turn the keys a little (0.3 to 0.5), and are found with
a smaller tolerance.

Cost: every common value is read once, `PIECE_VALUES` of each file at a time, at some 20 million
values a second; the search for causes reads some rows of each tensor that is off.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from onebitd.core.state_causes import Suspicions
from onebitd.core.state_cursor import Source
from onebitd.core.state_layout import StateFile
from onebitd.core.state_pairs import Pair, pair_up
from onebitd.core.state_trials import OffRows
from onebitd.core.state_values import Floats

DEFAULT_TOLERANCE: Final = 0.5
"""The largest relative row error that passes."""
DEFAULT_SCALE_TOLERANCE: Final = 0.006
"""How far a head's least-squares scale may be from 1."""
LEAST_SCALE_POSITIONS: Final = 16
"""Of fewer a head's scale says no more than their errors do: 0.037 from 1 was seen on one row."""
RMS_PART: Final = 3
"""The root mean square of the row errors passes up to this part of the tolerance."""
_FLOOR: Final = 0.1

_Doubles: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """How far one tensor is off.

    Attributes:
        section, part, layer, what: which one; `what` as messages call it.
        positions: how many were compared.
        max_abs, mean_abs: absolute error of a value.
        cosine: of all compared values as one vector.
        row_error: the largest over positions of |a - b| / max(|b|, a tenth of the rms of |b|);
            infinite where a value is no number.
        worst_pos: the position of that.
        first_off: the first position whose row error is above the tolerance.
        head_scale: a's scale onto b, of the head where it is furthest from 1; 1.0 where heads are
            not known or the compared positions are too few. It is the least-squares scale for
            errors in both (reduced major axis), which an honest drift moves least.
        head: that head; None where no scale is judged.
        cause: what may be wrong, as a sentence.
        within: row error, a third of the tolerance for their root mean square, and head scale.
        rms_error: the root mean square of the row errors over positions.
    """

    section: str
    part: str
    layer: int
    what: str
    positions: int
    max_abs: float
    mean_abs: float
    cosine: float
    row_error: float
    worst_pos: int
    first_off: int | None
    head_scale: float
    head: int | None
    cause: str | None
    within: bool
    rms_error: float = 0.0


@dataclass(frozen=True, slots=True)
class StateDiff:
    """How far two files are apart.

    Attributes:
        tensors: in file order.
        notes: what was not or could not be compared, as sentences.
        compared_values: how many numbers of each file.
        within: everything that both files should have was compared, and is within the tolerances.
    """

    tensors: tuple[TensorDiff, ...]
    notes: tuple[str, ...]
    compared_values: int
    within: bool

    @property
    def worst(self) -> TensorDiff | None:
        """The tensor with the largest row error, one that is off before one that is not."""
        return max(self.tensors, key=lambda t: (not t.within, t.row_error), default=None)


def compare(
    a: StateFile,
    a_source: Source,
    b: StateFile,
    b_source: Source,
    *,
    tolerance: float = DEFAULT_TOLERANCE,
    scale_tolerance: float = DEFAULT_SCALE_TOLERANCE,
    scale_positions: int = LEAST_SCALE_POSITIONS,
    head_dim: int | None = None,
    positions: range | None = None,
    causes: bool = True,
) -> StateDiff:
    """Compare what two state files hold at their common positions.

    Args:
        a, a_source: the file to judge, as `state_file.parse` read it.
        b, b_source: the reference.
        tolerance: the largest relative row error that passes.
        scale_tolerance: how far a head's scale may be from 1.
        scale_positions: of fewer positions no scale is judged.
        head_dim: values of one head's row; None if it is not known, then no scale is judged.
        positions: only these.
        causes: look for what may be the cause in tensors that are off.

    Raises:
        StateFileError: a file became shorter meanwhile.
    """
    pairing = pair_up(a, a_source, b, b_source, positions)
    limits = _Limits(tolerance, scale_tolerance, scale_positions, head_dim)
    measured = [_measure(pair, limits) for pair in pairing.pairs]
    off = {number: rows for number, (_, rows) in enumerate(measured) if rows is not None}
    tensors = [tensor for tensor, _ in measured]
    if causes and off:
        search = Suspicions(pairing.pairs, head_dim, scale_tolerance)
        for number, sentence in search.causes(off).items():
            tensors[number] = replace(tensors[number], cause=sentence)
    n_values = sum(len(pair.pos) * pair.width for pair in pairing.pairs)
    within = bool(n_values) and not pairing.gaps and all(tensor.within for tensor in tensors)
    return StateDiff(tuple(tensors), (*pairing.notes, *pairing.gaps), n_values, within)


def row_errors(pair: Pair) -> npt.NDArray[np.float64]:
    """Return the relative error of each row of a pair, shape (positions,)."""
    return _Sums.of(pair, None).row_errors()


@dataclass(frozen=True, slots=True)
class _Limits:
    row: float
    scale: float
    scale_positions: int
    head_dim: int | None


def _measure(pair: Pair, limits: _Limits) -> tuple[TensorDiff, OffRows | None]:
    sums = _Sums.of(pair, limits.head_dim)
    errors = sums.row_errors()
    flags = errors > limits.row
    off = np.flatnonzero(flags)
    worst = int(errors.argmax())
    head, scale = sums.worst_head() if len(errors) >= limits.scale_positions else (None, 1.0)
    rms = float(np.sqrt(np.mean(errors**2)))
    rows_pass = not len(off) and rms <= limits.row / RMS_PART
    within = rows_pass and abs(scale - 1) <= limits.scale
    n_values = len(pair.pos) * pair.width
    diff = TensorDiff(
        section=pair.section,
        part=pair.part,
        layer=pair.layer,
        what=pair.what,
        positions=len(pair.pos),
        max_abs=sums.max_abs,
        mean_abs=sums.sum_abs / n_values,
        cosine=sums.cosine(),
        row_error=float(errors[worst]),
        worst_pos=int(pair.pos[worst]),
        first_off=int(pair.pos[off[0]]) if len(off) else None,
        head_scale=scale,
        head=head,
        cause=None,
        within=within,
        rms_error=rms,
    )
    return diff, None if within else OffRows(flags, sums.zero, sums.no_number, rows_pass)


class _Sums:
    """What is summed over the rows of a pair.

    Rows with a NaN or an infinity in either file are kept out of the sums; their error is
    infinite unless both rows are the same.
    """

    def __init__(self, n_rows: int, n_heads: int) -> None:
        self.error = np.zeros(n_rows)
        self.norm = np.zeros(n_rows)
        self.no_number = np.zeros(n_rows, bool)
        self.zero = np.zeros(n_rows, bool)
        self.max_abs = 0.0
        self.sum_abs = 0.0
        self.ab = np.zeros(n_heads)
        self.aa = np.zeros(n_heads)
        self.bb = np.zeros(n_heads)

    @classmethod
    def of(cls, pair: Pair, head_dim: int | None) -> _Sums:
        heads = pair.width // head_dim if head_dim and pair.width % head_dim == 0 else 0
        self = cls(len(pair.pos), max(1, heads))
        self.has_heads = bool(heads) and pair.part in "KV"
        for start, a, b in pair.pieces():
            with np.errstate(invalid="ignore"):  # where there are NaN or infinities
                self._add(start, a, b)
        return self

    has_heads = False

    def _add(self, start: int, first: Floats, second: Floats) -> None:
        a, b = first.astype(np.float64), second.astype(np.float64)
        rows = slice(start, start + len(a))
        bad = np.asarray(~np.isfinite(a + b).all(axis=1))
        if bad.any():
            equal: npt.NDArray[np.bool_] = (a == b) | (np.isnan(a) & np.isnan(b))
            self.no_number[rows] = bad & ~equal.all(axis=1)
            if self.no_number[rows].any():
                self.max_abs = self.sum_abs = float("inf")
            a, b = np.where(bad[:, None], 0.0, a), np.where(bad[:, None], 0.0, b)
        error = np.abs(a - b)
        self.max_abs = max(self.max_abs, float(error.max()))
        self.sum_abs += float(error.sum())
        self.error[rows] = np.sqrt(np.einsum("ij,ij->i", error, error))
        self.zero[rows] = ~a.any(axis=1) & b.any(axis=1) & ~bad
        self.norm[rows] = np.sqrt(np.einsum("ij,ij->i", b, b))
        a, b = (x.reshape(len(x), len(self.ab), -1) for x in (a, b))
        self.ab += np.einsum("ihj,ihj->h", a, b)
        self.aa += np.einsum("ihj,ihj->h", a, a)
        self.bb += np.einsum("ihj,ihj->h", b, b)

    def row_errors(self) -> _Doubles:
        floor = _FLOOR * np.sqrt(np.mean(self.norm**2))
        size = np.maximum(self.norm, floor)
        with np.errstate(divide="ignore", invalid="ignore"):
            errors = np.where(self.error > 0, self.error / size, 0.0)
        return np.where(self.no_number, np.inf, errors)

    def cosine(self) -> float:
        aa, bb = self.aa.sum(), self.bb.sum()
        if not aa or not bb:
            return 1.0 if aa == bb and not self.no_number.any() else 0.0
        return float(self.ab.sum() / np.sqrt(aa * bb))

    def worst_head(self) -> tuple[int | None, float]:
        """Return the head whose scale is furthest from 1, and the scale."""
        if not self.has_heads:
            return None, 1.0
        square = np.divide(self.aa, self.bb, out=np.ones_like(self.aa), where=self.bb > 0)
        scales = np.where(self.ab < 0, -1, 1) * np.sqrt(square)
        head = int(np.abs(scales - 1).argmax())
        return head, float(scales[head])
