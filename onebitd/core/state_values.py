"""The numbers in a state file: ggml's cache types decoded to float32, and floats encoded.

Block formats are ggml's (`ggml/src/ggml-common.h`), 32 values each, little endian:

    q8_0    f16 scale, i8[32]
    q4_0    f16 scale, 16 bytes: value j in the low half of byte j, value j + 16 in the high half
    q4_1    f16 scale, f16 minimum, 16 bytes
    q5_0    f16 scale, u32 of fifth bits, 16 bytes
    q5_1    f16 scale, f16 minimum, u32 of fifth bits, 16 bytes
    iq4_nl  f16 scale, 16 bytes that index a table

Quantized caches hold rows that llama.cpp has turned (`n_rot` of a section): `turn` undoes that.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from onebitd.core.errors import StateFileError
from onebitd.core.state_cursor import Source, read_slice
from onebitd.core.state_layout import Block, Channels, Rows, Tensor, type_name

Floats: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = bytes | bytearray | memoryview

F32: Final = 0
F16: Final = 1
BF16: Final = 30
FLOAT_BYTES: Final = {F32: 4, F16: 2, BF16: 2}
"""Bytes of a value of the types that are no block types."""

BLOCK_VALUES: Final = 32
_Q4_0, _Q4_1, _Q5_0, _Q5_1, _Q8_0, _IQ4_NL = 2, 3, 6, 7, 8, 20
_BLOCK_BYTES: Final = {_Q4_0: 18, _Q4_1: 20, _Q5_0: 22, _Q5_1: 24, _Q8_0: 34, _IQ4_NL: 18}
_IQ4_NL_VALUES: Final = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)


def width_of(tensor: Tensor) -> int:
    """Return how many values a cell has in this tensor.

    Raises:
        StateFileError: a type that is not known, or a size that holds no whole number of values.
    """
    unit, per_unit = _unit(tensor.type)
    if isinstance(tensor, Channels):
        if per_unit != 1 or tensor.el_size != unit:
            raise StateFileError(
                f"transposed {type_name(tensor.type)} with elements of {tensor.el_size} bytes "
                "cannot be read"
            )
        return tensor.n_embd_v_gqa
    if tensor.row_size % unit:
        raise StateFileError(
            f"row size {tensor.row_size} is not a whole number of {type_name(tensor.type)} values"
        )
    return tensor.row_size // unit * per_unit


def decode(tensor: Tensor, data: Bytes, cells: int) -> Floats:
    """Return the values of one tensor.

    Args:
        tensor: its type and how its cells lie.
        data: exactly `tensor.data_bytes(cells)` bytes.
        cells: how many cells that is.

    Returns:
        float32, shape (cells, width); transposed V comes back as (cells, channels).

    Raises:
        StateFileError: a type that is not known, or another number of bytes.
    """
    width = width_of(tensor)
    if len(data) != tensor.data_bytes(cells):
        raise StateFileError(f"{len(data)} bytes, {tensor.data_bytes(cells)} expected")
    if isinstance(tensor, Channels):
        return np.ascontiguousarray(_floats(tensor.type, data).reshape(width, cells).T)
    if tensor.type in FLOAT_BYTES:
        return _floats(tensor.type, data).reshape(cells, width)
    return _blocks(tensor.type, data).reshape(cells, width)


def encode(type_: int, values: Floats) -> bytes:
    """Return the rows of these values as the file holds them, rounded to the nearest, ties to even.

    Args:
        type_: ggml's f32, f16 or bf16. What f16 cannot hold becomes an infinity.
        values: float32, shape (cells, width).

    Raises:
        StateFileError: another type.
    """
    if type_ == F32:
        return values.astype("<f4").tobytes()
    if type_ == F16:
        with np.errstate(over="ignore"):
            return values.astype("<f2").tobytes()
    if type_ == BF16:
        bits = np.ascontiguousarray(values, "<f4").view("<u4")
        rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
        quiet = bits >> 16 | 0x40  # a NaN stays one, whatever its low bits were
        return np.where(np.isnan(values), quiet, rounded).astype("<u2").tobytes()
    raise StateFileError(f"values cannot be written as {type_name(type_)}: f32, f16 and bf16 can")


def read_rows(source: Source, block: Block, start: int, stop: int) -> Floats:
    """Return the values of cells `start` to `stop` - 1 of one tensor of a file.

    Only their bytes are read: of a transposed V, one piece for each channel.

    Raises:
        StateFileError: a type that is not known, or the file became shorter.
    """
    tensor, n = block.tensor, stop - start
    if isinstance(tensor, Rows):
        at = block.offset + start * tensor.row_size
        return decode(tensor, read_slice(source, at, n * tensor.row_size), n)
    if n == block.cells:
        return decode(tensor, read_slice(source, block.offset, block.n_bytes), n)
    stride = block.cells * tensor.el_size
    at = block.offset + start * tensor.el_size
    pieces = [
        bytes(read_slice(source, at + channel * stride, n * tensor.el_size))
        for channel in range(tensor.n_embd_v_gqa)
    ]
    return decode(tensor, b"".join(pieces), n)


def turn(rows: Floats, n_rot: int) -> Floats:
    """Multiply each run of `n_rot` values by the normalised Walsh-Hadamard matrix.

    That is what llama.cpp does to the rows of a quantized cache; doing it again undoes it.

    Args:
        rows: shape (cells, width), `width` a multiple of `n_rot`, which is a power of two; 0 or 1
            leaves the rows as they are.
    """
    if n_rot <= 1:
        return rows
    out = rows.reshape(len(rows), -1, n_rot)
    half = 1
    while half < n_rot:
        pairs = out.reshape(len(rows), -1, 2, half)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        out = np.stack((low + high, low - high), axis=2)
        half *= 2
    scale = np.float32(1 / np.sqrt(n_rot))
    return np.asarray(out.reshape(rows.shape) * scale, np.float32)


def _unit(type_: int) -> tuple[int, int]:
    """Return bytes and values of the smallest unit of a type."""
    if type_ in FLOAT_BYTES:
        return FLOAT_BYTES[type_], 1
    if type_ in _BLOCK_BYTES:
        return _BLOCK_BYTES[type_], BLOCK_VALUES
    raise StateFileError(f"values of type {type_name(type_)} cannot be read")


def _floats(type_: int, data: Bytes) -> Floats:
    if type_ == F32:
        return np.frombuffer(data, "<f4").astype(np.float32)
    if type_ == F16:
        return np.frombuffer(data, "<f2").astype(np.float32)
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)


def _blocks(type_: int, data: Bytes) -> Floats:
    """Decode blocks; shape (blocks, 32)."""
    raw = np.frombuffer(data, np.uint8).reshape(-1, _BLOCK_BYTES[type_])
    scale = _half(raw, 0)
    if type_ == _Q8_0:
        return np.asarray(scale * raw[:, 2:].view(np.int8), np.float32)
    nibbles = np.concatenate((raw[:, -16:] & 15, raw[:, -16:] >> 4), axis=1)
    if type_ == _IQ4_NL:
        return np.asarray(scale * _IQ4_NL_VALUES[nibbles], np.float32)
    levels = nibbles.astype(np.float32)
    if type_ in (_Q5_0, _Q5_1):
        fifth = np.unpackbits(raw[:, -20:-16], axis=1, bitorder="little")
        levels += 16 * fifth.astype(np.float32)
    if type_ in (_Q4_1, _Q5_1):
        return np.asarray(scale * levels + _half(raw, 2), np.float32)
    return np.asarray(scale * (levels - (8 if type_ == _Q4_0 else 16)), np.float32)


def _half(raw: npt.NDArray[np.uint8], at: int) -> Floats:
    """Return the f16 at a byte of each block; shape (blocks, 1)."""
    return np.ascontiguousarray(raw[:, at : at + 2]).view("<f2").astype(np.float32)
