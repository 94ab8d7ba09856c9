"""The bits of the floats in a state file's tensors: where they lie, and how large they are.

Magnitudes are compared as bits: those of positive floats are in the order of the floats. A NaN and
an infinity are above every finite one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from onebitd.core.state_layout import Channels, Tensor

Bits: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """How the floats of a ggml type lie: `floats` of them, `size` bytes each, start a unit.

    `infinity` are the bits of the least magnitude that is not finite.
    """

    unit_bytes: int
    size: int
    floats: int
    infinity: int

    @property
    def magnitude(self) -> int:
        """All bits but the sign."""
        return (1 << (8 * self.size - 1)) - 1


_FORMATS: Final = {
    0: FloatFormat(4, 4, 1, 0x7F800000),
    1: FloatFormat(2, 2, 1, 0x7C00),
    30: FloatFormat(2, 2, 1, 0x7F80),
    # Blocks of quantized values: f16 scale, and minimum of some. The values follow from them.
    2: FloatFormat(18, 2, 1, 0x7C00),
    3: FloatFormat(20, 2, 2, 0x7C00),
    6: FloatFormat(22, 2, 1, 0x7C00),
    7: FloatFormat(24, 2, 2, 0x7C00),
    8: FloatFormat(34, 2, 1, 0x7C00),
    20: FloatFormat(18, 2, 1, 0x7C00),
}


@lru_cache(maxsize=64)
def format_of(tensor: Tensor) -> FloatFormat | None:
    """Return how its floats lie; None if there are none, or it is no cache type."""
    format_ = _FORMATS.get(tensor.type)
    if format_ is None or not tensor.data_bytes(1):
        return None
    if isinstance(tensor, Channels):
        return format_ if tensor.el_size == format_.unit_bytes == format_.size else None
    return None if tensor.row_size % format_.unit_bytes else format_


def peaks_of(values: Bits) -> list[int]:
    """Return the bits of the largest magnitude in each row, without a copy of the data.

    As signed numbers, the bits of positive floats are in order and those of negative ones below
    zero; as unsigned numbers, those of negative ones are in order and above all positive ones.
    """
    size = values.dtype.itemsize
    sign = 1 << (8 * size - 1)
    positive = np.maximum.reduce(values.view(f"<i{size}"), axis=1).tolist()
    highest = np.maximum.reduce(values, axis=1).tolist()
    return [
        max(one, other - sign if other >= sign else other)
        for one, other in zip(positive, highest, strict=True)
    ]


def float_of(bits: int, type_: int) -> float:
    """Return the number that these bits are in a ggml type (of quantized ones: their scale)."""
    if type_ == 0:
        return float(np.array(bits, np.uint32).view(np.float32))
    if type_ == 30:
        return float(np.array(bits << 16, np.uint32).view(np.float32))
    return float(np.array(bits, np.uint16).view(np.float16))


def bits_of(value: float, type_: int) -> int:
    """Return the bits of a positive number, rounded down; of one too large those of infinity."""
    if type_ in (0, 30):
        bits = int(np.array(value, np.float32).view(np.uint32))
        return bits if type_ == 0 else bits >> 16
    with np.errstate(over="ignore"):
        return int(np.array(value, np.float16).view(np.uint16))
