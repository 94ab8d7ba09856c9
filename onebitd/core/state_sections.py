"""Readers for the parts of a state file: header, tokens, sections, context checkpoints.

The format is in the docstring of `state_file`. Each reader leaves the cursor at the end of its
part. A section is read either as a layout says it must be, and refused where it differs, or on a
supposition (`Trial`), for a file whose layout is not known yet. What does not fit raises
StateFileError.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from onebitd.core.errors import StateFileError
from onebitd.core.state_cursor import Cursor
from onebitd.core.state_layout import (
    KV_NAMES,
    Block,
    Cells,
    Channels,
    Ints,
    KvSection,
    Part,
    ReadSection,
    RecrSection,
    Rows,
    Tensor,
    tensor_places,
    type_name,
)

MAGIC = 0x67677371
VERSIONS = (2, 3, 4)
"""LLAMA_STATE_SEQ_VERSION of the builds that are known."""
MAX_CELLS = 1 << 24
PACKED, PACKED_VERSION = -1, 1
"""The first two words of a packed token block; the count, the ids and n_media (0) follow."""

_CHECKPOINT_MAGIC = b"SCKP"
_MAX_STREAMS = 256  # LLAMA_MAX_SEQ
_MAX_LAYERS = 1024  # llama.cpp has 512
_MAX_TENSORS = 4 * _MAX_LAYERS  # of all streams of a section: each one read takes memory
_MAX_CHECKPOINTS = 4096  # llama-server keeps 32 by default
_CELLS_A_READ = 1 << 15

_CellsCheck: TypeAlias = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Trial:
    """What `parse` supposes about a kv section, where the layout says what it must be."""

    version: int
    ext_bytes: int
    has_v: bool


def read_version(cursor: Cursor) -> int:
    """Read the magic and return the version, one of `VERSIONS`."""
    if cursor.u32("the header") != MAGIC:
        raise StateFileError("not a state file: it does not start with 71 73 67 67 (qsgg)")
    version = cursor.u32("the header")
    if version not in VERSIONS:
        raise StateFileError(f"state version {version} is not known (2, 3 and 4 are)")
    return version


def read_tokens(cursor: Cursor, most: int) -> tuple[bool, Ints]:
    """Return whether the token block is packed, and the ids, of which there may be so many."""
    n_words = cursor.u32("the header")
    if n_words > most + 4:
        raise StateFileError(f"the token list takes {n_words} words, too many for {most} tokens")
    words = _ints(cursor.take(4 * n_words, f"the list of {n_words} tokens"))
    if not n_words or words[0] != PACKED:
        return False, words
    if n_words < 4 or words[1] != PACKED_VERSION:
        raise StateFileError("the packed token list is cut, or not version 1")
    if words[2] != n_words - 4 or words[-1] != 0:
        raise StateFileError(
            f"the packed token list says {words[2]} ids in {n_words} words; text without media "
            "takes 4 words more than ids"
        )
    return True, words[3:-1]


def _ints(data: bytes | bytearray | memoryview) -> Ints:
    """Return a copy, so that no view of the source is left."""
    return np.frombuffer(data, "<i4").astype(np.int32)


def read_kv(cursor: Cursor, name: str, want: KvSection, check_count: _CellsCheck) -> ReadSection:
    """Read a kv section of one stream up to its end.

    Args:
        want: the layout's section.
        check_count: is given the number of cells before they are read, and may raise.
    """
    what = f"the header of section {name}"
    expect_one_stream(name, cursor.u32(what))
    count = cursor.u32(what)
    check_count(count)
    if not count:
        raise StateFileError(f"section {name}: no cells")
    return _read_stream(cursor, name, "", count, want)


def expect_one_stream(name: str, n_stream: int) -> None:
    """Refuse a section of a decoder with several slots."""
    if n_stream != 1:
        raise StateFileError(f"section {name}: {n_stream} streams, a decoder with one slot has 1")


def read_streams(cursor: Cursor, name: str, want: KvSection | Trial) -> list[ReadSection]:
    """Read a kv section of any number of streams up to its end; one at least has cells.

    Args:
        want: the layout's section, or a supposition.
    """
    what = f"the header of section {name}"
    n_stream = cursor.u32(what)
    if not 1 <= n_stream <= _MAX_STREAMS:
        raise StateFileError(f"section {name}: {n_stream} streams, 1 to {_MAX_STREAMS} can be")
    full: dict[int, ReadSection] = {}
    n_tensors = 0
    for stream in range(n_stream):
        count = cursor.u32(what)
        if not count:
            continue
        label = f"stream {stream} " if n_stream > 1 else ""
        section = _read_stream(cursor, name, label, count, want)
        if full and section.shape != next(iter(full.values())).shape:
            raise StateFileError(f"section {name}: {label}is not shaped as the ones before it")
        n_tensors += len(section.blocks)
        if n_tensors > _MAX_TENSORS:
            raise StateFileError(f"section {name}: more than {_MAX_TENSORS} tensors cannot be")
        full[stream] = replace(section, stream=stream)
    if not full:
        raise StateFileError(f"section {name}: no cells")
    none = np.empty((0, 3 + want.ext_bytes // 4), np.int32)
    empty = ReadSection(name, next(iter(full.values())).shape, _columns(none), ())
    return [full.get(stream) or replace(empty, stream=stream) for stream in range(n_stream)]


def _read_stream(
    cursor: Cursor, name: str, label: str, count: int, want: KvSection | Trial
) -> ReadSection:
    """Read the cells and tensors of a stream that has cells."""
    known = want if isinstance(want, KvSection) else None
    what = f"the header of section {name}"
    cells = _cells(cursor, name, count, want.ext_bytes)
    v_trans, n_layer = cursor.u32(what), cursor.u32(what)
    rot: tuple[int | None, int | None] = (None, None)
    has_rot = want.n_rot_k is not None if isinstance(want, KvSection) else want.version >= 4
    if has_rot:
        rot = (cursor.u32(what), cursor.u32(what))
    if known:
        expect_same(f"section {name}", "v_trans", v_trans, int(known.v_trans))
        expect_same(f"section {name}", "layers", n_layer, len(known.k))
        expect_same(f"section {name}", "n_rot_k", rot[0], known.n_rot_k)
        expect_same(f"section {name}", "n_rot_v", rot[1], known.n_rot_v)
    if v_trans > 1 or n_layer > _MAX_LAYERS:
        raise StateFileError(f"section {name}: v_trans {v_trans} or {n_layer} layers cannot be")
    blocks: list[Block] = []
    prefix = label if name == KV_NAMES[0] else f"{label}{name} "
    for layer in range(n_layer):
        wanted: Tensor | None = known.k[layer] if known else None
        blocks.append(_tensor(cursor, (f"{prefix}layer {layer} K", "K", layer), count, wanted))
    has_v = bool(want.v) if isinstance(want, KvSection) else want.has_v
    for layer in range(n_layer if has_v else 0):
        place: tuple[str, Part, int] = (f"{prefix}layer {layer} V", "V", layer)
        wanted = known.v[layer] if known else None
        blocks.append(_tensor(cursor, place, count, wanted, transposed=bool(v_trans)))
    k = tuple(block.tensor for block in blocks[:n_layer] if isinstance(block.tensor, Rows))
    v = tuple(block.tensor for block in blocks[n_layer:])
    shape = KvSection(want.ext_bytes, bool(v_trans), *rot, k, v)
    return ReadSection(name, shape, cells, tuple(blocks))


def _cells(cursor: Cursor, name: str, count: int, ext_bytes: int) -> Cells:
    width = 12 + ext_bytes
    if count > MAX_CELLS or count * width > cursor.left:
        raise StateFileError(
            f"section {name}: {count} cells do not fit the {cursor.left} bytes left"
        )
    what, first = f"the cells of section {name}", cursor.at
    parts = []
    for start in range(0, count, _CELLS_A_READ):
        some = min(_CELLS_A_READ, count - start)
        part = _ints(cursor.take(some * width, what)).reshape(some, width // 4)
        if not (part[:, 1] == 1).all():
            at = int(np.argmax(part[:, 1] != 1))
            number = int(part[at, 1]) & 0xFFFFFFFF
            cursor.at = first  # the first cells of a wrong supposition may fit by accident
            raise StateFileError(f"section {name}, cell {start + at}: n_seq_id {number}, not 1")
        parts.append(part)
    return _columns(np.concatenate(parts))


def _columns(table: Ints) -> Cells:
    return Cells(pos=table[:, 0], n_seq_id=table[:, 1], ext=table[:, 2:-1], seq_id=table[:, -1])


def _tensor(
    cursor: Cursor, place: tuple[str, Part, int], count: int, want: Tensor | None, *,
    transposed: bool = False,
) -> Block:  # fmt: skip
    """Read the header of the tensor at a place (what, part, layer) and pass over its data."""
    what, part, layer = place
    head = cursor.take(12, f"the header of {what}")
    tensor: Tensor
    if transposed:
        tensor = Channels(*struct.unpack("<iII", head))
    else:
        tensor = Rows(*struct.unpack("<iQ", head))
    if want is not None:
        _expect_tensor(what, tensor, want)
    elif not 0 <= tensor.type < 256:
        raise StateFileError(f"{what}: type {tensor.type} cannot be")
    return Block(what, cursor.skip(tensor.data_bytes(count), what), count, tensor, part, layer)


def _expect_tensor(what: str, found: Tensor, want: Tensor) -> None:
    """Refuse a tensor that differs from the layout's."""
    expect_same(what, "type", type_name(found.type), type_name(want.type))
    if isinstance(found, Rows) and isinstance(want, Rows):
        expect_same(what, "row size", found.row_size, want.row_size)
    elif isinstance(found, Channels) and isinstance(want, Channels):
        expect_same(what, "element size", found.el_size, want.el_size)
        expect_same(what, "n_embd_v_gqa", found.n_embd_v_gqa, want.n_embd_v_gqa)


def read_recr(cursor: Cursor, name: str, want: RecrSection | None) -> ReadSection:
    """Read the recurrent state up to its end, which only a layout or the file's end tells."""
    what = f"the header of the {name}"
    count = cursor.u32(what)
    if count != 1:
        raise StateFileError(f"{name}: {count} cells, there must be 1")
    pos, n_seq_id, s_trans, n_layer = struct.unpack("<iIII", cursor.take(16, what))
    if n_seq_id != 0 or s_trans != 0:
        raise StateFileError(f"{name}: n_seq_id {n_seq_id} and s_trans {s_trans} must be 0")
    if want:
        expect_same(name, "layers", n_layer, want.n_layer)
    if n_layer > _MAX_LAYERS:
        raise StateFileError(f"{name}: {n_layer} layers cannot be")
    if want:
        blocks = [
            _tensor(cursor, (label, part, number), 1, row)
            for label, part, number, row in tensor_places(name, want)
        ]
    else:
        blocks = _state_rows(cursor, name, n_layer)
    shape = RecrSection(n_layer, tuple(b.tensor for b in blocks if isinstance(b.tensor, Rows)))
    one = np.array([[pos, 0]], np.int32)
    cells = Cells(one[:, 0], one[:, 1], np.empty((1, 0), np.int32), np.empty(0, np.int32))
    return ReadSection(name, shape, cells, tuple(blocks))


def _state_rows(cursor: Cursor, name: str, n_layer: int) -> list[Block]:
    """Read R rows, then as many S rows, up to the appendix or the file's end."""
    blocks: list[Block] = []
    while cursor.left and not _at_checkpoints(cursor):
        if len(blocks) == 2 * n_layer:
            raise StateFileError(f"{name}: more than two rows a layer in {n_layer} layers")
        blocks.append(_tensor(cursor, (f"{name}, row {len(blocks)}", "R", 0), 1, None))
    if len(blocks) % 2:
        raise StateFileError(f"{name}: {len(blocks)} rows, but each R row has an S row")
    rows = tuple(block.tensor for block in blocks if isinstance(block.tensor, Rows))
    places = tensor_places(name, RecrSection(n_layer, rows))
    return [
        replace(block, what=what, part=part, layer=layer)
        for block, (what, part, layer, _) in zip(blocks, places, strict=True)
    ]


def _at_checkpoints(cursor: Cursor) -> bool:
    if cursor.left < 12:
        return False
    return cursor.peek(4) == _CHECKPOINT_MAGIC


def read_checkpoint_count(cursor: Cursor) -> int | None:
    """Read the head of the appendix; None if the file has ended, or goes on with something else."""
    if not _at_checkpoints(cursor):
        return None
    _, version, count = struct.unpack("<III", cursor.take(12, "the context checkpoints"))
    if version != 1:
        raise StateFileError(f"context checkpoints: version {version}, only 1 is known")
    if count > min(_MAX_CHECKPOINTS, cursor.left // 40):
        raise StateFileError(
            f"context checkpoints: {count} of them do not fit the {cursor.left} bytes left"
        )
    return int(count)


def skip_checkpoints(cursor: Cursor) -> int | None:
    """Pass over the appendix and return how many checkpoints it has; None if there is none."""
    count = read_checkpoint_count(cursor)
    for number in range(count or 0):
        what = f"context checkpoint {number}"
        cursor.take(16, what)
        for _ in ("target", "draft", "speculation"):
            (n_bytes,) = struct.unpack("<Q", cursor.take(8, what))
            cursor.skip(n_bytes, what)
    return count


def expect_same(what: str, field: str, found: int | str | None, wanted: int | str | None) -> None:
    """Refuse a field that differs from the layout's."""
    if found != wanted:
        raise StateFileError(f"{what}: {field} {found}, the decoder has {wanted}")
