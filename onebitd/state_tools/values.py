"""Ranges of the values of each tensor, as `onebitctl state show --values` tells them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onebitd.core.state_cursor import Source
from onebitd.core.state_layout import Block
from onebitd.core.state_pairs import PIECE_VALUES
from onebitd.core.state_values import read_rows, width_of


@dataclass(frozen=True, slots=True)
class Range:
    """The values of one tensor.

    Attributes:
        what: as messages call the tensor.
        minimum, maximum, rms: of the finite values; 0 where there is none.
        zero_rows: cells whose values are all zero.
        not_finite: how many values are NaN or infinite.
    """

    what: str
    minimum: float
    maximum: float
    rms: float
    zero_rows: int
    not_finite: int


def range_of(source: Source, block: Block) -> Range:
    """Read one tensor, a piece at a time.

    Raises:
        StateFileError: its type is not known.
    """
    width = width_of(block.tensor)
    step = max(1, PIECE_VALUES // max(1, width))
    low, high, square, zero_rows, not_finite = np.inf, -np.inf, 0.0, 0, 0
    for start in range(0, block.cells, step):
        rows = read_rows(source, block, start, min(start + step, block.cells)).astype(np.float64)
        finite = np.isfinite(rows)
        zero_rows += int((~rows.any(axis=1)).sum()) if width else 0
        not_finite += int((~finite).sum())
        values = rows[finite]
        if len(values):
            low, high = min(low, float(values.min())), max(high, float(values.max()))
            square += float(values @ values)
    count = block.cells * width - not_finite
    if not count:
        low = high = 0.0
    rms = float(np.sqrt(square / max(1, count)))
    return Range(block.what, float(low), float(high), rms, zero_rows, not_finite)
