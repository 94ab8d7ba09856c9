"""What it would be worth to split one prompt's rows between two engines: arithmetic, no clock.

The GPU takes a row at a time, the NPU whole tiles of rows. One after the other, a split is a sum,
and a sum of two linear costs is best at one of its ends: one engine takes everything. At the same
time, the best split has both end together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

TILE_ROWS: Final = 256
"""Rows that one tile of the NPU takes, whether all of them are used or not."""


@dataclass(frozen=True, slots=True)
class Engines:
    """How fast both are.

    Args:
        gpu_ms_per_row: linear in the rows, which flatters small parts of a prompt.
        npu_ms_per_tile: for a tile, however many of its rows are used.
    """

    gpu_ms_per_row: float
    npu_ms_per_tile: float

    @property
    def npu_ms_per_row(self) -> float:
        """The NPU's rate when every tile is full."""
        return self.npu_ms_per_tile / TILE_ROWS

    @property
    def ceiling(self) -> float:
        """How many times as fast as the GPU alone both are when rows could be split freely."""
        return 1.0 + self.gpu_ms_per_row / self.npu_ms_per_row

    def gpu_ms(self, rows: int) -> float:
        """Return the GPU's time for so many rows."""
        return rows * self.gpu_ms_per_row

    def npu_ms(self, rows: int) -> float:
        """Return the NPU's time for so many rows, the last tile counted whole."""
        return -(-rows // TILE_ROWS) * self.npu_ms_per_tile


@dataclass(frozen=True, slots=True)
class Split:
    """A division of a prompt's rows: `npu_rows` first, the rest on the GPU; `ms` for all of it."""

    npu_rows: int
    gpu_rows: int
    ms: float
    speedup: float
    """The GPU's time for the whole, over this one's."""

    @property
    def npu_tiles(self) -> int:
        """Tiles that the NPU computes, the last one perhaps not full."""
        return -(-self.npu_rows // TILE_ROWS)


def best_sequential(rows: int, engines: Engines) -> Split:
    """Return the best prefix for the NPU when the GPU waits until it is done.

    While the GPU's rate is at least as good, that is no row at all.
    """
    return _best(rows, engines, lambda npu, gpu: npu + gpu)


def best_concurrent(rows: int, engines: Engines) -> Split:
    """Return the best division in whole tiles when both work at the same time."""
    return _best(rows, engines, max)


def end_to_end(share: float, speedup: float) -> float:
    """Return how many times as fast the whole is when a share of it gets a speed-up.

    >>> round(end_to_end(0.5, 2.0), 3)
    1.333
    """
    return 1.0 / ((1.0 - share) + share / speedup)


def _best(rows: int, engines: Engines, total: Callable[[float, float], float]) -> Split:
    alone = engines.gpu_ms(rows)
    choices = [*range(0, rows, TILE_ROWS), rows]
    times = [total(engines.npu_ms(npu), engines.gpu_ms(rows - npu)) for npu in choices]
    best = min(range(len(choices)), key=times.__getitem__)  # the first: the fewest on the NPU
    npu, ms = choices[best], times[best]
    return Split(npu, rows - npu, ms, alone / ms)
