"""Writing llama.cpp sequence-state files: a new one, or a file that was read once more.

The format is in the docstring of `state_file`. Nothing here opens a file: `write` is called with
each piece in file order and must take all of it, as `write` of a file opened with "wb" does.
Memory: one tensor for a new file, `CHUNK_BYTES` for one that was read, and some cells.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from onebitd.core.errors import StateFileError
from onebitd.core.state_cursor import Source, read_slice
from onebitd.core.state_layout import (
    SLIDING,
    Cells,
    Ints,
    KvSection,
    Layout,
    RecrSection,
    Section,
    StateFile,
    layout_names,
    tensor_places,
)
from onebitd.core.state_sections import MAGIC, PACKED, PACKED_VERSION, VERSIONS

CHUNK_BYTES = 1 << 20

_TOKENS_A_WRITE = 1 << 18
_CELLS_A_WRITE = 1 << 15
_MAX_ID = 2**31 - 1

_Piece: TypeAlias = bytes | bytearray | memoryview
_Buffer: TypeAlias = bytes | memoryview


class _Out:
    """Counts what is written."""

    def __init__(self, write: Callable[[_Piece], object]) -> None:
        self._write = write
        self.n_bytes = 0

    def put(self, piece: _Piece) -> None:
        self._write(piece)
        self.n_bytes += len(piece)

    def u32(self, *values: int) -> None:
        self.put(struct.pack(f"<{len(values)}I", *values))


def rewrite(
    write: Callable[[bytes | bytearray | memoryview], object], state: StateFile, source: Source
) -> int:
    """Write a file that was read once more, byte for byte.

    A state whose `packed` was replaced by False is written with a plain token list, which every
    build accepts.

    Args:
        write: takes the pieces.
        state: what `parse` made of the source.
        source: the file; the data and the appendix are copied from it, a chunk at a time.

    Returns:
        the number of bytes written.

    Raises:
        StateFileError: the source became shorter.
    """
    out = _Out(write)
    _header(out, state.version, state.tokens, packed=state.packed)
    for section in state.sections:
        if isinstance(section.shape, RecrSection):
            _recr_head(out, section.shape, int(section.cells.pos[0]))
        else:
            if section.stream == 0:
                out.u32(sum(other.what == section.what for other in state.sections))
            _stream_head(out, section.shape, section.cells)
        for block in section.blocks:
            out.put(block.tensor.header())
            _copy(out, source, block.offset, block.n_bytes)
    _copy(out, source, state.sections_end, state.size - state.sections_end)
    return out.n_bytes


def _copy(out: _Out, source: Source, start: int, n_bytes: int) -> None:
    for at in range(0, n_bytes, CHUNK_BYTES):
        out.put(read_slice(source, start + at, min(CHUNK_BYTES, n_bytes - at)))


def write_state(
    write: Callable[[bytes | bytearray | memoryview], object],
    layout: Layout,
    tokens: Sequence[int],
    data: Iterable[bytes | memoryview],
    *,
    swa_cells: int | None = None,
) -> int:
    """Write a new state of these tokens at positions 0 to N-1, as a decoder with one slot does.

    Args:
        write: takes the pieces.
        layout: of the decoder that is to read it.
        tokens: the N ids; they are listed plainly, which every build accepts.
        data: one contiguous buffer (bytes, or the `data` of an array) for each tensor in file
            order, each of `tensor.data_bytes(cells)` bytes: for each section K of each layer, then
            V of each layer, N rows each (transposed V: each channel's N elements); then the R rows
            and the S rows of a recurrent state after the last token. Each is asked for when the
            one before is written, so a generator holds one at a time.
        swa_cells: the section with a sliding window holds just the last positions, so many (all
            of a shorter prompt), and its buffers have so many rows. At least the window is wanted.

    Returns:
        the number of bytes written.

    Raises:
        StateFileError: the tokens or the layout cannot be written, or a buffer is missing, has
            another size than its tensor, or is one too many; names the tensor. What was written
            until then is no state.
    """
    ids = _ids(tokens)
    names = layout_names(layout.sections)
    if layout.version not in VERSIONS:
        raise StateFileError(f"state version {layout.version} is not known (2, 3 and 4 are)")
    if swa_cells is not None and swa_cells < 1:
        raise StateFileError(f"a sliding window of {swa_cells} cells cannot be")
    for name, shape in zip(names, layout.sections, strict=True):
        if isinstance(shape, KvSection):
            _expect_rotation(layout.version, name, shape)
    out = _Out(write)
    _header(out, layout.version, ids, packed=False)
    buffers = iter(data)
    for name, shape in zip(names, layout.sections, strict=True):
        n_cells = len(ids)
        if name == SLIDING and swa_cells is not None:
            n_cells = min(n_cells, swa_cells)
        _section(out, name, shape, ids, n_cells, buffers)
    if next(buffers, None) is not None:
        raise StateFileError("there is more data than the layout has tensors")
    return out.n_bytes


def _section(
    out: _Out, name: str, shape: Section, ids: Ints, n_cells: int, buffers: Iterator[_Buffer]
) -> None:
    """Write one section, which holds the last so many of these ids."""
    if isinstance(shape, RecrSection):
        n_cells = 1
        _recr_head(out, shape, len(ids) - 1)
    else:
        out.u32(1)
        _stream_head(out, shape, _text_cells(ids, n_cells, shape.ext_bytes))
    for what, _, _, tensor in tensor_places(name, shape):
        out.put(tensor.header())
        buffer = next(buffers, None)
        if buffer is None:
            raise StateFileError(f"{what}: the data ends before it")
        view, wanted = memoryview(buffer), tensor.data_bytes(n_cells)
        if view.nbytes != wanted:
            raise StateFileError(f"{what}: {view.nbytes} bytes of data, {wanted} expected")
        if wanted:  # a view of nothing cannot be cast
            out.put(view.cast("B"))


def _ids(tokens: Sequence[int]) -> Ints:
    """Return the tokens as the file holds them."""
    if not len(tokens):
        raise StateFileError("there are no tokens, so there is no state")
    ids = np.asarray(tokens)
    wrong = (ids < 0) | (ids > _MAX_ID)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise StateFileError(f"token {at} is {ids[at]}, which is no id")
    return ids.astype(np.int32)


def _expect_rotation(version: int, name: str, shape: KvSection) -> None:
    """Refuse a section that this version could not say, or would say wrongly."""
    for rot in (shape.n_rot_k, shape.n_rot_v):
        if (rot is not None) is not (version >= 4):
            raise StateFileError(f"section {name}: n_rot is part of version 4 files, and only them")


def _header(out: _Out, version: int, tokens: Ints, *, packed: bool) -> None:
    n_tokens = len(tokens)
    out.u32(MAGIC, version, n_tokens + 4 if packed else n_tokens)
    if packed:
        out.put(struct.pack("<iii", PACKED, PACKED_VERSION, n_tokens))
    for start in range(0, n_tokens, _TOKENS_A_WRITE):
        out.put(tokens[start : start + _TOKENS_A_WRITE].astype("<i4").tobytes())
    if packed:
        out.u32(0)  # n_media


def _recr_head(out: _Out, shape: RecrSection, pos: int) -> None:
    out.put(struct.pack("<IiIII", 1, pos, 0, 0, shape.n_layer))


def _stream_head(out: _Out, shape: KvSection, cells: Cells) -> None:
    """Write what comes before the tensors; of a stream without cells that is all there is."""
    count = len(cells.pos)
    out.u32(count)
    if not count:
        return
    for start in range(0, count, _CELLS_A_WRITE):
        some = slice(start, start + _CELLS_A_WRITE)
        columns = (cells.pos[some], cells.n_seq_id[some], cells.ext[some], cells.seq_id[some])
        out.put(np.column_stack(columns).astype("<i4").tobytes())
    out.u32(shape.v_trans, len(shape.k))
    if shape.n_rot_k is not None and shape.n_rot_v is not None:
        out.u32(shape.n_rot_k, shape.n_rot_v)


def _text_cells(ids: Ints, count: int, ext_bytes: int) -> Cells:
    """Return the cells of the last so many tokens of a text."""
    pos = np.arange(len(ids) - count, len(ids), dtype=np.int32)
    ext = np.column_stack((pos, pos, ids[pos]))[:, : ext_bytes // 4]
    return Cells(pos=pos, n_seq_id=np.ones_like(pos), ext=ext, seq_id=np.zeros_like(pos))
