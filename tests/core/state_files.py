"""Builds llama.cpp sequence-state files of every kind from a description; pure.

Every field that a decoder looks at can be told to lie, so that a test writes the damage it is
about as one argument: `replace(KV, n_seq_id=2)`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

F32, F16, Q8_0, BF16 = 0, 1, 8, 30
MAGIC = 0x67677371
# ggml's cache types: bytes of a block, values in it, f16 scales in front (None: plain floats).
BLOCKS: dict[int, tuple[int, int, int | None]] = {
    0: (4, 1, None),
    1: (2, 1, None),
    30: (2, 1, None),
    2: (18, 32, 1),
    3: (20, 32, 2),
    6: (22, 32, 1),
    7: (24, 32, 2),
    8: (34, 32, 1),
    20: (18, 32, 1),
}


@dataclass(frozen=True)
class Kv:
    """An attention section; `width` values in a row.

    `last` cells only, if given; `count` and `pos` replace the true ones in the file, `pos` also
    their number. `streams`: of a decoder with several slots, the last so many cells in each.
    """

    layers: int = 2
    k_type: int = F16
    v_type: int = F16
    width: int = 32
    v_trans: int = 0
    ext_bytes: int = 0
    n_rot: tuple[int, int] = (0, 0)
    has_v: bool = True
    last: int | None = None
    pos: Sequence[int] | None = None
    count: int | None = None
    n_stream: int = 1
    n_seq_id: int = 1
    ext_shift: tuple[int, int] = (0, 0)
    row_extra: int = 0
    layer_count: int | None = None
    seq_id: int = 7
    streams: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Recr:
    """A recurrent section: `states` of the model's `layers` have an R and an S row of floats."""

    layers: int = 4
    states: int = 2
    r_width: int = 12
    s_width: int = 20
    pos: int | None = None
    count: int = 1
    cells: int = 1
    n_seq_id: int = 0
    s_trans: int = 0
    type: int = F32


@dataclass(frozen=True)
class Checkpoint:
    """One context checkpoint of the first `n_tokens`, holding these sections.

    Its size field is `extra_bytes` more than its size.
    """

    n_tokens: int
    sections: Sequence[Kv | Recr]
    pos: tuple[int, int] | None = None
    says_n_tokens: int | None = None
    extra_bytes: int = 0
    magic: int = 0xAF143CD8
    draft: bytes = b""


@dataclass(frozen=True)
class Appendix:
    """The SCKP appendix."""

    checkpoints: Sequence[Checkpoint] = ()
    version: int = 1
    count: int | None = None


def build(
    tokens: Sequence[int],
    sections: Iterable[Kv | Recr],
    *,
    version: int = 2,
    packed: bool = False,
    appendix: Appendix | None = None,
) -> bytes:
    """Return the file of a state that holds these tokens."""
    words = [-1, 1, len(tokens), *tokens, 0] if packed else list(tokens)
    head = struct.pack(f"<III{len(words)}i", MAGIC, version, len(words), *words)
    body = b"".join(section_bytes(part, tokens, version) for part in sections)
    return head + body + (appendix_bytes(appendix, tokens, version) if appendix else b"")


def row_bytes(type_: int, values: int) -> int:
    """Return the size of a row, as ggml_row_size does."""
    size, per_block, _ = BLOCKS[type_]
    return values // per_block * size


def data(type_: int, n_bytes: int) -> bytes:
    """Return finite values of a type, never the same twice in a row."""
    rng = np.random.default_rng(n_bytes + type_)
    size, _, scales = BLOCKS[type_]
    if scales is None:
        floats = rng.standard_normal(n_bytes // size)
        if type_ == BF16:
            return (floats.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
        return floats.astype(f"<f{size}").tobytes()
    blocks = rng.integers(0, 256, (n_bytes // size, size), np.uint8)
    scale = rng.standard_normal((len(blocks), scales)).astype("<f2")
    blocks[:, : 2 * scales] = scale.view(np.uint8).reshape(len(blocks), 2 * scales)
    return blocks.tobytes()


def section_bytes(section: Kv | Recr, tokens: Sequence[int], version: int) -> bytes:
    """Return one section of the state of these tokens."""
    if isinstance(section, Recr):
        return _recr_bytes(section, len(tokens))
    streams = [section]
    if section.streams is not None:
        streams = [replace(section, last=last) for last in section.streams]
    n_stream = section.n_stream if section.streams is None else len(streams)
    parts = [struct.pack("<I", n_stream)]
    parts += [_stream_bytes(stream, tokens, version) for stream in streams]
    return b"".join(parts)


def _stream_bytes(section: Kv, tokens: Sequence[int], version: int) -> bytes:
    n = len(tokens)
    first = 0 if section.last is None else max(0, n - section.last)
    positions = list(range(first, n)) if section.pos is None else list(section.pos)
    cells = len(positions)
    count = cells if section.count is None else section.count
    parts = [struct.pack("<I", count)]
    if not cells:
        return parts[0]
    for pos in positions:
        token = tokens[pos] if 0 <= pos < n else 0
        x, y = section.ext_shift
        ext = [pos + x, pos + y, token][: section.ext_bytes // 4]
        parts.append(struct.pack("<iI", pos, section.n_seq_id))
        parts.append(struct.pack(f"<{len(ext)}ii", *ext, section.seq_id))
    n_layer = section.layers if section.layer_count is None else section.layer_count
    parts.append(struct.pack("<II", section.v_trans, n_layer))
    if version >= 4:
        parts.append(struct.pack("<II", *section.n_rot))
    parts += [_rows(section, section.k_type, cells) for _ in range(section.layers)]
    if section.has_v:
        tensor = _channels if section.v_trans else _rows
        parts += [tensor(section, section.v_type, cells) for _ in range(section.layers)]
    return b"".join(parts)


def _rows(section: Kv, type_: int, cells: int) -> bytes:
    size = row_bytes(type_, section.width) + section.row_extra
    return struct.pack("<iQ", type_, size) + data(type_, size * cells)


def _channels(section: Kv, type_: int, cells: int) -> bytes:
    size = BLOCKS[type_][0]
    head = struct.pack("<iII", type_, size, section.width)
    return head + data(type_, size * section.width * cells)


def _recr_bytes(section: Recr, n: int) -> bytes:
    pos = n - 1 if section.pos is None else section.pos
    parts = [struct.pack("<I", section.count)]
    parts += [struct.pack("<iI", pos, section.n_seq_id)] * section.cells
    parts.append(struct.pack("<II", section.s_trans, section.layers))
    for width in (section.r_width, section.s_width):
        size = row_bytes(section.type, width)
        row = struct.pack("<iQ", section.type, size) + data(section.type, size * section.cells)
        parts += [row] * section.states
    return b"".join(parts)


def appendix_bytes(appendix: Appendix, tokens: Sequence[int], version: int) -> bytes:
    """Return the context checkpoints of a state of these tokens."""
    points = appendix.checkpoints
    count = len(points) if appendix.count is None else appendix.count
    parts = [b"SCKP", struct.pack("<II", appendix.version, count)]
    for point in points:
        some = tokens[: point.n_tokens]
        blob = struct.pack("<Ii", point.magic, 0)
        blob += b"".join(section_bytes(part, some, version) for part in point.sections)
        low, high = (0, point.n_tokens - 1) if point.pos is None else point.pos
        n_tokens = point.n_tokens if point.says_n_tokens is None else point.says_n_tokens
        parts.append(struct.pack("<qiiQ", n_tokens, low, high, len(blob) + point.extra_bytes))
        parts.append(blob)
        parts.append(struct.pack("<Q", len(point.draft)) + point.draft + struct.pack("<Q", 0))
    return b"".join(parts)
