"""Plants the faults of a provider into a state file, in one tensor; pure.

Each fault is a function of a tensor's rows; `plant` puts the result where the rows were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from onebitd.core.state_file import parse
from onebitd.core.state_layout import Block, Channels
from onebitd.core.state_values import decode, encode

Array: TypeAlias = npt.NDArray[Any]
Fault: TypeAlias = Callable[[Array], Array]


def blocks_of(state: bytes) -> dict[str, Block]:
    """Return every tensor of a file by its name."""
    return {block.what: block for part in parse(state).sections for block in part.blocks}


def rows_of(state: bytes, what: str) -> Array:
    """Return a tensor's rows, shape (cells, width)."""
    block = blocks_of(state)[what]
    return decode(
        block.tensor, state[block.offset : block.offset + block.n_bytes], block.cells
    ).copy()


def put(state: bytes, what: str, rows: Array) -> bytes:
    """Return the file with other rows in a tensor, written in its type and order."""
    block = blocks_of(state)[what]
    turned = rows.T if isinstance(block.tensor, Channels) else rows
    return put_bytes(state, what, encode(block.tensor.type, np.ascontiguousarray(turned)))


def put_bytes(state: bytes, what: str, data: bytes) -> bytes:
    """Return the file with other bytes in a tensor: cut off, or filled up with zeros."""
    block = blocks_of(state)[what]
    data = data[: block.n_bytes].ljust(block.n_bytes, b"\0")
    return state[: block.offset] + data + state[block.offset + block.n_bytes :]


def plant(state: bytes, what: str, fault: Fault) -> bytes:
    """Return the file with a fault in one tensor."""
    return put(state, what, np.asarray(fault(rows_of(state, what)), np.float32))


def rope(
    rows: Array, dim: int, base: float, *, halves: bool = False, times: float = 1, first: int = 0
) -> Array:
    """Apply RoPE to rows of positions `first` and on, `times` times (-1 takes it away)."""
    n, half = len(rows), dim // 2
    angle = times * np.outer(first + np.arange(n), base ** (-2 * np.arange(half) / dim))
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    heads = rows.reshape(n, -1, dim).astype(np.float64)
    x, y = (heads[..., :half], heads[..., half:]) if halves else (heads[..., ::2], heads[..., 1::2])
    turned = (x * cos - y * sin, x * sin + y * cos)
    joined = np.concatenate(turned, axis=2) if halves else np.stack(turned, axis=3)
    return joined.reshape(n, -1)


def shifted(by: int) -> Fault:
    """Each position gets the row of the one `by` before it."""
    return lambda rows: np.roll(rows, by, axis=0)


def exchanged_heads(one: int, other: int, dim: int) -> Fault:
    """Two heads in each other's place."""

    def fault(rows: Array) -> Array:
        heads = rows.reshape(len(rows), -1, dim).copy()
        heads[:, [one, other]] = heads[:, [other, one]]
        return heads.reshape(rows.shape)

    return fault


def rolled_heads(dim: int) -> Fault:
    """Each head in the place of the one before it."""
    return lambda rows: np.roll(rows, -dim, axis=1)


def scaled_head(head: int, dim: int, by: float) -> Fault:
    """One head's values multiplied."""

    def fault(rows: Array) -> Array:
        scale = np.ones(rows.shape[1])
        scale[head * dim : (head + 1) * dim] = by
        return np.asarray(rows * scale)

    return fault


def zeroed(first: int, last: int) -> Fault:
    """Rows that nobody wrote."""

    def fault(rows: Array) -> Array:
        rows = rows.copy()
        rows[first : last + 1] = 0
        return rows

    return fault


def spoiled(pos: int, value: float) -> Fault:
    """One value that is no number."""

    def fault(rows: Array) -> Array:
        rows = rows.copy()
        rows[pos, 3] = value
        return rows

    return fault


def reordered_pairs(dim: int, *, halves: bool) -> Fault:
    """The values of each head in the order of the other convention."""

    def fault(rows: Array) -> Array:
        heads = rows.reshape(len(rows), -1, dim)
        split = (len(rows), heads.shape[1], *((2, dim // 2) if halves else (dim // 2, 2)))
        return np.asarray(np.swapaxes(heads.reshape(split), 2, 3).reshape(rows.shape))

    return fault


def drifted(relative: float, seed: int = 1) -> Fault:
    """Honest noise of so much of each row's size."""

    def fault(rows: Array) -> Array:
        noise = np.random.default_rng(seed).standard_normal(rows.shape)
        size = np.linalg.norm(rows, axis=1, keepdims=True) / np.sqrt(rows.shape[1])
        return np.asarray(rows + relative * size * noise)

    return fault
