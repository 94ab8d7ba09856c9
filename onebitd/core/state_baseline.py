"""What the data of a decoder's own state of a few tokens is like, and what that lets others be.

Measured on SmolLM2, Gemma 3 and small random models of six other kinds, f16 and q8_0, 40 prompts
each (prose, code, rare scripts, random ids, one token, one token many times): no row of K or V was
zero, and the largest magnitude of an attention tensor was 0.29 to 20.4 times that of the three
tokens in the baseline (those are control tokens, whose V is small). The bounds leave more than ten
times as much room on both sides. A recurrent state grows with its prompt (200 times were seen), so
it has none.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from onebitd.core.state_cursor import Source, read_slice
from onebitd.core.state_data import (
    HEADER_BYTES,
    Baseline,
    Bounds,
    Run,
    judge,
    peak_of,
    pieces_of,
    zero_cells,
)
from onebitd.core.state_floats import bits_of, float_of, format_of
from onebitd.core.state_layout import Block, KvSection, StateFile

MOST: Final = 256.0
LEAST: Final = 1 / 64
"""Bounds of a tensor's largest magnitude, as multiples of the one in the decoder's own state."""
_UNBOUNDED: Final = (0, 1 << 40)


def learn_baseline(source: Source, state: StateFile) -> Baseline:
    """Return what the data of a decoder's own state is like.

    Args:
        source: the file, with a state of a few tokens.
        state: what `parse` made of it.

    Raises:
        StateFileError: a value is not finite.
    """
    return Baseline(tuple(_bounds(source, part.blocks, part.shape) for part in state.sections))


def _bounds(source: Source, blocks: tuple[Block, ...], shape: object) -> Bounds:
    own = tuple(_peak(source, block) for block in blocks)
    bounded = isinstance(shape, KvSection)
    limits = [
        _limits(peak, block.tensor.type) if bounded and peak > 0 else _UNBOUNDED
        for peak, block in zip(own, blocks, strict=True)
    ]
    return Bounds(
        own,
        tuple(least for least, _ in limits),
        tuple(most for _, most in limits),
        tuple(_has_zero(source, block) for block in blocks),
    )


def _peak(source: Source, block: Block) -> int:
    if format_of(block.tensor) is None:
        return 0
    peak = 0
    run = Run(block.offset - HEADER_BYTES, block.tensor, block.cells, (block.what,), None)
    for piece in pieces_of(run):
        data = read_slice(source, piece.offset, piece.n_bytes)
        judge(source, piece, data)
        peak = max(peak, peak_of(piece, data))
    return peak


def _has_zero(source: Source, block: Block) -> bool:
    cells = np.arange(block.cells)
    return format_of(block.tensor) is None or bool(len(zero_cells(source, block, cells)))


def _limits(peak: int, type_: int) -> tuple[int, int]:
    """Return the bits of the least and the most that a largest magnitude may be."""
    value = float_of(peak, type_)
    return bits_of(value * LEAST, type_), bits_of(value * MOST, type_)
