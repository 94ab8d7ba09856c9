"""What may be wrong with the rows of one tensor: each trial undoes a fault and tells what is left.

A trial is a number and a sentence: |a' - b| / |b| with the fault undone, and the fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from onebitd.core.state_cursor import Source
from onebitd.core.state_layout import Channels, Ints, Rows, Tensor, type_name
from onebitd.core.state_pairs import Pair
from onebitd.core.state_rope import rope_causes, unlike
from onebitd.core.state_values import FLOAT_BYTES, Floats, turn

Flags: TypeAlias = npt.NDArray[np.bool_]
Trial: TypeAlias = tuple[float, str]

_SAMPLE_VALUES: Final = 1 << 16
_SAMPLE_ROWS: Final = (48, 192)
_MOST_SHIFT: Final = 4
"""Further on, a text that repeats itself has rows that are much alike."""
_SHIFT_LEFT: Final = 1 / 3
"""No more of the difference than this is left by a shift: rows near to each other are alike."""
_TURNS: Final = (64, 128, 256, 512)


@dataclass(frozen=True, slots=True, eq=False)
class OffRows:
    """The rows of a tensor that is off.

    Attributes:
        off: row error above the tolerance, shape (positions,).
        zero: all zero in the first file and not in the reference.
        no_number: a NaN or an infinity in one file.
        scale_alone: the rows pass, a head's scale does not.
    """

    off: Flags
    zero: Flags
    no_number: Flags
    scale_alone: bool


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Some rows of a tensor that are off, as far as they hold anything.

    Attributes:
        at: their places among the common positions, which are consecutive.
        before: how unlike they are as they stand.
    """

    pair: Pair
    at: npt.NDArray[np.intp]
    a: Floats
    b: Floats
    before: float

    @classmethod
    def of(cls, pair: Pair, rows: OffRows) -> Sample:
        least, most = _SAMPLE_ROWS
        n = min(most, max(least, _SAMPLE_VALUES // pair.width))
        at = _longest_run(pair.pos, rows)[:n]
        a, b = pair.a.rows_at(at), pair.b.rows_at(at)
        return cls(pair, at, a, b, unlike(a, b))

    @property
    def pos(self) -> Ints:
        """The positions of the rows."""
        return self.pair.pos[self.at]


def _longest_run(pos: Ints, rows: OffRows) -> npt.NDArray[np.intp]:
    """Return the most rows of consecutive positions that hold numbers, first to last one off.

    Rows between two that are off may be as wrong, though by less than the tolerance.
    """
    usable = ~rows.zero & ~rows.no_number
    if not usable.any():
        return np.arange(len(pos))
    off = np.flatnonzero(rows.off & usable)
    at = np.flatnonzero(usable)
    if len(off):
        at = at[(at >= off[0]) & (at <= off[-1])]
    runs = np.split(at, np.flatnonzero((np.diff(at) != 1) | (np.diff(pos[at]) != 1)) + 1)
    return max(runs, key=len)


def trials(sample: Sample, head_dims: Sequence[int]) -> Iterator[Trial]:
    """Try everything that can be wrong with the rows of one tensor; `head_dims` may fit."""
    yield from _other_bits(sample)
    yield from _other_order(sample)
    if not np.isfinite(sample.a).all():
        return
    yield from _shifted(sample)
    if sample.pair.part in ("K", "V"):
        yield from _other_heads(sample, head_dims)
        yield from _unrotated(sample)
    if sample.pair.part == "K":
        dims = [dim for dim in head_dims if dim % 2 == 0]
        for n_rot in _rotations(sample):
            a, b = turn(sample.a, n_rot), turn(sample.b, n_rot)
            yield from rope_causes(a, b, sample.pos, dims)


def _rotations(sample: Sample) -> list[int]:
    """Return how the rows of both files may still be rotated."""
    if sample.pair.n_rot or sample.pair.a.block.tensor.type in FLOAT_BYTES:
        return [sample.pair.n_rot]
    return [0, *(n_rot for n_rot in _TURNS if sample.pair.width % n_rot == 0)]


def _unrotated(sample: Sample) -> Iterator[Trial]:
    """Rotate quantized rows as llama.cpp does."""
    for n_rot in _TURNS:
        if sample.pair.a.block.tensor.type in FLOAT_BYTES or sample.pair.width % n_rot:
            continue
        words = f"quantized rows are not rotated as the reference's are (n_rot {n_rot})"
        yield unlike(turn(sample.a, n_rot), sample.b), words


def _reread(sample: Sample, tensor: Tensor, *, swap: int = 0) -> tuple[Floats, Floats] | None:
    """Read the sample's bytes as another kind of tensor, with those rows of the reference.

    Args:
        tensor: what the bytes may be instead; cells that do not fit the block are left out.
        swap: bytes of a value, to turn their order round; 0 leaves it.
    """
    side = sample.pair.a
    cells = min(side.block.cells, side.block.n_bytes // tensor.data_bytes(1))
    if isinstance(tensor, Channels) and cells != side.block.cells:
        return None
    fits = side.index[sample.at] < cells
    if not fits.any():
        return None
    block = replace(side.block, tensor=tensor, cells=cells)
    source: Source = _Swapped(side.source, swap) if swap else side.source
    rows = replace(side, source=source, block=block, n_rot=0).rows_at(sample.at[fits])
    return rows, sample.b[fits]


@dataclass(frozen=True, slots=True)
class _Swapped:
    """A source whose values have their bytes turned round; slices must hold whole values."""

    source: Source
    size: int

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: slice) -> bytes:
        data = np.frombuffer(self.source[index], np.uint8)
        return data.reshape(-1, self.size)[:, ::-1].tobytes()


def _other_bits(sample: Sample) -> Iterator[Trial]:
    """Read the bytes as another float type, and the other way round."""
    tensor, width = sample.pair.a.block.tensor, sample.pair.width
    if tensor.type not in FLOAT_BYTES:
        return
    says = type_name(tensor.type)
    for type_, size in FLOAT_BYTES.items():
        if type_ == tensor.type:
            continue
        wanted: Tensor = Rows(type_, size * width)
        if isinstance(tensor, Channels):
            if size != tensor.el_size:
                continue
            wanted = replace(tensor, type=type_)
        yield from _trial(_reread(sample, wanted), f"{type_name(type_)} bits in a tensor of {says}")
    swapped = _reread(sample, tensor, swap=FLOAT_BYTES[tensor.type])
    yield from _trial(swapped, f"the bytes of each {says} value are in big-endian order")


def _other_order(sample: Sample) -> Iterator[Trial]:
    """Read rows as channels, and channels as rows."""
    tensor, width = sample.pair.a.block.tensor, sample.pair.width
    if tensor.type not in FLOAT_BYTES:
        return
    size, part = FLOAT_BYTES[tensor.type], sample.pair.part
    if isinstance(tensor, Channels):
        wanted: Tensor = Rows(tensor.type, size * width)
        words = (
            f"{part} is not transposed: row after row, where the file says channel after channel"
        )
    else:
        wanted = Channels(tensor.type, size, width)
        words = f"{part} is transposed: channel after channel, where the file says row after row"
    yield from _trial(_reread(sample, wanted), words)


def _trial(both: tuple[Floats, Floats] | None, words: str) -> Iterator[Trial]:
    if both is not None:
        yield unlike(*both), words


def _shifted(sample: Sample) -> Iterator[Trial]:
    """Look for the sample's rows at positions of the reference that are near."""
    pair = sample.pair
    low = max(0, int(sample.at[0]) - _MOST_SHIFT)
    high = min(len(pair.pos), int(sample.at[-1]) + 1 + _MOST_SHIFT)
    near = pair.b.rows(low, high)
    for shift in sorted(range(-_MOST_SHIFT, _MOST_SHIFT + 1), key=abs)[1:]:
        there = sample.at + shift
        fits = (there >= low) & (there < high)
        if fits.sum() < max(1, len(fits) // 2):
            continue
        left = unlike(sample.a[fits], near[there[fits] - low])
        if left > sample.before * _SHIFT_LEFT:
            continue
        by = f"{abs(shift)} position{'s'[: abs(shift) != 1]}"
        other = "later" if shift > 0 else "earlier"
        yield left, f"rows are shifted by {by}: they belong to {other} tokens"


def _other_heads(sample: Sample, dims: Sequence[int]) -> Iterator[Trial]:
    """Match each head with the one of the reference that it is most like."""
    for dim in dims:
        a, b = (x.reshape(len(x), -1, dim) for x in (sample.a, sample.b))
        n_heads = a.shape[1]
        if n_heads < 2:
            continue
        like = np.einsum("ihd,igd->hg", a, b)
        norms = np.linalg.norm(a, axis=(0, 2))[:, None] * np.linalg.norm(b, axis=(0, 2))
        order = np.nan_to_num(like / norms).argmax(axis=1)
        if len(set(order.tolist())) < n_heads or (order == np.arange(n_heads)).all():
            continue
        moved = np.flatnonzero(order != np.arange(n_heads))
        if len(moved) == 2:
            words = f"heads {moved[0]} and {moved[1]} are exchanged"
        elif len(set((order - np.arange(n_heads)) % n_heads)) == 1:
            words = f"heads are rotated: head 0 holds head {order[0]}"
        else:
            words = f"heads are in another order: {', '.join(map(str, order[:16]))}"
        yield unlike(a, b[:, order]), words if len(dims) == 1 else f"{words} (heads of {dim})"
