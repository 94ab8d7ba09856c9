"""llama.cpp state files of the stand-in decoder's tiny model, with the standard library alone.

Each row of the cache holds a digest of the tokens up to its cell, and the stand-in decoder says
what the digest of its last cell tells it to say. So a reply from a wrong cache is a wrong text, as
with a real model. Format: version 2, one attention section (docstring of onebitd.core.state_file).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

MAGIC = 0x67677371
VERSION = 2
LAYERS = 2
ROW_BYTES = 8
"""Four f16 values."""
_F16 = 1
_BITS = 40
_KV_HEAD = 8  # n_stream, cell_count


class BadState(Exception):
    """What llama-server's restore refuses."""


def next_digest(digest: int, token: int) -> int:
    """Return the digest of a prefix that is one token longer."""
    return (digest * 6364136223846793005 + token + 1442695040888963407) >> 7 & (1 << _BITS) - 1


def digests(tokens: Sequence[int], before: int = 0) -> list[int]:
    """Return the digest after each token."""
    found = []
    for token in tokens:
        before = next_digest(before, token)
        found.append(before)
    return found


def row(digest: int) -> bytes:
    """Return a cell's row: spread 40 bits over the mantissas of four numbers between 1 and 2."""
    return struct.pack("<4H", *(0x3C00 | digest >> 10 * i & 0x3FF for i in range(4)))


def _digest(data: bytes) -> int:
    return sum((value & 0x3FF) << 10 * i for i, value in enumerate(struct.unpack("<4H", data)))


def build(
    tokens: Sequence[int],
    cells: Sequence[int] | None = None,
    *,
    version: int = VERSION,
    first_pos: int = 0,
) -> bytes:
    """Return a state file.

    Args:
        tokens: the token list.
        cells: the digests in the cache; those of `tokens` if None.
        version: to lie about.
        first_pos: of the first cell; anything but 0 is a lie.
    """
    cells = digests(tokens) if cells is None else cells
    parts = [struct.pack(f"<III{len(tokens)}i", MAGIC, version, len(tokens), *tokens)]
    parts.append(struct.pack("<II", 1, len(cells)))
    if cells:
        rows = struct.pack("<iQ", _F16, ROW_BYTES) + b"".join(map(row, cells))
        parts += [struct.pack("<iIi", first_pos + at, 1, 0) for at in range(len(cells))]
        parts += [struct.pack("<II", 0, LAYERS), rows * (2 * LAYERS)]
    return b"".join(parts)


@dataclass(frozen=True)
class State:
    """What a restore takes from a file; `n_read` bytes of it."""

    tokens: list[int]
    cells: list[int]
    n_read: int


def parse(data: bytes) -> State:
    """Read a state as llama-server does: what follows the last row is not looked at.

    Raises:
        BadState: it is refused.
    """
    try:
        magic, version, count = struct.unpack_from("<III", data)
        if (magic, version) != (MAGIC, VERSION):
            raise BadState(f"magic {magic:#x} version {version}")
        tokens = list(struct.unpack_from(f"<{count}i", data, 12))
        at = 12 + 4 * count
        n_stream, n_cells = struct.unpack_from("<II", data, at)
        at += _KV_HEAD
        if n_stream != 1 or not n_cells:
            raise BadState(f"{n_stream} streams, {n_cells} cells")
        at += 12 * n_cells
        v_trans, layers = struct.unpack_from("<II", data, at)
        at += 8
        cells: list[int] = []
        for _ in range(2 * LAYERS):
            kind, row = struct.unpack_from("<iQ", data, at)
            if (v_trans, layers, kind, row) != (0, LAYERS, _F16, ROW_BYTES):
                raise BadState(f"layout {v_trans} {layers} {kind} {row}")
            at += 12
            rows = [data[at + ROW_BYTES * i : at + ROW_BYTES * (i + 1)] for i in range(n_cells)]
            cells = [_digest(one) for one in rows]
            at += ROW_BYTES * n_cells
    except struct.error as error:
        raise BadState(str(error)) from error
    return State(tokens, cells, at)


def gguf(ctx_size: int = 2048) -> bytes:
    """Return a GGUF without tensors: as much of a model file as onebitd itself reads."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    head = struct.pack("<4sIQQ", b"GGUF", 3, 0, 2)
    architecture = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    context = text("llama.context_length") + struct.pack("<II", 4, ctx_size)
    return head + architecture + context
