"""What may have gone wrong with the rotary embedding (RoPE) of cached keys.

RoPE turns pairs of values of a head by an angle that grows with the position: pair j of a head of
d values by `pos * base**(-2 j / d)`. The pairs are neighbours (2j, 2j + 1) in the llama family
("NORM" in ggml) and halves (j, j + d / 2) in most others ("NEOX"). Rows that differ in nothing but
their RoPE are thus rotations of each other, pair by pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from onebitd.core.state_layout import Ints
from onebitd.core.state_values import Floats

_Complex: TypeAlias = npt.NDArray[np.complex64]
_Doubles: TypeAlias = npt.NDArray[np.float64]

_NEIGHBOURS, _HALVES = "neighbours", "halves"
_BASES: Final = (1e4, 1e5, 5e5, 1e6, 1e7)
_LEAST_ROWS: Final = 8
_NEAR: Final = 0.03  # radians a position, of the first pair


def unlike(a: Floats, b: Floats) -> float:
    """Return |a - b| / |b| of two arrays; infinite where a holds what is no number."""
    with np.errstate(all="ignore"):
        error = float(np.linalg.norm((a - b).ravel()) / max(float(np.linalg.norm(b)), 1e-30))
    return error if np.isfinite(error) else float("inf")


def rope_causes(
    a: Floats, b: Floats, pos: Ints, head_dims: Sequence[int]
) -> Iterator[tuple[float, str]]:
    """Yield what is left of the difference if RoPE alone is wrong in some way, and that way.

    Args:
        a, b: keys at the same positions, b the reference; shape (rows, width).
        pos: their positions, consecutive.
        head_dims: the sizes that a head may have.
    """
    for dim in head_dims:
        for order in (_NEIGHBOURS, _HALVES):
            yield _other_order(a, b, dim, order)
            for base in _BASES:
                yield _other_pairs(a, b, pos, dim, order, base)
            if len(pos) >= _LEAST_ROWS:
                yield _other_angles(a, b, pos, dim, order)


def to_pairs(rows: Floats, dim: int, order: str) -> _Complex:
    """Return each pair as a complex number; shape (rows, heads, dim / 2)."""
    heads = rows.reshape(len(rows), -1, dim)
    if order == _NEIGHBOURS:
        first, second = heads[:, :, 0::2], heads[:, :, 1::2]
    else:
        first, second = heads[:, :, : dim // 2], heads[:, :, dim // 2 :]
    return np.asarray(first + 1j * second, np.complex64)


def from_pairs(pairs: _Complex, order: str) -> Floats:
    """Undo `to_pairs`."""
    n, heads, half = pairs.shape
    both = (pairs.real, pairs.imag)
    rows = np.stack(both, axis=3) if order == _NEIGHBOURS else np.concatenate(both, axis=2)
    return np.asarray(rows.reshape(n, heads * half * 2), np.float32)


def turned(rows: Floats, pos: Ints, dim: int, order: str, base: float, times: float) -> Floats:
    """Return the rows with RoPE applied so many times, -1 to take it away."""
    theta = base ** (-2 * np.arange(dim // 2) / dim)
    phase = np.exp(1j * times * np.multiply.outer(pos.astype(np.float64), theta))
    return from_pairs(np.asarray(to_pairs(rows, dim, order) * phase[:, None], np.complex64), order)


def _other_order(a: Floats, b: Floats, dim: int, order: str) -> tuple[float, str]:
    """See whether the values of each head stand in the order that the other convention has."""
    other = _HALVES if order == _NEIGHBOURS else _NEIGHBOURS
    moved = from_pairs(to_pairs(a, dim, order), other)
    names = {_NEIGHBOURS: "as neighbours", _HALVES: "in two halves"}
    return unlike(moved, b), (
        f"the values of each head of {dim} are in another order: RoPE pairs stand "
        f"{names[order]}, the reference has them {names[other]}"
    )


def _other_pairs(
    a: Floats, b: Floats, pos: Ints, dim: int, order: str, base: float
) -> tuple[float, str]:
    """See whether RoPE was applied to the pairs of the other convention."""
    other = _HALVES if order == _NEIGHBOURS else _NEIGHBOURS
    bare = turned(a, pos, dim, order, base, -1)
    words = {_NEIGHBOURS: "neighbours (2j, 2j+1)", _HALVES: f"halves (j, j+{dim // 2})"}
    return unlike(turned(bare, pos, dim, other, base, 1), b), (
        f"RoPE is applied to the wrong pairs: {words[order]} instead of {words[other]}"
    )


def _other_angles(a: Floats, b: Floats, pos: Ints, dim: int, order: str) -> tuple[float, str]:
    """See whether pairs are turned by angles that grow evenly with the position."""
    pairs_a, pairs_b = to_pairs(a, dim, order), to_pairs(b, dim, order)
    product = (pairs_a * pairs_b.conj()).astype(np.complex128)
    speed = _speeds(product)
    spun = product * np.exp(-1j * np.multiply.outer(pos.astype(np.float64), speed))[:, None]
    start = np.angle(spun.sum(axis=(0, 1)))
    angles = np.multiply.outer(pos.astype(np.float64), speed) + start
    back = np.asarray(pairs_a * np.exp(-1j * angles)[:, None], np.complex64)
    return unlike(from_pairs(back, order), b), _name_angles(speed, start, len(pos))


def _speeds(product: npt.NDArray[np.complex128]) -> _Doubles:
    """Return how far each pair turns from one position to the next, in radians.

    Neighbouring rows tell it without ambiguity, and ever more distant ones more exactly.
    """
    speed = np.zeros(product.shape[2])
    lag = 1
    while lag <= len(product) // 2:
        found = np.angle((product[lag:] * product[:-lag].conj()).sum(axis=(0, 1)))
        turns = np.round((speed * lag - found) / (2 * np.pi)) if lag > 1 else 0
        speed = (found + 2 * np.pi * turns) / lag
        lag *= 2
    return speed


def _name_angles(speed: _Doubles, start: _Doubles, n_rows: int) -> str:
    """Say what turns the pairs so; the first pair's own speed is 1 radian a position."""
    if np.abs(speed).max() * n_rows < 0.2:
        shift = round(float(start[0]))
        if shift and abs(shift - start[0]) < 0.1:
            return f"RoPE is applied with positions that are {abs(shift)} too " + (
                "high" if shift > 0 else "low"
            )
        return "the pairs of each head are turned by a constant angle: RoPE positions are off"
    first = float(speed[0])
    one_way = bool((np.sign(first) * speed > -0.02).all())
    for value, words in (
        (-1, "RoPE is not applied"),
        (1, "RoPE is applied twice"),
        (-2, "RoPE turns the wrong way"),
    ):
        if one_way and abs(first - value) < _NEAR:
            return words
    if abs(first) < _NEAR:
        return "RoPE is applied with another base"
    return (
        "RoPE is applied with another scaling or not at all: "
        f"the first pair is turned {first:+.3f} radians a position too far"
    )
