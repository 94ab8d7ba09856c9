"""Whether a state file may be given to a decoder: its layout, tokens, positions and values.

Why check at all: a file that is one byte short aborts llama-server, and some well-formed nonsense
(a negative position, a missing first cell, a NaN) makes it answer wrongly until it is restarted.

Cost: `check` reads every byte once, `CHUNK_BYTES` at a time, and holds no more than that and one
chunk's worth of scratch: on one core 1 to 4 GB/s (16 MB of f16 in 5 to 15 ms; `os.pread` from tmpfs
is the fast end, the page faults of a fresh mmap the slow one).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from onebitd.core.errors import StateFileError
from onebitd.core.state_cursor import Cursor, Source, read_slice
from onebitd.core.state_layout import (
    SLIDING,
    Block,
    Cells,
    Ints,
    Layout,
    ReadSection,
    RecrSection,
    Rows,
    Section,
    layout_names,
)
from onebitd.core.state_sections import (
    expect_same,
    read_checkpoint_count,
    read_kv,
    read_recr,
    read_tokens,
    read_version,
)

CHUNK_BYTES = 1 << 20

_PARTIAL_MAGIC = 0xAF143CD8  # io_magic of llama_context's state reader
# Exponent bits that are all set in an infinity or a NaN.
_FLOATS = {0: ("<u4", 0x7F800000), 1: ("<u2", 0x7C00), 30: ("<u2", 0x7F80)}
# Bytes of a block and how many f16 (scale, minimum) it starts with.
_BLOCKS = {2: (18, 1), 3: (20, 2), 6: (22, 1), 7: (24, 2), 8: (34, 1), 20: (18, 1)}

_Find: TypeAlias = Callable[[bytes | bytearray | memoryview], int | None]


def check(
    buf: Source, layout: Layout, tokens: Sequence[int], *, swa_window: int | None = None
) -> None:
    """Refuse a file unless the decoder with this layout can be given it.

    It must hold exactly these tokens at positions 0..N-1 in order (a sliding window's tail of
    them may start anywhere in its ring), every field must be the layout's, it must end where its
    last section (or its context checkpoints) ends, and every value must be finite.

    Args:
        buf: the whole file. The walk reads each byte once and keeps none.
        layout: what `learn_layout` made of the decoder's own file.
        tokens: the N ids that were handed over: the prompt less its last.
        swa_window: the model's sliding window in tokens. An SWA section may then hold just the
            last min(N, window) cells or more, which is what llama-server saves. Without it, the
            section must hold all N: a tail that is too short would be silently wrong.

    Raises:
        StateFileError: a sentence that names section, layer and offset.
    """
    cursor = Cursor(buf)
    version = read_version(cursor)
    expect_same("the file", "state version", version, layout.version)
    packed, found = read_tokens(cursor, len(tokens))
    if packed and not layout.packed_tokens:
        raise StateFileError("the token list is packed; the decoder's build reads a plain one")
    expect_tokens(found, tokens)
    reader = _Guided(cursor, layout, found, swa_window)
    sections = reader.sections()
    checkpoints = reader.checkpoints() if layout.may_have_checkpoints else []
    cursor.expect_end()
    for section in (*sections, *checkpoints):
        for block in section.blocks:
            _expect_finite(buf, block)


class _Guided:
    """Reads the sections of a file that must follow a layout."""

    def __init__(
        self, cursor: Cursor, layout: Layout, tokens: Ints, swa_window: int | None
    ) -> None:
        self._cursor = cursor
        self._layout = layout
        self._tokens = tokens
        self._window = swa_window

    def sections(self) -> list[ReadSection]:
        names = layout_names(self._layout.sections)
        n = len(self._tokens)
        shapes = zip(names, self._layout.sections, strict=True)
        return [self._section(name, shape, n, "") for name, shape in shapes]

    def _section(self, name: str, shape: Section, n: int, prefix: str) -> ReadSection:
        """Read a section of a state of the first `n` tokens."""
        ring = name == SLIDING
        name = prefix + name
        least = n
        if isinstance(shape, RecrSection):
            section = read_recr(self._cursor, name, shape)
        else:
            if ring and self._window is not None:
                least = min(n, max(1, self._window))
            section = read_kv(
                self._cursor, name, shape, lambda count: _expect_count(name, count, least, n)
            )
        expect_cells(name, shape, section.cells, self._tokens[:n], least, ring=ring)
        return section

    def checkpoints(self) -> list[ReadSection]:
        """Read the appendix, if there is one: each is a partial state of fewer tokens."""
        cursor = self._cursor
        sections: list[ReadSection] = []
        for number in range(read_checkpoint_count(cursor) or 0):
            what = f"context checkpoint {number}"
            head = cursor.take(24, what)
            n_tokens, pos_min, pos_max, n_bytes = struct.unpack("<qiiQ", head)
            if not 0 <= pos_min <= pos_max < len(self._tokens) or n_tokens != pos_max + 1:
                raise StateFileError(
                    f"{what}: {n_tokens} tokens at positions {pos_min} to {pos_max}, "
                    f"in a state of {len(self._tokens)}"
                )
            end = cursor.at + n_bytes
            magic, _ = struct.unpack("<Ii", cursor.take(8, what))
            if magic != _PARTIAL_MAGIC:
                raise StateFileError(f"{what}: does not start as a partial state does")
            partial = self._layout.partial
            names = layout_names(self._layout.sections)[-len(partial) :]
            for name, shape in zip(names, partial, strict=True):
                sections.append(self._section(name, shape, n_tokens, f"{what}, "))
            if cursor.at != end or any(struct.unpack("<QQ", cursor.take(16, what))):
                raise StateFileError(f"{what}: its sizes are not those of the decoder's states")
        return sections


def expect_tokens(found: Ints, wanted: Sequence[int]) -> None:
    """Require exactly these ids, and at least one."""
    if len(found) != len(wanted):
        raise StateFileError(f"holds {len(found)} tokens, {len(wanted)} were handed over")
    if not wanted:
        raise StateFileError("holds no tokens")
    for index, (one, other) in enumerate(zip(found.tolist(), wanted, strict=True)):
        if one != other:
            raise StateFileError(f"token {index} is {one}, {other} was handed over")


def _expect_count(name: str, count: int, least: int, most: int) -> None:
    if not least <= count <= most:
        wanted = f"{least}" if least == most else f"{least} to {most}"
        raise StateFileError(f"section {name}: {count} cells, {wanted} expected")


def expect_cells(
    name: str, shape: Section, cells: Cells, tokens: Ints, least: int, *, ring: bool = False
) -> None:
    """Require consecutive positions that end at the last token's, at least so many.

    A sliding window's cache is a ring unless llama-server runs with --swa-full: the file holds
    its cells in the order of their places, so the last positions may come before the first ones.
    """
    n = len(tokens)
    if isinstance(shape, RecrSection):
        if int(cells.pos[0]) != n - 1:
            raise StateFileError(f"{name}: position {cells.pos[0]}, {n - 1} expected")
        return
    _expect_count(name, len(cells.pos), least, n)
    first = n - len(cells.pos)
    wanted = np.arange(first, n, dtype=np.int32)
    if ring and first < cells.pos[0] < n:
        wanted = np.roll(wanted, first - int(cells.pos[0]))
    _expect_column(name, "position", cells.pos, wanted)
    if shape.ext_bytes:
        _expect_column(name, "x", cells.ext[:, 0], wanted)
        _expect_column(name, "y", cells.ext[:, 1], wanted)
    if shape.ext_bytes == 12:
        _expect_column(name, "token", cells.ext[:, 2], tokens[wanted])


def _expect_column(name: str, field: str, found: Ints, wanted: Ints) -> None:
    wrong = found != wanted
    if wrong.any():
        at = int(np.argmax(wrong))
        raise StateFileError(
            f"section {name}, cell {at}: {field} {found[at]}, {wanted[at]} expected"
        )


def _expect_finite(buf: Source, block: Block) -> None:
    """Refuse an infinity or a NaN; types that are not cache types are let through unread."""
    unit, find = _finder(block.tensor.type)
    if unit == 0 or block.n_bytes % unit:
        return
    for start, data in _chunks(buf, block, unit):
        index = find(data)
        if index is not None:
            at = start + index * unit
            raise StateFileError(
                f"{block.what}: a NaN or an infinity at byte {block.offset + at} "
                f"({_place(block, at)})"
            )


def _chunks(
    buf: Source, block: Block, unit: int
) -> Iterator[tuple[int, bytes | bytearray | memoryview]]:
    step = CHUNK_BYTES - CHUNK_BYTES % unit
    for start in range(0, block.n_bytes, step):
        n_bytes = min(step, block.n_bytes - start)
        yield start, read_slice(buf, block.offset + start, n_bytes)


def _finder(type_: int) -> tuple[int, _Find]:
    """Return the bytes of one unit of a type, and what finds the first bad unit in many."""
    if type_ in _FLOATS:
        dtype, mask = _FLOATS[type_]

        def find_float(data: bytes | bytearray | memoryview) -> int | None:
            bits = np.frombuffer(data, dtype) & mask
            return int(bits.argmax()) if bits.max() == mask else None

        return np.dtype(dtype).itemsize, find_float
    if type_ in _BLOCKS:
        size, scales = _BLOCKS[type_]
        record = np.dtype([("scale", "<u2", (scales,)), ("rest", f"V{size - 2 * scales}")])

        def find_block(data: bytes | bytearray | memoryview) -> int | None:
            bits = (np.frombuffer(data, record)["scale"] & 0x7C00).max(axis=1)
            return int(bits.argmax()) if bits.max() == 0x7C00 else None

        return size, find_block
    return 0, lambda data: None


def _place(block: Block, at: int) -> str:
    if isinstance(block.tensor, Rows):
        return f"cell {at // block.tensor.row_size}"
    element = at // block.tensor.el_size
    return f"channel {element // block.cells}, cell {element % block.cells}"
