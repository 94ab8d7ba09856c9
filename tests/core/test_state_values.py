"""The numbers in a state file, held against what the `gguf` package reads and writes."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from onebitd.core.errors import StateFileError
from onebitd.core.state_layout import Block, Channels, Rows
from onebitd.core.state_values import decode, encode, read_rows, turn, width_of
from tests.core import state_files as sf

WIDTH, CELLS = 96, 7
Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL = 2, 3, 6, 7, 20
TYPES = (sf.F32, sf.F16, sf.BF16, sf.Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL)


def block_of(tensor: Rows | Channels, offset: int, cells: int) -> Block:
    """Return a block as a reader would."""
    return Block("layer 0 V", offset, cells, tensor, "V", 0)


@pytest.mark.parametrize("type_", TYPES)
def test_decode_of_each_cache_type_gives_what_gguf_reads(type_: int) -> None:
    """Every cache type is decoded to the same float32 numbers as by ggml's own Python package."""
    tensor = Rows(type_, sf.row_bytes(type_, WIDTH))
    data = sf.data(type_, tensor.data_bytes(CELLS))
    bits = np.frombuffer(data, np.uint8).reshape(CELLS, -1)
    wanted = quants.dequantize(bits, GGMLQuantizationType(type_))
    found = decode(tensor, data, CELLS)
    assert found.shape == (CELLS, WIDTH)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=2e-7)


@pytest.mark.parametrize("type_", [sf.F32, sf.F16, sf.BF16])
def test_decode_of_transposed_values_returns_a_row_a_cell(type_: int) -> None:
    """A V stored channel by channel comes back cell by cell, whole and in part."""
    values = np.arange(CELLS * WIDTH, dtype=np.float32).reshape(CELLS, WIDTH) % 200
    tensor = Channels(type_, sf.BLOCKS[type_][0], WIDTH)
    data = encode(type_, np.ascontiguousarray(values.T))
    np.testing.assert_array_equal(decode(tensor, data, CELLS), values)
    block = block_of(tensor, 3, CELLS)
    np.testing.assert_array_equal(read_rows(b"abc" + data, block, 2, 5), values[2:5])


def test_read_rows_of_a_part_reads_that_part() -> None:
    """Rows in the middle are the middle of the whole."""
    tensor = Rows(sf.Q8_0, sf.row_bytes(sf.Q8_0, WIDTH))
    data = sf.data(sf.Q8_0, tensor.data_bytes(CELLS))
    found = read_rows(b"abc" + data, block_of(tensor, 3, CELLS), 2, 5)
    np.testing.assert_array_equal(found, decode(tensor, data, CELLS)[2:5])


@pytest.mark.parametrize("type_", [sf.F32, sf.F16, sf.BF16])
def test_encode_rounds_as_gguf_does(type_: int) -> None:
    """Written floats are ggml's: nearest, ties to even, NaN and infinity kept."""
    rng = np.random.default_rng(1)
    values = rng.standard_normal((CELLS, WIDTH), np.float32) * 100
    special = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 0, -0.0, np.inf, -np.inf, 1e-40], np.float32)
    values[0, : len(special)] = special
    wanted = quants.quantize(values, GGMLQuantizationType(type_)).tobytes()
    assert encode(type_, values) == wanted
    tensor = Rows(type_, sf.row_bytes(type_, 1))
    nan = decode(tensor, encode(type_, np.full((1, 1), np.nan, np.float32)), 1)
    assert np.isnan(nan).all()


def test_encode_of_what_f16_cannot_hold_is_an_infinity() -> None:
    """Too large for f16 is an infinity, without a warning on the terminal."""
    data = encode(sf.F16, np.array([[1e6, -1e6]], np.float32))
    assert np.isinf(decode(Rows(sf.F16, 4), data, 1)).all()


def test_turn_twice_gives_the_rows_back_and_keeps_their_length() -> None:
    """The rotation of quantized caches is orthogonal and its own inverse."""
    rows = np.random.default_rng(2).standard_normal((CELLS, 128)).astype(np.float32)
    turned = turn(rows, 64)
    assert np.abs(turned - rows).max() > 0.1
    np.testing.assert_allclose(turn(turned, 64), rows, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(turned, axis=1), np.linalg.norm(rows, axis=1), 1e-5)
    np.testing.assert_allclose(turned[0, 64], rows[0, 64:].sum() / 8, rtol=1e-4)


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (Rows(14, 210), "values of type 14"),
        (Rows(sf.Q8_0, 33), "row size 33"),
        (Channels(sf.F16, 4, 8), "transposed f16"),
        (Channels(sf.Q8_0, 34, 8), "transposed q8_0"),
    ],
)
def test_width_of_what_cannot_be_read_is_refused(tensor: Rows | Channels, says: str) -> None:
    """An unknown type or an impossible size is one named error."""
    with pytest.raises(StateFileError, match=says):
        width_of(tensor)


def test_decode_of_another_number_of_bytes_and_encode_of_a_block_type_are_refused() -> None:
    """Data that does not fit its tensor is an error, and quantized rows are not written."""
    with pytest.raises(StateFileError, match="31 bytes, 32 expected"):
        decode(Rows(sf.F16, 16), bytes(31), 2)
    with pytest.raises(StateFileError, match="cannot be written as q8_0"):
        encode(sf.Q8_0, np.zeros((1, 32), np.float32))
