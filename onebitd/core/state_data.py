"""Whether the data in a state file can be what a model computes: finite, written, of its size.

All of it is looked at, a `Piece` at a time, so that a caller may share the pieces among threads:
`judge` releases the interpreter's lock while it looks, and keeps nothing.

What a decoder's own state of a few tokens looks like is a `Baseline`; `state_baseline` learns it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from onebitd.core.errors import StateFileError
from onebitd.core.state_cursor import Source, read_slice
from onebitd.core.state_floats import Bits, FloatFormat, float_of, format_of, peaks_of
from onebitd.core.state_layout import Block, Rows, Tensor

CHUNK_BYTES: Final = 1 << 20
"""No piece is longer. Shorter ones fit a smaller cache, but each costs some 50 us of Python."""

HEADER_BYTES: Final = 12
"""Of every tensor: see `Rows.header` and `Channels.header`."""
_Cells: TypeAlias = npt.NDArray[np.int64]
_Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """What the tensors of a section may hold; one entry for each, in file order.

    Attributes:
        own: bits of the largest magnitude (of quantized tensors: of the scales) in the decoder's
            own state.
        least, most: what that may be in another state; 0 and all bits where there is no bound.
        zero: True where the decoder's own state has a cell without any value but zero.
    """

    own: tuple[int, ...]
    least: tuple[int, ...]
    most: tuple[int, ...]
    zero: tuple[bool, ...]

    def some(self, first: int, count: int) -> Bounds:
        """Return those of some tensors."""
        part = slice(first, first + count)
        return Bounds(self.own[part], self.least[part], self.most[part], self.zero[part])


@dataclass(frozen=True, slots=True, eq=False)
class Baseline:
    """What the data of a decoder's own state is like; one entry for each section of its layout."""

    sections: tuple[Bounds, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Tensors of one shape that follow each other in the file, each with its header in front.

    `offset` is that of the first header; `bounds`, if known, has an entry for each tensor.
    """

    offset: int
    tensor: Tensor
    cells: int
    names: tuple[str, ...]
    bounds: Bounds | None

    @property
    def stride(self) -> int:
        """Bytes from one header to the next."""
        return HEADER_BYTES + self.tensor.data_bytes(self.cells)

    @property
    def end(self) -> int:
        """Where the data of the last tensor ends."""
        return self.offset + self.stride * len(self.names)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What is judged at once: `count` whole tensors of a run, or a part of one.

    Attributes:
        first: number of the (first) tensor in the run.
        start: where in its data the piece begins; 0 is in front of the header.
        offset, n_bytes: the bytes of the file that `judge` is given.
    """

    run: Run
    first: int
    count: int
    start: int
    offset: int
    n_bytes: int


class HeaderDiffers(StateFileError):
    """A tensor's header is not the layout's; reading the file from the front tells how."""


def pieces_of(run: Run) -> Iterator[Piece]:
    """Yield the pieces of a run in file order; of data that cannot be judged just the headers."""
    stride, total = run.stride, len(run.names)
    format_ = format_of(run.tensor)
    if stride <= CHUNK_BYTES and (format_ or stride == HEADER_BYTES):
        at_once = CHUNK_BYTES // stride
        for first in range(0, total, at_once):
            count = min(at_once, total - first)
            yield Piece(run, first, count, 0, run.offset + first * stride, count * stride)
        return
    step = _step(run, format_) if format_ else 0
    for number in range(total):
        offset = run.offset + number * stride
        if format_ is None:
            yield Piece(run, number, 1, 0, offset, HEADER_BYTES)
            continue
        for start in range(0, stride - HEADER_BYTES, step):
            head = 0 if start else HEADER_BYTES
            n_bytes = min(step, stride - HEADER_BYTES - start) + head
            yield Piece(run, number, 1, start, offset + HEADER_BYTES - head + start, n_bytes)


def _step(run: Run, format_: FloatFormat) -> int:
    """Return how many bytes of a long tensor make a piece: whole rows, if they are short enough."""
    row = run.tensor.row_size if isinstance(run.tensor, Rows) else run.tensor.el_size
    least = row if row <= CHUNK_BYTES - HEADER_BYTES else format_.unit_bytes
    return (CHUNK_BYTES - HEADER_BYTES) // least * least


def judge(source: Source, piece: Piece, data: _Buffer) -> None:
    """Refuse a piece with another header, a NaN, an infinity, or what no model computes.

    Args:
        source: the whole file; read only where `data` leaves a doubt.
        piece: one of `pieces_of`.
        data: its bytes.

    Raises:
        HeaderDiffers: a header is not the run's.
        StateFileError: a sentence that names the tensor, and the cell or the byte.
    """
    head = 0 if piece.start else HEADER_BYTES
    if head:
        _expect_headers(piece, data)
    format_ = format_of(piece.run.tensor)
    if format_ is None:
        return
    values = _values(piece, data, head, format_)
    peaks = peaks_of(values)
    if max(peaks) >= format_.infinity:
        raise StateFileError(_not_finite(piece, values, peaks, head, format_))
    bounds = piece.run.bounds
    if bounds is not None:
        _expect_size(piece, peaks, bounds, format_)
        _expect_written(source, piece, values, bounds, format_)


def peak_of(piece: Piece, data: _Buffer) -> int:
    """Return the bits of the largest magnitude in a piece of floats that passed `judge`."""
    format_ = format_of(piece.run.tensor)
    assert format_ is not None  # noqa: S101 - see above
    return max(peaks_of(_values(piece, data, 0 if piece.start else HEADER_BYTES, format_)))


def _expect_headers(piece: Piece, data: _Buffer) -> None:
    run = piece.run
    wanted = run.tensor.header()
    for number in range(piece.count):
        at = number * run.stride
        if bytes(data[at : at + HEADER_BYTES]) != wanted:
            name = run.names[piece.first + number]
            raise HeaderDiffers(f"{name}: another header than the decoder's")


def _values(piece: Piece, data: _Buffer, head: int, format_: FloatFormat) -> Bits:
    """Return the bits of the floats: a row for each tensor. Those of scales are a copy."""
    units = (piece.n_bytes // piece.count - head) // format_.unit_bytes
    shape: tuple[int, ...] = (piece.count, units, format_.floats)
    strides = (piece.run.stride, format_.unit_bytes, format_.size)
    view: Bits = np.ndarray(shape, f"<u{format_.size}", data, head, strides)
    if format_.unit_bytes == format_.size:
        return view[:, :, 0]
    return np.ascontiguousarray(view).reshape(piece.count, -1)


def _not_finite(
    piece: Piece, values: Bits, peaks: list[int], head: int, format_: FloatFormat
) -> str:
    number = next(i for i, peak in enumerate(peaks) if peak >= format_.infinity)
    index = int(np.argmax((values[number] & format_.magnitude) >= format_.infinity))
    at = index // format_.floats * format_.unit_bytes
    run = piece.run
    byte = piece.offset + head + number * run.stride + at
    place = _place(run, piece.start + at)
    return f"{run.names[piece.first + number]}: a NaN or an infinity at byte {byte} ({place})"


def _place(run: Run, at: int) -> str:
    if isinstance(run.tensor, Rows):
        return f"cell {at // run.tensor.row_size}"
    element = at // run.tensor.el_size
    return f"channel {element // run.cells}, cell {element % run.cells}"


def _expect_size(piece: Piece, peaks: list[int], bounds: Bounds, format_: FloatFormat) -> None:
    """Refuse a tensor whose largest magnitude is far from the decoder's own."""
    for number, peak in enumerate(peaks, piece.first):
        if bounds.least[number] <= peak <= bounds.most[number]:
            continue
        # All zero has a sentence of its own; a part of a cell says nothing about the least.
        low = peak < bounds.least[number]
        if low and (peak == 0 or not _is_whole(piece)):
            continue
        type_ = piece.run.tensor.type
        what = "scale" if format_.unit_bytes > format_.size else "value"
        found = f"{float_of(peak, type_):.3g}"
        raise StateFileError(
            f"{piece.run.names[number]}: {f'no {what} above' if low else f'a {what} of'} {found}, "
            "where the decoder's own state of a few tokens has "
            f"{float_of(bounds.own[number], type_):.3g}"
        )


def _is_whole(piece: Piece) -> bool:
    """Tell whether a piece has all values of some cells."""
    tensor = piece.run.tensor
    least = tensor.row_size if isinstance(tensor, Rows) else piece.run.stride - HEADER_BYTES
    return piece.n_bytes >= least


def _expect_written(
    source: Source, piece: Piece, values: Bits, bounds: Bounds, format_: FloatFormat
) -> None:
    """Refuse cells that are all zero: a model computes none, an unwritten row is."""
    for number, suspects in _suspects(piece, values, format_):
        if bounds.zero[piece.first + number]:
            continue
        name = piece.run.names[piece.first + number]
        zero = _zero_cells(source, piece, number, suspects, format_)
        if len(zero) == piece.run.cells:
            raise StateFileError(f"{name}: every value is zero; the decoder's own are not")
        if len(zero):
            raise StateFileError(
                f"{name}, cell {zero[0]}: every value is zero, as if it had not been written"
            )


@dataclass(frozen=True, slots=True, eq=False)
class _Suspects:
    """Cells of one tensor whose first value is zero.

    `rows` are the values of the piece's cells, the first of which is `first`; None unless the piece
    has whole rows.
    """

    cells: _Cells
    first: int
    rows: Bits | None


def _suspects(piece: Piece, values: Bits, format_: FloatFormat) -> Iterator[tuple[int, _Suspects]]:
    """Yield (number of a tensor, its cells that begin in this piece with a zero)."""
    tensor, start = piece.run.tensor, piece.start
    step = None
    if isinstance(tensor, Rows):
        step = tensor.row_size // format_.unit_bytes * format_.floats
        begin = -start % tensor.row_size // format_.unit_bytes * format_.floats
        cell = -(-start // tensor.row_size)
        firsts = values[:, begin::step]
    else:  # the first channel tells
        cell = start // tensor.el_size
        firsts = values[:, : max(0, piece.run.cells - cell)]
    magnitudes = np.ascontiguousarray(firsts) & format_.magnitude
    if np.count_nonzero(magnitudes) == magnitudes.size:
        return
    for number in np.flatnonzero(~magnitudes.all(axis=1)).tolist():
        whole = step is not None and values.shape[1] % step == 0
        rows = values[number].reshape(-1, step) if whole and step else None
        yield number, _Suspects(np.flatnonzero(magnitudes[number] == 0) + cell, cell, rows)


def _zero_cells(
    source: Source, piece: Piece, number: int, suspects: _Suspects, format_: FloatFormat
) -> _Cells:
    """Return which of the suspects have no value but zero."""
    run, rows = piece.run, suspects.rows
    if rows is not None:
        written = (rows[suspects.cells - suspects.first] & format_.magnitude).any(axis=1)
        return suspects.cells[~written]
    offset = run.offset + (piece.first + number) * run.stride + HEADER_BYTES
    block = Block(run.names[piece.first + number], offset, run.cells, run.tensor, "K", 0)
    return zero_cells(source, block, suspects.cells)


def zero_cells(source: Source, block: Block, cells: _Cells) -> _Cells:
    """Return which of these cells of a block have no value but zero; of scales, no scale.

    Reads the rows (or, transposed, the channels) of these cells, a chunk at a time, until it is
    sure that a cell is written.
    """
    tensor = block.tensor
    format_ = format_of(tensor)
    assert format_ is not None  # noqa: S101 - nobody suspects other types
    if isinstance(tensor, Rows):
        spans = [(block.offset + int(cell) * tensor.row_size, tensor.row_size) for cell in cells]
        found = [_is_zero(source, at, n_bytes, format_) for at, n_bytes in spans]
        return cells[np.array(found, np.bool_)]
    for channel in range(tensor.n_embd_v_gqa):
        if not len(cells):
            break
        low, high = int(cells[0]), int(cells[-1]) + 1
        at = block.offset + (channel * block.cells + low) * tensor.el_size
        data = read_slice(source, at, (high - low) * tensor.el_size)
        bits = np.frombuffer(data, f"<u{format_.size}")[cells - low]
        cells = cells[(bits & format_.magnitude) == 0]
    return cells


def _is_zero(source: Source, offset: int, n_bytes: int, format_: FloatFormat) -> bool:
    step = CHUNK_BYTES // format_.unit_bytes * format_.unit_bytes
    for start in range(0, n_bytes, step):
        some = min(step, n_bytes - start)
        data = read_slice(source, offset + start, some)
        shape = (some // format_.unit_bytes, format_.floats)
        strides = (format_.unit_bytes, format_.size)
        bits: Bits = np.ndarray(shape, f"<u{format_.size}", data, 0, strides)
        if (bits & format_.magnitude).any():
            return False
    return True
