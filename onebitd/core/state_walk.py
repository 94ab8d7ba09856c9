"""Walking through a state file that must follow a layout: what describes its data, without it.

There is one definition of what is right: the readers of `state_sections`, `expect_tokens` and
`expect_cells`. `Walk.runs` goes by them from header to header and knows a sentence for whatever is
wrong. `Walk.quick_runs` knows from layout and tokens which bytes they would accept and where the
headers must lie; where it finds anything else, it leaves the file to `runs`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import TypeAlias

import numpy as np

from onebitd.core.errors import StateFileError
from onebitd.core.state_cursor import Cursor, Source
from onebitd.core.state_data import HEADER_BYTES, Baseline, Bounds, Run
from onebitd.core.state_layout import (
    SLIDING,
    Cells,
    Ints,
    Layout,
    RecrSection,
    Section,
    Tensor,
    layout_names,
    tensor_places,
)
from onebitd.core.state_sections import (
    expect_same,
    read_checkpoint_count,
    read_kv,
    read_recr,
    read_tokens,
    read_version,
)

_PARTIAL_MAGIC = 0xAF143CD8  # io_magic of llama_context's state reader
_Stack: TypeAlias = tuple[Tensor, tuple[str, ...]]


class Walk:
    """One file that must follow a layout; made, it has read the header and the tokens.

    Args: as for `state_check.check`.

    Raises:
        StateFileError: another header or other tokens.
    """

    def __init__(
        self,
        source: Source,
        layout: Layout,
        tokens: Sequence[int],
        swa_window: int | None,
        baseline: Baseline | None,
    ) -> None:
        self.source = source
        self._layout = layout
        self._window = swa_window
        cursor = Cursor(source)
        version = read_version(cursor)
        expect_same("the file", "state version", version, layout.version)
        packed, self._tokens = read_tokens(cursor, len(tokens))
        if packed and not layout.packed_tokens:
            raise StateFileError("the token list is packed; the decoder's build reads a plain one")
        expect_tokens(self._tokens, tokens)
        self._start = cursor.at
        none: tuple[Bounds | None, ...] = (None,) * len(layout.sections)
        bounds = none if baseline is None else baseline.sections
        names = layout_names(layout.sections)
        self._parts = list(zip(names, layout.sections, bounds, strict=True))

    def runs(self) -> list[Run]:
        """Read header by header up to the end, and say what is wrong where it is."""
        cursor, n = Cursor(self.source, self._start), len(self._tokens)
        runs = [run for part in self._parts for run in self._section(cursor, *part, n)]
        return self._to_end(cursor, runs)

    def quick_runs(self) -> list[Run] | None:
        """Return what `runs` does, from sizes alone; the headers are left for `judge` to compare.

        None for what `runs` refuses, or might.
        """
        cursor = Cursor(self.source, self._start)
        runs: list[Run] = []
        for name, shape, bounds in self._parts:
            count = self._quick_head(cursor, name, shape)
            if count is None:
                return None
            start = cursor.at
            runs += _runs(name, shape, count, start, bounds)
            end = runs[-1].end if _stacks(name, shape) else start
            if end > cursor.size:
                return None
            cursor.at = end
        try:
            return self._to_end(cursor, runs)
        except StateFileError:
            return None

    def _quick_head(self, cursor: Cursor, name: str, shape: Section) -> int | None:
        """Pass over the head of a section and return its number of cells; None if it is not right.

        It is right if its bytes are those that the readers and `expect_cells` ask for.
        """
        n = len(self._tokens)
        if isinstance(shape, RecrSection):
            wanted = struct.pack("<IiIII", 1, n - 1, 0, 0, shape.n_layer)
            return 1 if _next(cursor, len(wanted)) == wanted else None
        head = _next(cursor, 8)
        if head is None:
            return None
        n_stream, count = struct.unpack("<II", head)
        if n_stream != 1 or not self._least(name, n) <= count <= n:
            return None
        tail = struct.pack("<II", shape.v_trans, len(shape.k))
        if shape.n_rot_k is not None:
            tail += struct.pack("<Ii", shape.n_rot_k, shape.n_rot_v)
        width = 12 + shape.ext_bytes
        data = _next(cursor, count * width + len(tail))
        if data is None or data[count * width :] != tail:
            return None
        table = np.frombuffer(data, "<i4", count * width // 4).reshape(count, width // 4)
        pos = _positions(n, count, int(table[0, 0]), ring=name == SLIDING)
        columns = [pos, np.ones_like(pos), pos, pos, self._tokens[pos]][: width // 4 - 1]
        right = all(np.array_equal(table[:, index], column) for index, column in enumerate(columns))
        return int(count) if right else None

    def _least(self, name: str, n: int) -> int:
        """Return how many cells a section of the state of `n` tokens must have."""
        if name.endswith(SLIDING) and self._window is not None:
            return min(n, max(1, self._window))
        return n

    def _section(
        self, cursor: Cursor, name: str, shape: Section, bounds: Bounds | None, n: int
    ) -> list[Run]:
        """Read a section of a state of the first `n` tokens."""
        least = self._least(name, n)
        if isinstance(shape, RecrSection):
            section = read_recr(cursor, name, shape)
        else:
            section = read_kv(
                cursor, name, shape, lambda count: _expect_count(name, count, least, n)
            )
        ring = name.endswith(SLIDING)
        expect_cells(name, shape, section.cells, self._tokens[:n], least, ring=ring)
        if not section.blocks:
            return []
        start = section.blocks[0].offset - HEADER_BYTES
        return _runs(name, shape, section.blocks[0].cells, start, bounds)

    def _to_end(self, cursor: Cursor, runs: list[Run]) -> list[Run]:
        """Read what is behind the sections, which is nothing or the appendix."""
        if self._layout.may_have_checkpoints:
            runs = runs + self._checkpoints(cursor)
        cursor.expect_end()
        return runs

    def _checkpoints(self, cursor: Cursor) -> list[Run]:
        """Read the appendix, if there is one: each is a partial state of fewer tokens."""
        runs: list[Run] = []
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
            for name, shape, bounds in self._parts[-len(self._layout.partial) :]:
                runs += self._section(cursor, f"{what}, {name}", shape, bounds, n_tokens)
            if cursor.at != end or any(struct.unpack("<QQ", cursor.take(16, what))):
                raise StateFileError(f"{what}: its sizes are not those of the decoder's states")
        return runs


def _next(cursor: Cursor, n_bytes: int) -> bytes | None:
    """Return the next bytes and pass over them; None if there are not as many."""
    return bytes(cursor.take(n_bytes, "the file")) if n_bytes <= cursor.left else None


@lru_cache(maxsize=16)
def _stacks(name: str, shape: Section) -> list[_Stack]:
    """Return the tensors of a section, with their names, grouped where they are of one shape."""
    places = tensor_places(name, shape)
    groups = groupby(places, key=lambda place: place[3])
    return [(tensor, tuple(what for what, *_ in group)) for tensor, group in groups]


def _runs(name: str, shape: Section, count: int, start: int, bounds: Bounds | None) -> list[Run]:
    """Return the runs of a section with so many cells, whose first tensor begins at a place."""
    runs: list[Run] = []
    first = 0
    for tensor, names in _stacks(name, shape):
        some = None if bounds is None else bounds.some(first, len(names))
        runs.append(Run(start, tensor, count, names, some))
        start = runs[-1].end
        first += len(names)
    return runs


def expect_tokens(found: Ints, wanted: Sequence[int]) -> None:
    """Require exactly these ids, and at least one."""
    if len(found) != len(wanted):
        raise StateFileError(f"holds {len(found)} tokens, {len(wanted)} were handed over")
    if not wanted:
        raise StateFileError("holds no tokens")
    differ = found != np.asarray(wanted, np.int64)
    if differ.any():
        # Where, not which: the ids are the prompt, and this goes into the log.
        raise StateFileError(f"token {int(np.argmax(differ))} is not the one that was handed over")


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
    wanted = _positions(n, len(cells.pos), int(cells.pos[0]), ring=ring)
    _expect_column(name, "position", cells.pos, wanted)
    if shape.ext_bytes:
        _expect_column(name, "x", cells.ext[:, 0], wanted)
        _expect_column(name, "y", cells.ext[:, 1], wanted)
    if shape.ext_bytes == 12:
        wrong = cells.ext[:, 2] != tokens[wanted]
        if wrong.any():  # where, not which: the ids are the prompt
            at = int(np.argmax(wrong))
            raise StateFileError(f"section {name}, cell {at}: not the token that was handed over")


def _positions(n: int, count: int, found_first: int, *, ring: bool) -> Ints:
    """Return the last `count` of `n` positions; in a ring, from the one found first on."""
    first = n - count
    wanted = np.arange(first, n, dtype=np.int32)
    return np.roll(wanted, first - found_first) if ring and first < found_first < n else wanted


def _expect_column(name: str, field: str, found: Ints, wanted: Ints) -> None:
    wrong = found != wanted
    if wrong.any():
        at = int(np.argmax(wrong))
        raise StateFileError(
            f"section {name}, cell {at}: {field} {found[at]}, {wanted[at]} expected"
        )
