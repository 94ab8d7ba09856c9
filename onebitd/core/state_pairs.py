"""Which tensors and rows of two state files belong together.

Tensors go by section, part and layer, rows by position: so caches of different length, a sliding
window's ring and transposed V compare where they overlap. A cache row depends on its prefix only;
rows behind the first token that differs are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from onebitd.core.errors import StateFileError
from onebitd.core.state_cursor import Source
from onebitd.core.state_layout import (
    Block,
    Ints,
    KvSection,
    ReadSection,
    StateFile,
    type_name,
)
from onebitd.core.state_values import FLOAT_BYTES, Floats, read_rows, turn, width_of

PIECE_VALUES: Final = 1 << 19
"""Values of one tensor that are held at a time."""
_TURNS: Final = (0, 32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class Side:
    """One tensor of one file.

    Attributes:
        index: its cells at the common positions, shape (n,).
        n_rot: the rotation of its rows that has to be undone.
    """

    source: Source
    block: Block
    index: npt.NDArray[np.intp]
    n_rot: int = 0

    def rows(self, start: int, stop: int) -> Floats:
        """Return the rows at common positions `start` to `stop` - 1, shape (rows, width)."""
        return self._read(self.index[start:stop])

    def rows_at(self, places: npt.NDArray[np.intp]) -> Floats:
        """Return the rows at these places among the common positions, shape (rows, width)."""
        return self._read(self.index[places])

    def _read(self, index: npt.NDArray[np.intp]) -> Floats:
        cuts = np.flatnonzero(np.diff(index) != 1) + 1
        parts = [
            read_rows(self.source, self.block, int(run[0]), int(run[-1]) + 1)
            for run in np.split(index, cuts)
            if len(run)
        ]
        return turn(parts[0] if len(parts) == 1 else np.concatenate(parts), self.n_rot)


@dataclass(frozen=True, slots=True)
class Pair:
    """The same tensor in two files; `b` is the reference.

    Attributes:
        pos: the common positions, ascending, shape (n,).
        n_rot: the rotation that both files' rows still have.
    """

    section: str
    part: Literal["K", "V", "R", "S"]
    layer: int
    a: Side
    b: Side
    pos: Ints
    width: int
    n_rot: int = 0

    @property
    def what(self) -> str:
        """What messages call it."""
        return self.b.block.what

    def pieces(self) -> Iterator[tuple[int, Floats, Floats]]:
        """Yield the number of a first row, and some rows of a and of b."""
        step = max(1, PIECE_VALUES // max(1, self.width))
        for start in range(0, len(self.pos), step):
            stop = min(start + step, len(self.pos))
            yield start, self.a.rows(start, stop), self.b.rows(start, stop)


@dataclass(frozen=True, slots=True)
class Pairing:
    """What can be compared.

    Attributes:
        notes: what the comparison leaves out or had to suppose, as sentences.
        gaps: what should have been comparable and is not, as sentences.
    """

    pairs: tuple[Pair, ...]
    notes: tuple[str, ...]
    gaps: tuple[str, ...]


def pair_up(
    a: StateFile, a_source: Source, b: StateFile, b_source: Source, positions: range | None
) -> Pairing:
    """Match the tensors and rows of two files; `positions` restricts the rows."""
    matcher = _Matcher(a_source, b_source)
    common = _common_prefix(a.tokens, b.tokens)
    limit = _limits(matcher, a, b, common, positions)
    theirs = _filled(b)
    for key, mine in _filled(a).items():
        other = theirs.pop(key, None)
        if other is None:
            matcher.gaps.append(f"section {mine.what}: the first file alone has cells")
        else:
            matcher.section(mine, other, limit)
    matcher.gaps += [f"section {key[0]}: the second file alone has cells" for key in theirs]
    return Pairing(tuple(matcher.pairs), tuple(matcher.notes), tuple(matcher.gaps))


def _filled(state: StateFile) -> dict[tuple[str, int], ReadSection]:
    """Return the sections with cells; in a file of several streams one stream has them."""
    found: dict[tuple[str, int], ReadSection] = {}
    for section in state.sections:
        if len(section.cells.pos):
            number = sum(key[0] == section.what for key in found)
            found[section.what, number] = section
    return found


def _limits(
    matcher: _Matcher, a: StateFile, b: StateFile, common: int, positions: range | None
) -> range:
    n_a, n_b = len(a.tokens), len(b.tokens)
    limit = range(common) if positions is None else positions
    if common < max(n_a, n_b) and (positions is None or positions.stop > common):
        if common < min(n_a, n_b):
            why = f"the tokens differ from number {common} on"
        else:
            why = f"the files hold {n_a} and {n_b} tokens"
        rest = f"only positions 0 to {common - 1} can be compared" if common else "no row can be"
        matcher.notes.append(f"{why}: {rest}")
    return range(max(0, limit.start), min(limit.stop, common))


class _Matcher:
    """Collects pairs, notes and gaps."""

    def __init__(self, a_source: Source, b_source: Source) -> None:
        self._a, self._b = a_source, b_source
        self.pairs: list[Pair] = []
        self.notes: list[str] = []
        self.gaps: list[str] = []

    def section(self, a: ReadSection, b: ReadSection, limit: range) -> None:
        """Match one section's tensors."""
        theirs = {(block.part, block.layer): block for block in b.blocks}
        if [(block.part, block.layer) for block in a.blocks] != list(theirs):
            self.gaps.append(
                f"section {a.what}: {_contents(a)} in the first file, {_contents(b)} in the second"
            )
            return
        pos, index_a, index_b = np.intersect1d(a.cells.pos, b.cells.pos, return_indices=True)
        keep = (pos >= limit.start) & (pos < limit.stop)
        pos, index_a, index_b = pos[keep], index_a[keep], index_b[keep]
        if not len(pos):
            self.gaps.append(
                f"section {a.what}: no position to compare: the first file has "
                f"{_span(a.cells.pos)}, the second {_span(b.cells.pos)}, asked for are "
                f"{limit.start} to {limit.stop - 1}"
                if limit
                else f"section {a.what}: no position to compare"
            )
            return
        self._say_transposed(a, b)
        for mine in a.blocks:
            other = theirs[mine.part, mine.layer]
            sides = Side(self._a, mine, index_a), Side(self._b, other, index_b)
            self._tensor(a, b, sides, np.asarray(pos, np.int32))

    def _say_transposed(self, a: ReadSection, b: ReadSection) -> None:
        one, other = a.shape, b.shape
        if isinstance(one, KvSection) and isinstance(other, KvSection) and one.v and other.v:
            words = ("row by row", "transposed")
            if one.v_trans != other.v_trans:
                self.notes.append(
                    f"section {a.what}: V lies {words[one.v_trans]} in the first file and "
                    f"{words[other.v_trans]} in the second (flash attention on and off)"
                )

    def _tensor(self, a: ReadSection, b: ReadSection, sides: tuple[Side, Side], pos: Ints) -> None:
        mine, other = sides[0].block, sides[1].block
        try:
            widths = width_of(mine.tensor), width_of(other.tensor)
        except StateFileError as error:
            self.gaps.append(f"{mine.what}: {error}")
            return
        if widths[0] != widths[1]:
            self.gaps.append(
                f"{mine.what}: {widths[0]} values a row ({type_name(mine.tensor.type)}) in the "
                f"first file, {widths[1]} ({type_name(other.tensor.type)}) in the second"
            )
        elif widths[0]:
            rots = _rotation(a, mine), _rotation(b, other)
            self.pairs.append(self._turned(a.what, sides, pos, widths[0], rots))

    def _turned(
        self,
        section: str,
        sides: tuple[Side, Side],
        pos: Ints,
        width: int,
        rots: tuple[int | None, int | None],
    ) -> Pair:
        a, b = sides
        part, layer = b.block.part, b.block.layer
        if rots[0] == rots[1]:
            return Pair(section, part, layer, a, b, pos, width, rots[0] or 0)
        known = rots[0] is not None and rots[1] is not None
        guess = (rots[0] or 0, rots[1] or 0) if known else _best_turn(a, b, width, rots)
        if not known and layer == 0:
            self.notes.append(
                f"section {section}: this version does not say how far quantized {part} rows are "
                f"rotated; {max(guess)} fits best and is undone"
            )
        a = Side(a.source, a.block, a.index, guess[0])
        b = Side(b.source, b.block, b.index, guess[1])
        return Pair(section, part, layer, a, b, pos, width)


def _rotation(section: ReadSection, block: Block) -> int | None:
    """Return how a tensor's rows are rotated; None where the file does not say."""
    if block.tensor.type in FLOAT_BYTES or not isinstance(section.shape, KvSection):
        return 0
    return section.shape.n_rot_k if block.part == "K" else section.shape.n_rot_v


def _best_turn(
    a: Side, b: Side, width: int, rots: tuple[int | None, int | None]
) -> tuple[int, int]:
    """Return the rotations under which the first rows agree best."""
    n = min(len(a.index), 64)
    rows_a, rows_b = a.rows(0, n), b.rows(0, n)
    sizes = [size for size in _TURNS if size == 0 or width % size == 0]
    trials = [
        (one, other)
        for one in (sizes if rots[0] is None else [rots[0]])
        for other in (sizes if rots[1] is None else [rots[1]])
    ]
    return min(trials, key=lambda t: float(np.abs(turn(rows_a, t[0]) - turn(rows_b, t[1])).sum()))


def _common_prefix(a: Ints, b: Ints) -> int:
    n = min(len(a), len(b))
    wrong = np.flatnonzero(a[:n] != b[:n])
    return int(wrong[0]) if len(wrong) else n


def _contents(section: ReadSection) -> str:
    parts = [block.part for block in section.blocks]
    counts = [f"{parts.count(part)} {part}" for part in dict.fromkeys(parts)]
    return " and ".join(counts) + " tensors" if counts else "nothing"


def _span(pos: Ints) -> str:
    return f"{pos.min()} to {pos.max()}" if len(pos) else "none"
