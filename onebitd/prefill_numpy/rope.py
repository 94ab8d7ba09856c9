"""Rotary position embedding: what makes a key depend on its position.

A head's values are taken in pairs, and pair i of position p is turned by the angle

    p / factor * base ** (-2 * i / dims) / factors[i]

`factor` stretches positions evenly (linear scaling), `factors` each pair by its own (Llama 3). The
pairs are neighbours, or one value of the first half with its like of the second.

Angles are computed in float64: position 30000 has none of float32's digits to spare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]
Pairing: TypeAlias = Literal["adjacent", "halves"]


@dataclass(frozen=True, slots=True)
class Rope:
    """One way to turn rows.

    Attributes:
        dims: values of a head that are turned; those behind them stay as they are.
    """

    pairing: Pairing
    dims: int
    base: float
    factor: float
    factors: tuple[float, ...] | None

    def angles(self, start: int, stop: int) -> tuple[Floats, Floats]:
        """Return cosines and sines of the positions, each of shape (positions, 1, dims / 2)."""
        frequencies = self.base ** (-2.0 * np.arange(self.dims // 2) / self.dims) / self.factor
        if self.factors is not None:
            frequencies = frequencies / np.array(self.factors)
        angles = np.arange(start, stop)[:, None, None] * frequencies
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def turn(self, rows: Floats, angles: tuple[Floats, Floats]) -> None:
        """Turn rows in place.

        Args:
            rows: shape (positions, heads, values of a head).
            angles: of these positions.
        """
        half = self.dims // 2
        if self.pairing == "adjacent":
            first, second = rows[..., 0 : self.dims : 2], rows[..., 1 : self.dims : 2]
        else:
            first, second = rows[..., :half], rows[..., half : self.dims]
        cos, sin = angles
        turned = first * cos - second * sin
        second[...] = first * sin + second * cos
        first[...] = turned
