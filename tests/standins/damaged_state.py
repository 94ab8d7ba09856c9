"""A good llama.cpp state file and what can be done to it; the standard library alone.

The format is read here once more, on purpose without the daemon's own reader (docstring of
onebitd.core.state_file). tests/standins/damage.py has the table of damages.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

Q8_BLOCK, Q8_VALUES = 34, 32
TRANSPOSED = 1


@dataclass(frozen=True)
class Tensor:
    """A K, V, R or S of one layer: `head` bytes before `at`, then the data up to `end`."""

    head: int
    at: int
    end: int
    unit: int
    """Bytes of a row, or of one element where V is transposed."""


@dataclass(frozen=True)
class Section:
    """One section: its start, its cells, v_trans and what follows them, its tensors, its end."""

    at: int
    count: int
    cells: int
    cell_bytes: int
    shape: int
    v_trans: int
    tensors: Sequence[Tensor]
    end: int


class State:
    """A good state file with a plain token list, and where everything in it is.

    Attributes:
        data: the whole file.
        n: how many ids it lists.
        end: of the last section; build X appends context checkpoints.
    """

    def __init__(self, data: bytes, memory: str, ext_bytes: int) -> None:
        (n_words,) = struct.unpack_from("<I", data, 8)
        words = struct.unpack_from(f"<{n_words}i", data, 12)
        self.ids = list(words[3:-1] if words[0] == -1 else words)
        self.n = len(self.ids)
        self.data = data[:8] + block_of(self.ids) + data[12 + 4 * n_words :]
        (self.version,) = struct.unpack_from("<I", data, 4)
        self.end = 12 + 4 * self.n
        self.sections: list[Section] = []
        for kind in memory.split():
            section = self._kv(self.end, ext_bytes) if kind == "kv" else self._recr(self.end)
            self.sections.append(section)
            self.end = section.end

    def u32(self, at: int) -> int:
        """Return the number there."""
        return int(struct.unpack_from("<I", self.data, at)[0])

    def _kv(self, at: int, ext_bytes: int) -> Section:
        count, cell_bytes = self.u32(at + 4), 12 + ext_bytes
        shape = at + 8 + cell_bytes * count
        v_trans, layers = self.u32(shape), self.u32(shape + 4)
        end = shape + (16 if self.version >= 4 else 8)
        tensors: list[Tensor] = []
        for number in range(2 * layers):
            if v_trans and number >= layers:
                _, unit, channels = struct.unpack_from("<iII", self.data, end)
                size = unit * channels * count
            else:
                _, unit = struct.unpack_from("<iQ", self.data, end)
                size = unit * count
            tensors.append(Tensor(end, end + 12, end + 12 + size, unit))
            end += 12 + size
        return Section(at, count, at + 8, cell_bytes, shape, v_trans, tensors, end)

    def _recr(self, at: int) -> Section:
        end, tensors = at + 20, []
        while end < len(self.data) and self.data[end : end + 4] != b"SCKP":
            _, size = struct.unpack_from("<iQ", self.data, end)
            tensors.append(Tensor(end, end + 12, end + 12 + size, size))
            end += 12 + size
        return Section(at, 1, at + 4, 8, at + 12, 0, tensors, end)

    @property
    def kv(self) -> Section:
        """The attention section."""
        return self.sections[0]

    @property
    def last(self) -> Section:
        """The last section: the recurrent state, where there is one."""
        return self.sections[-1]

    def k(self, layer: int) -> Tensor:
        """Return a layer's K in the attention section."""
        return self.kv.tensors[layer]

    def v(self, layer: int) -> Tensor:
        """Return a layer's V in the attention section."""
        return self.kv.tensors[len(self.kv.tensors) // 2 + layer]

    def put(self, at: int, layout: str, *values: int) -> bytes:
        """Return the file with these values at a place."""
        return self.with_bytes(at, struct.pack(f"<{layout}", *values))

    def with_bytes(self, at: int, new: bytes) -> bytes:
        """Return the file with other bytes at a place."""
        return self.data[:at] + new + self.data[at + len(new) :]

    def with_words(self, words: Sequence[int]) -> bytes:
        """Return the file with another token block."""
        return self.data[:8] + block_of(words) + self.data[12 + 4 * self.n :]

    def with_positions(self, positions: Sequence[int], section: Section | None = None) -> bytes:
        """Return the file with other positions in its first section, or in that one."""
        found, data = section or self.kv, bytearray(self.data)
        for cell, pos in enumerate(positions):
            struct.pack_into("<i", data, found.cells + found.cell_bytes * cell, pos)
        return bytes(data)

    def with_kv(self, kv: bytes, version: int | None = None) -> bytes:
        """Return the file with another first section."""
        head = (
            self.data[:4] + struct.pack("<I", version or self.version) + self.data[8 : self.kv.at]
        )
        return head + kv + self.data[self.kv.end :]

    def with_cells(self, kept: Sequence[int]) -> bytes:
        """Return the file with these cells in its first section, consistently."""
        head = self.data[self.kv.at : self.kv.at + 4] + struct.pack("<I", len(kept))
        if not kept:
            return self.with_kv(head)
        parts = [head, self._cells(self.kv.cells, self.kv.cell_bytes, kept)]
        parts.append(self.data[self.kv.shape : self.kv.tensors[0].head])
        for tensor in self.kv.tensors:
            parts += [self.data[tensor.head : tensor.at]]
            parts += [self._cells(tensor.at, tensor.unit, kept)]
        return self.with_kv(b"".join(parts))

    def _cells(self, at: int, size: int, kept: Sequence[int]) -> bytes:
        return b"".join(self.data[at + size * cell : at + size * (cell + 1)] for cell in kept)

    def with_tensors(
        self, tensors: Sequence[bytes], v_trans: int, n_layer: int, n_rot: int = 0
    ) -> bytes:
        """Return the file with other tensors, heads included, in its first section."""
        shape = struct.pack("<II", v_trans, n_layer)
        shape += struct.pack("<II", n_rot, n_rot) if self.version >= 4 else b""
        return self.with_kv(b"".join([self.data[self.kv.at : self.kv.shape], shape, *tensors]))

    def with_zeros(self, tensor: Tensor, cell: int | None = None) -> bytes:
        """Return the file with nothing in a tensor, or in one of its cells."""
        if cell is None:
            return self.with_bytes(tensor.at, bytes(tensor.end - tensor.at))
        return self.with_bytes(tensor.at + cell * tensor.unit, bytes(tensor.unit))

    def rows(self, tensor: Tensor) -> bytes:
        """Return a tensor with its head."""
        return self.data[tensor.head : tensor.end]


def block_of(words: Sequence[int]) -> bytes:
    """Return a token block."""
    return struct.pack(f"<I{len(words)}i", len(words), *words)


def packed(state: State, *, version: int = 1, more: int = 0, n_media: int = 0) -> bytes:
    """Return the file with a packed token list that says `more` ids than there are."""
    return state.with_words([-1, version, state.n + more, *state.ids, n_media])


def swapped(state: State) -> list[int]:
    """Return the positions with two neighbours exchanged."""
    positions = list(range(state.n))
    positions[20], positions[21] = positions[21], positions[20]
    return positions


def with_one(state: State, cell: int, pos: int) -> list[int]:
    """Return the positions with one replaced."""
    return [*range(cell), pos, *range(cell + 1, state.n)]


def of_other_build(state: State) -> bytes:
    """Return what a build with another state version saves: 4 has two fields more than 2."""
    kv = state.kv
    cut = kv.shape + (16 if state.version >= 4 else 8)
    rot = b"" if state.version >= 4 else bytes(8)
    new = state.data[kv.at : kv.shape + 8] + rot + state.data[cut : kv.end]
    return state.with_kv(new, version=2 if state.version >= 4 else 4)


def transposed(state: State) -> bytes:
    """Return what the same decoder saves without flash attention: V by channel."""
    half = len(state.kv.tensors) // 2
    parts = [state.rows(tensor) for tensor in state.kv.tensors[:half]]
    for tensor in state.kv.tensors[half:]:
        width = tensor.unit // 2
        parts.append(struct.pack("<iII", 1, 2, width))
        parts.append(_turned(state.data[tensor.at : tensor.end], width))
    return state.with_tensors(parts, TRANSPOSED, half)


def untransposed(state: State) -> bytes:
    """Return what the same decoder saves with flash attention: V by cell."""
    half = len(state.kv.tensors) // 2
    parts = [state.rows(tensor) for tensor in state.kv.tensors[:half]]
    for tensor in state.kv.tensors[half:]:
        data = state.data[tensor.at : tensor.end]
        parts += [struct.pack("<iQ", 1, len(data) // state.n), _turned(data, state.n)]
    return state.with_tensors(parts, 0, half)


def _turned(data: bytes, columns: int) -> bytes:
    """Return a row-major matrix of 2-byte elements by columns."""
    values = struct.unpack(f"<{len(data) // 2}H", data)
    by_column = chain.from_iterable(values[column::columns] for column in range(columns))
    return struct.pack(f"<{len(values)}H", *by_column)


def quantized(state: State) -> bytes:
    """Return what a decoder with a q8_0 cache saves, as to its shape; the values are made up."""
    block = struct.pack("<e", 0.01) + bytes(range(1, Q8_VALUES + 1))
    row = state.kv.tensors[0].unit // 2 // Q8_VALUES * block
    tensor = struct.pack("<iQ", 8, len(row)) + row * state.n
    count = len(state.kv.tensors)
    return state.with_tensors([tensor] * count, 0, count // 2, n_rot=64)


def unquantized(state: State) -> bytes:
    """Return what a decoder with an f16 cache saves, as to its shape; the values are made up."""
    row = struct.pack("<e", 0.5) * (state.kv.tensors[0].unit // Q8_BLOCK * Q8_VALUES)
    tensor = struct.pack("<iQ", 1, len(row)) + row * state.n
    count = len(state.kv.tensors)
    return state.with_tensors([tensor] * count, 0, count // 2)


def of_shallower_model(state: State) -> bytes:
    """Return the state of a model that has fewer layers and is the same otherwise."""
    half = len(state.kv.tensors) // 2
    kept = [*state.kv.tensors[: half - 6], *state.kv.tensors[half:-6]]
    return state.with_tensors([state.rows(tensor) for tensor in kept], 0, half - 6)


def of_wider_model(state: State) -> bytes:
    """Return the state of a model with twice as many heads."""
    parts = []
    for tensor in state.kv.tensors:
        data = state.data[tensor.at : tensor.end]
        (type_,) = struct.unpack_from("<i", state.data, tensor.head)
        parts.append(struct.pack("<iQ", type_, 2 * tensor.unit) + data + data)
    return state.with_tensors(parts, 0, len(parts) // 2)


def with_random_values(state: State) -> bytes:
    """Return the file with finite f16 noise in every K and V."""
    rng, parts = random.Random(1), []  # noqa: S311 - noise is no secret
    for tensor in state.kv.tensors:
        size = tensor.end - tensor.at
        # Half of the exponents, no sign of a NaN: bit 14 is clear.
        noise = rng.randbytes(size // 2)
        data = bytearray(noise + noise)
        data[1::2] = bytes(byte & 0xBF for byte in data[1::2])
        parts.append(state.data[tensor.head : tensor.at] + bytes(data))
    return state.with_tensors(parts, 0, len(parts) // 2)


def with_second_stream(state: State) -> bytes:
    """Return what a decoder with two slots saves: two streams, the second one empty."""
    kv = state.data[state.kv.at : state.kv.end]
    return state.with_kv(struct.pack("<I", 2) + kv[4:] + bytes(4))


def without_recr(state: State) -> bytes:
    """Return the file with no recurrent cell."""
    n_layer = state.data[state.last.at + 16 : state.last.at + 20]
    return state.data[: state.last.at] + bytes(8) + n_layer


def with_two_recr(state: State) -> bytes:
    """Return the file with two recurrent cells, consistently."""
    at = state.last.at
    cell, shape = state.data[at + 4 : at + 12], state.data[at + 12 : at + 20]
    parts = [state.data[:at], struct.pack("<I", 2), cell, cell, shape]
    for tensor in state.last.tensors:
        parts += [state.rows(tensor), state.data[tensor.at : tensor.end]]
    return b"".join(parts)


def s_row(state: State, number: int = 0) -> Tensor:
    """Return an S row of the recurrent state: they follow as many R rows."""
    return state.last.tensors[len(state.last.tensors) // 2 + number]
