"""llama.cpp sequence-state files: read, learn the layout of, check against that layout.

The format is llama.cpp's own (`src/llama-context.cpp`, `src/llama-kv-cache.cpp`,
`src/llama-memory-recurrent.cpp`), versions 2, 3 and 4, little endian, without padding:

    u32 magic, u32 version, u32 n_words, i32[n_words] tokens, plain or packed
    sections    kv            plain attention
                kv kv         full attention, then sliding window (SWA)
                kv recr       hybrid
                kv kv recr    hybrid with a sliding window
                recr          recurrent
    appendix    SCKP          context checkpoints; some version 4 builds, never for plain attention

    kv    u32 n_stream(1), u32 count, count x (i32 pos, u32 n_seq_id(1), ext, i32 seq_id),
          u32 v_trans, u32 n_layer, version 4: u32 n_rot_k, u32 n_rot_v,
          K of each layer: i32 type, u64 row_size, count rows
          V of each layer: the same, or with v_trans: i32 type, u32 el_size, u32 n_embd_v_gqa,
          count elements for each channel; models with MLA have no V
    recr  u32 count(1), i32 pos, u32 n_seq_id(0), u32 s_trans(0), u32 n_layer,
          R rows, then S rows: i32 type, u64 row_size, the row

The file does not say which section kinds follow, nor whether a cell has an `ext` (0, 8 or 12
bytes: M-RoPE x and y, and the token id). `parse` finds out by trying each combination to the end
of the file; `check` knows them from the layout of a file that the decoder itself saved.

Why check at all: a file that is one byte short aborts llama-server, and some well-formed nonsense
(a negative position, a missing first cell, a NaN) makes it answer wrongly until it is restarted.

Cost: `check` reads every byte once, `CHUNK_BYTES` at a time, and holds no more than that and one
chunk's worth of scratch: on one core 1 to 4 GB/s (16 MB of f16 in 5 to 15 ms; `os.pread` from tmpfs
is the fast end, the page faults of a fresh mmap the slow one). `parse` reads only headers, cells
and tokens, at most once for each of 25 combinations: 2 to 5 ms for three tokens.

Anything with `len()` and slices that yield bytes will do as a source: bytes, a memoryview, an
mmap. Nothing here keeps a view of it, so an mmap can be closed after a refusal too. Reading a file
that another process may still truncate through an mmap is a SIGBUS; a source that slices with
`os.pread` gets a `StateFileError` in that case.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from onebitd.core.errors import StateFileError

MAGIC = 0x67677371
VERSIONS = (2, 3, 4)
CHUNK_BYTES = 1 << 20

_CHECKPOINT_MAGIC = b"SCKP"
_PARTIAL_MAGIC = 0xAF143CD8  # io_magic of llama_context's state reader
_MAX_LAYERS = 4096  # llama.cpp has 512
_MAX_CELLS = 1 << 24
_MAX_CHECKPOINTS = 4096  # llama-server keeps 32 by default
_CELLS_A_READ = 1 << 15

_KINDS = (("kv",), ("kv", "kv"), ("kv", "recr"), ("kv", "kv", "recr"), ("recr",))
_TYPE_NAMES = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 20: "iq4_nl",
    30: "bf16",
}  # fmt: skip
# Exponent bits that are all set in an infinity or a NaN.
_FLOATS = {0: ("<u4", 0x7F800000), 1: ("<u2", 0x7C00), 30: ("<u2", 0x7F80)}
# Bytes of a block and how many f16 (scale, minimum) it starts with.
_BLOCKS = {2: (18, 1), 3: (20, 2), 6: (22, 1), 7: (24, 2), 8: (34, 1), 20: (18, 1)}

_Ints: TypeAlias = npt.NDArray[np.int32]


class Source(Protocol):
    """What a state file is read from: bytes, memoryview, mmap, or a pread wrapper."""

    def __len__(self) -> int:
        """Return the size in bytes; it must not change."""

    def __getitem__(self, index: slice, /) -> bytes | bytearray | memoryview:
        """Return those bytes, or fewer at the end."""


@dataclass(frozen=True, slots=True)
class Rows:
    """One tensor as the file holds it: a header and one row of `row_size` bytes for each cell."""

    type: int
    row_size: int

    def data_bytes(self, cells: int) -> int:
        """Return the size of the rows of so many cells, without the 12 bytes of header."""
        return self.row_size * cells


@dataclass(frozen=True, slots=True)
class Channels:
    """A transposed V: for each of `n_embd_v_gqa` channels one element for each cell."""

    type: int
    el_size: int
    n_embd_v_gqa: int

    def data_bytes(self, cells: int) -> int:
        """Return the size of the data of so many cells, without the 12 bytes of header."""
        return self.el_size * self.n_embd_v_gqa * cells


Tensor: TypeAlias = Rows | Channels


@dataclass(frozen=True, slots=True)
class KvSection:
    """The shape of an attention cache.

    Attributes:
        ext_bytes: 0, 8 (x, y) or 12 (x, y, token id) bytes more in each cell.
        v_trans: True without flash attention: V is stored as `Channels`.
        n_rot_k, n_rot_v: size of the rotation of quantized rows, 0 without; None before version 4,
            which does not record it.
        k, v: one tensor for each layer of this cache; `v` is empty in a model with MLA.
    """

    ext_bytes: int
    v_trans: bool
    n_rot_k: int | None
    n_rot_v: int | None
    k: tuple[Rows, ...]
    v: tuple[Tensor, ...]

    def bytes_for(self, cells: int) -> int:
        """Return the size of the section with so many cells."""
        if not cells:
            return 8
        head = 16 + (0 if self.n_rot_k is None else 8) + (12 + self.ext_bytes) * cells
        return head + sum(12 + tensor.data_bytes(cells) for tensor in (*self.k, *self.v))

    def describe(self) -> str:
        """Return e.g. `30 layers, K f16, V f16`."""
        words = [f"{len(self.k)} layers"]
        words += [f"K {_types(self.k)}"] if self.k else []
        words += [f"V {_types(self.v)}"] if self.v else ["no V"] if self.k else []
        words += ["V transposed"] if self.v_trans else []
        words += [f"{self.ext_bytes} bytes of position"] if self.ext_bytes else []
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class RecrSection:
    """The shape of a recurrent state: one cell.

    Attributes:
        n_layer: every layer of the model, with a state or without.
        rows: the R rows, then as many S rows, of the layers that have a state (which ones they are
            is not in the file).
    """

    n_layer: int
    rows: tuple[Rows, ...]

    def bytes_for(self, cells: int) -> int:
        """Return the size of the section, the same for any number of tokens but none."""
        return 20 + sum(12 + row.row_size for row in self.rows) if cells else 12

    def describe(self) -> str:
        """Return e.g. `36 rows, f32`."""
        return f"{len(self.rows)} rows, {_types(self.rows)}"


Section: TypeAlias = KvSection | RecrSection


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything in a decoder's state files that does not depend on the prompt.

    Attributes:
        version: LLAMA_STATE_SEQ_VERSION, 2 to 4.
        packed_tokens: the decoder writes, and so reads, the packed token block. Every decoder
            reads a plain one.
        sections: in file order.
    """

    version: int
    packed_tokens: bool
    sections: tuple[Section, ...]

    @property
    def may_have_checkpoints(self) -> bool:
        """True if builds of this version append context checkpoints for this kind of memory."""
        return self.version >= 4 and bool(self.partial)

    @property
    def partial(self) -> tuple[Section, ...]:
        """The sections that a context checkpoint holds: SWA cache and recurrent state."""
        kv = [section for section in self.sections if isinstance(section, KvSection)]
        recr = [section for section in self.sections if isinstance(section, RecrSection)]
        return (*kv[1:], *recr)

    def bytes_for(self, n_tokens: int) -> int:
        """Return the size of a state of so many tokens, plainly listed, without checkpoints.

        An SWA section may hold fewer cells, so this is the most such a file can take.
        """
        return 12 + 4 * n_tokens + sum(section.bytes_for(n_tokens) for section in self.sections)

    def describe(self) -> str:
        """Return one line for logs and status: `v2: attention 30 layers, K f16, V f16`."""
        parts = zip(_layout_names(self.sections), self.sections, strict=True)
        return f"v{self.version}: " + "; ".join(f"{name} {part.describe()}" for name, part in parts)


@dataclass(frozen=True, slots=True)
class Block:
    """Where the data of one tensor lies in the file."""

    what: str
    offset: int
    cells: int
    tensor: Tensor

    @property
    def n_bytes(self) -> int:
        """Return the size of the data."""
        return self.tensor.data_bytes(self.cells)


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The cells of one section.

    Attributes:
        pos: int32 positions, shape (count,).
        n_seq_id: 1 for each attention cell, 0 for a recurrent one; shape (count,).
        ext: int32, shape (count, ext_bytes / 4).
    """

    pos: _Ints
    n_seq_id: _Ints
    ext: _Ints


@dataclass(frozen=True, slots=True, eq=False)
class ReadSection:
    """One section of one file."""

    what: str
    shape: Section
    cells: Cells
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StateFile:
    """A state file as far as it was read: everything but the data, which stays where it is.

    Attributes:
        tokens: int32 ids, shape (n_tokens,).
        n_checkpoints: entries of the SCKP appendix, which is skipped; None without one.
    """

    size: int
    version: int
    packed: bool
    tokens: _Ints
    sections: tuple[ReadSection, ...]
    n_checkpoints: int | None

    @property
    def layout(self) -> Layout:
        """The part that does not depend on the prompt."""
        return Layout(self.version, self.packed, tuple(part.shape for part in self.sections))


def parse(buf: Source) -> StateFile:
    """Read a whole state file whose kind is not known, and say where everything is.

    Returns:
        the one reading that reaches exactly the end of the file.

    Raises:
        StateFileError: no reading does, and then the message tells how far the best one came, or
            several do. Never anything else, whatever the bytes.
    """
    header = _Cursor(buf)
    version = _version(header)
    packed, tokens = _tokens(header, _MAX_CELLS)
    found: dict[Layout, StateFile] = {}
    stuck: list[tuple[int, str]] = []
    for kinds, ext_bytes, has_v in product(_KINDS, (0, 8, 12), (True, False)):
        cursor = _Cursor(buf, header.at)
        try:
            sections = tuple(
                _kv(cursor, name, _Trial(version, ext_bytes, has_v))
                if name in _KV_NAMES
                else _recr(cursor, name, None)
                for name in _section_names(kinds)
            )
            n_checkpoints = _skip_checkpoints(cursor)
            cursor.expect_end()
        except StateFileError as error:
            stuck.append((cursor.at, str(error)))
            continue
        state = StateFile(cursor.size, version, packed, tokens, sections, n_checkpoints)
        found.setdefault(state.layout, state)
    if not found:
        raise StateFileError(f"not a state of a known kind: {max(stuck, key=lambda s: s[0])[1]}")
    if len(found) > 1:
        raise StateFileError(f"can be read in {len(found)} ways: use more tokens")
    return next(iter(found.values()))


def learn_layout(buf: Source, tokens: Sequence[int]) -> Layout:
    """Return the layout of a state that the decoder itself saved.

    Args:
        buf: the file, after a prompt of a few tokens (three are enough to be unambiguous).
        tokens: that prompt.

    Raises:
        StateFileError: not readable, not in one way only, or not the state of these tokens.
    """
    state = parse(buf)
    _expect_tokens(state.tokens, tokens)
    for section in state.sections:
        _expect_cells(section.what, section.shape, section.cells, state.tokens, len(tokens))
    return state.layout


def check(
    buf: Source, layout: Layout, tokens: Sequence[int], *, swa_window: int | None = None
) -> None:
    """Refuse a file unless the decoder with this layout can be given it.

    It must hold exactly these tokens at positions 0..N-1 in order (a sliding window's tail of
    them may start anywhere in its ring), every field must be the layout's, it must end where its
    last section (or its context checkpoints) ends, and every value must be finite.

    Args:
        buf: the whole file. The walk reads each byte once and keeps none.
        layout: what `learn_layout` made of the decoder's own file.
        tokens: the N ids that were handed over: the prompt less its last.
        swa_window: the model's sliding window in tokens. An SWA section may then hold just the
            last min(N, window) cells or more, which is what llama-server saves. Without it, the
            section must hold all N: a tail that is too short would be silently wrong.

    Raises:
        StateFileError: a sentence that names section, layer and offset.
    """
    cursor = _Cursor(buf)
    version = _version(cursor)
    _same("the file", "state version", version, layout.version)
    packed, found = _tokens(cursor, len(tokens))
    if packed and not layout.packed_tokens:
        raise StateFileError("the token list is packed; the decoder's build reads a plain one")
    _expect_tokens(found, tokens)
    reader = _Guided(cursor, layout, found, swa_window)
    sections = reader.sections()
    checkpoints = reader.checkpoints() if layout.may_have_checkpoints else []
    cursor.expect_end()
    for section in (*sections, *checkpoints):
        for block in section.blocks:
            _expect_finite(buf, block)


# --- reading ------------------------------------------------------------------------------------


class _Cursor:
    """A place in a source; nothing is read, skipped or allocated past the source's end."""

    def __init__(self, source: Source, at: int = 0) -> None:
        self._source = source
        self.size = len(source)
        self.at = at

    @property
    def left(self) -> int:
        return self.size - self.at

    def skip(self, n_bytes: int, what: str) -> int:
        """Pass over so many bytes and return the offset of the first."""
        if n_bytes > self.left:
            missing = n_bytes - self.left
            raise StateFileError(
                f"the file ends at byte {self.size}, {missing} byte{'s'[: missing != 1]} before "
                f"the end of {what}"
            )
        start = self.at
        self.at += n_bytes
        return start

    def take(self, n_bytes: int, what: str) -> bytes | bytearray | memoryview:
        start = self.skip(n_bytes, what)
        return _slice(self._source, start, n_bytes)

    def peek(self, n_bytes: int) -> bytes:
        return bytes(_slice(self._source, self.at, n_bytes))

    def u32(self, what: str) -> int:
        return int(struct.unpack("<I", self.take(4, what))[0])

    def expect_end(self) -> None:
        if self.left:
            raise StateFileError(
                f"{self.left} byte{'s'[: self.left != 1]} too many: the state ends at byte "
                f"{self.at}, the file at byte {self.size}"
            )


def _slice(source: Source, start: int, n_bytes: int) -> bytes | bytearray | memoryview:
    data = source[start : start + n_bytes]
    if len(data) != n_bytes:
        raise StateFileError(f"the file became shorter than {start + n_bytes} bytes meanwhile")
    return data


def _version(cursor: _Cursor) -> int:
    if cursor.u32("the header") != MAGIC:
        raise StateFileError("not a state file: it does not start with 71 73 67 67 (qsgg)")
    version = cursor.u32("the header")
    if version not in VERSIONS:
        raise StateFileError(f"state version {version} is not known (2, 3 and 4 are)")
    return version


def _tokens(cursor: _Cursor, most: int) -> tuple[bool, _Ints]:
    """Return whether the token block is packed, and the ids, of which there may be so many."""
    n_words = cursor.u32("the header")
    if n_words > most + 4:
        raise StateFileError(f"the token list takes {n_words} words, too many for {most} tokens")
    words = _ints(cursor.take(4 * n_words, f"the list of {n_words} tokens"))
    if not n_words or words[0] != -1:
        return False, words
    if n_words < 4 or words[1] != 1:
        raise StateFileError("the packed token list is cut, or not version 1")
    if words[2] != n_words - 4 or words[-1] != 0:
        raise StateFileError(
            f"the packed token list says {words[2]} ids in {n_words} words; text without media "
            "takes 4 words more than ids"
        )
    return True, words[3:-1]


def _ints(data: bytes | bytearray | memoryview) -> _Ints:
    """Return a copy, so that no view of the source is left."""
    return np.frombuffer(data, "<i4").astype(np.int32)


_SLIDING = "sliding window"
_KV_NAMES = ("attention", _SLIDING)


def _section_names(kinds: Sequence[str]) -> list[str]:
    names = iter(_KV_NAMES)
    return ["recurrent state" if kind == "recr" else next(names) for kind in kinds]


def _layout_names(sections: Sequence[Section]) -> list[str]:
    return _section_names(["kv" if isinstance(part, KvSection) else "recr" for part in sections])


@dataclass(frozen=True, slots=True)
class _Trial:
    """What `parse` supposes about a kv section, where the layout says what it must be."""

    version: int
    ext_bytes: int
    has_v: bool


_CellsCheck: TypeAlias = Callable[[int], None]


def _kv(
    cursor: _Cursor,
    name: str,
    want: KvSection | _Trial,
    check_count: _CellsCheck = lambda count: None,
) -> ReadSection:
    """Read a kv section up to its end; `want` is the layout's section, or a supposition."""
    known = want if isinstance(want, KvSection) else None
    what = f"the header of section {name}"
    n_stream = cursor.u32(what)
    if n_stream != 1:
        raise StateFileError(f"section {name}: {n_stream} streams, a decoder with one slot has 1")
    count = cursor.u32(what)
    check_count(count)
    cells = _cells(cursor, name, count, want.ext_bytes)
    if not count:
        raise StateFileError(f"section {name}: no cells")
    v_trans, n_layer = cursor.u32(what), cursor.u32(what)
    rot: tuple[int | None, int | None] = (None, None)
    has_rot = want.n_rot_k is not None if isinstance(want, KvSection) else want.version >= 4
    if has_rot:
        rot = (cursor.u32(what), cursor.u32(what))
    if known:
        _same(f"section {name}", "v_trans", v_trans, int(known.v_trans))
        _same(f"section {name}", "layers", n_layer, len(known.k))
        _same(f"section {name}", "n_rot_k", rot[0], known.n_rot_k)
        _same(f"section {name}", "n_rot_v", rot[1], known.n_rot_v)
    if v_trans > 1 or n_layer > _MAX_LAYERS:
        raise StateFileError(f"section {name}: v_trans {v_trans} or {n_layer} layers cannot be")
    blocks: list[Block] = []
    prefix = "" if name == "attention" else f"{name} "
    for layer in range(n_layer):
        expected = known.k[layer] if known else None
        blocks.append(_rows(cursor, f"{prefix}layer {layer} K", count, expected))
    has_v = bool(want.v) if isinstance(want, KvSection) else want.has_v
    for layer in range(n_layer if has_v else 0):
        read = _channels if v_trans else _rows
        wanted = known.v[layer] if known else None
        blocks.append(read(cursor, f"{prefix}layer {layer} V", count, wanted))
    k = tuple(block.tensor for block in blocks[:n_layer] if isinstance(block.tensor, Rows))
    v = tuple(block.tensor for block in blocks[n_layer:])
    shape = KvSection(want.ext_bytes, bool(v_trans), *rot, k, v)
    return ReadSection(name, shape, cells, tuple(blocks))


def _cells(cursor: _Cursor, name: str, count: int, ext_bytes: int) -> Cells:
    width = 12 + ext_bytes
    if count > _MAX_CELLS or count * width > cursor.left:
        raise StateFileError(
            f"section {name}: {count} cells do not fit the {cursor.left} bytes left"
        )
    what = f"the cells of section {name}"
    parts = []
    for start in range(0, count, _CELLS_A_READ):
        some = min(_CELLS_A_READ, count - start)
        part = _ints(cursor.take(some * width, what)).reshape(some, width // 4)
        if not (part[:, 1] == 1).all():
            at = int(np.argmax(part[:, 1] != 1))
            number = int(part[at, 1]) & 0xFFFFFFFF
            raise StateFileError(f"section {name}, cell {start + at}: n_seq_id {number}, not 1")
        parts.append(np.delete(part, -1, axis=1))  # the sequence id is not used by anyone
    table = np.concatenate(parts) if parts else np.empty((0, width // 4 - 1), np.int32)
    return Cells(pos=table[:, 0], n_seq_id=table[:, 1], ext=table[:, 2:])


def _rows(cursor: _Cursor, what: str, count: int, want: Tensor | None) -> Block:
    type_, row_size = struct.unpack("<iQ", cursor.take(12, f"the header of {what}"))
    if isinstance(want, Rows):
        _same_type(what, type_, want.type)
        _same(what, "row size", row_size, want.row_size)
    elif not 0 <= type_ < 256:
        raise StateFileError(f"{what}: type {type_} cannot be")
    tensor = Rows(type_, row_size)
    return Block(what, cursor.skip(tensor.data_bytes(count), what), count, tensor)


def _channels(cursor: _Cursor, what: str, count: int, want: Tensor | None) -> Block:
    type_, el_size, n_embd = struct.unpack("<iII", cursor.take(12, f"the header of {what}"))
    if isinstance(want, Channels):
        _same_type(what, type_, want.type)
        _same(what, "element size", el_size, want.el_size)
        _same(what, "n_embd_v_gqa", n_embd, want.n_embd_v_gqa)
    elif not 0 <= type_ < 256:
        raise StateFileError(f"{what}: type {type_} cannot be")
    tensor = Channels(type_, el_size, n_embd)
    return Block(what, cursor.skip(tensor.data_bytes(count), what), count, tensor)


def _recr(cursor: _Cursor, name: str, want: RecrSection | None) -> ReadSection:
    """Read the recurrent state up to its end, which only a layout or the file's end tells."""
    what = f"the header of the {name}"
    count = cursor.u32(what)
    if count != 1:
        raise StateFileError(f"{name}: {count} cells, there must be 1")
    pos, n_seq_id, s_trans, n_layer = struct.unpack("<iIII", cursor.take(16, what))
    if n_seq_id != 0 or s_trans != 0:
        raise StateFileError(f"{name}: n_seq_id {n_seq_id} and s_trans {s_trans} must be 0")
    if want:
        _same(name, "layers", n_layer, want.n_layer)
    if n_layer > _MAX_LAYERS:
        raise StateFileError(f"{name}: {n_layer} layers cannot be")
    blocks: list[Block] = []
    if want:
        half = len(want.rows) // 2
        for number, row in enumerate(want.rows):
            label = f"{name}, " + (f"R {number}" if number < half else f"S {number - half}")
            blocks.append(_rows(cursor, label, 1, row))
    else:
        while cursor.left and not _at_checkpoints(cursor):
            if len(blocks) == 2 * n_layer:
                raise StateFileError(f"{name}: more than two rows a layer in {n_layer} layers")
            blocks.append(_rows(cursor, f"{name}, row {len(blocks)}", 1, None))
    shape = RecrSection(n_layer, tuple(b.tensor for b in blocks if isinstance(b.tensor, Rows)))
    one = np.array([[pos, 0]], np.int32)
    cells = Cells(one[:, 0], one[:, 1], np.empty((1, 0), np.int32))
    return ReadSection(name, shape, cells, tuple(blocks))


def _at_checkpoints(cursor: _Cursor) -> bool:
    if cursor.left < 12:
        return False
    return cursor.peek(4) == _CHECKPOINT_MAGIC


def _checkpoint_count(cursor: _Cursor) -> int | None:
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


def _skip_checkpoints(cursor: _Cursor) -> int | None:
    count = _checkpoint_count(cursor)
    for number in range(count or 0):
        what = f"context checkpoint {number}"
        cursor.take(16, what)
        for _ in ("target", "draft", "speculation"):
            (n_bytes,) = struct.unpack("<Q", cursor.take(8, what))
            cursor.skip(n_bytes, what)
    return count


class _Guided:
    """Reads the sections of a file that must follow a layout."""

    def __init__(
        self, cursor: _Cursor, layout: Layout, tokens: _Ints, swa_window: int | None
    ) -> None:
        self._cursor = cursor
        self._layout = layout
        self._tokens = tokens
        self._window = swa_window

    def sections(self) -> list[ReadSection]:
        names = _layout_names(self._layout.sections)
        n = len(self._tokens)
        shapes = zip(names, self._layout.sections, strict=True)
        return [self._section(name, shape, n, "") for name, shape in shapes]

    def _section(self, name: str, shape: Section, n: int, prefix: str) -> ReadSection:
        """Read a section of a state of the first `n` tokens."""
        ring = name == _SLIDING
        name = prefix + name
        least = n
        if isinstance(shape, RecrSection):
            section = _recr(self._cursor, name, shape)
        else:
            if ring and self._window is not None:
                least = min(n, max(1, self._window))
            section = _kv(
                self._cursor, name, shape, lambda count: _expect_count(name, count, least, n)
            )
        _expect_cells(name, shape, section.cells, self._tokens[:n], least, ring=ring)
        return section

    def checkpoints(self) -> list[ReadSection]:
        """Read the appendix, if there is one: each is a partial state of fewer tokens."""
        cursor = self._cursor
        sections: list[ReadSection] = []
        for number in range(_checkpoint_count(cursor) or 0):
            what = f"context checkpoint {number}"
            head = cursor.take(24, what)
            n_tokens, pos_min, pos_max, n_bytes = struct.unpack("<qiiQ", head)
            if not 0 <= pos_min <= pos_max < len(self._tokens) or n_tokens != pos_max + 1:
                raise StateFileError(
                    f"{what}: {n_tokens} tokens at positions {pos_min} to {pos_max}, "
                    f"in a state of {len(self._tokens)}"
                )
            end = cursor.at + n_bytes
            magic, _ = struct.unpack("<Ii", cursor.take(8, what))
            if magic != _PARTIAL_MAGIC:
                raise StateFileError(f"{what}: does not start as a partial state does")
            partial = self._layout.partial
            names = _layout_names(self._layout.sections)[-len(partial) :]
            for name, shape in zip(names, partial, strict=True):
                sections.append(self._section(name, shape, n_tokens, f"{what}, "))
            if cursor.at != end or any(struct.unpack("<QQ", cursor.take(16, what))):
                raise StateFileError(f"{what}: its sizes are not those of the decoder's states")
        return sections


# --- expectations -------------------------------------------------------------------------------


def _same(what: str, field: str, found: int | None, wanted: int | None) -> None:
    if found != wanted:
        raise StateFileError(f"{what}: {field} {found}, the decoder has {wanted}")


def _same_type(what: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise StateFileError(f"{what}: type {_type(found)}, the decoder has {_type(wanted)}")


def _expect_tokens(found: _Ints, wanted: Sequence[int]) -> None:
    if len(found) != len(wanted):
        raise StateFileError(f"holds {len(found)} tokens, {len(wanted)} were handed over")
    if not wanted:
        raise StateFileError("holds no tokens")
    for index, (one, other) in enumerate(zip(found.tolist(), wanted, strict=True)):
        if one != other:
            raise StateFileError(f"token {index} is {one}, {other} was handed over")


def _expect_count(name: str, count: int, least: int, most: int) -> None:
    if not least <= count <= most:
        wanted = f"{least}" if least == most else f"{least} to {most}"
        raise StateFileError(f"section {name}: {count} cells, {wanted} expected")


def _expect_cells(
    name: str, shape: Section, cells: Cells, tokens: _Ints, least: int, *, ring: bool = False
) -> None:
    """Require consecutive positions that end at the last token's, at least so many.

    A sliding window's cache is a ring unless llama-server runs with --swa-full: the file holds
    its cells in the order of their places, so the last positions may come before the first ones.
    """
    n = len(tokens)
    if isinstance(shape, RecrSection):
        if int(cells.pos[0]) != n - 1:
            raise StateFileError(f"{name}: position {cells.pos[0]}, {n - 1} expected")
        return
    _expect_count(name, len(cells.pos), least, n)
    first = n - len(cells.pos)
    wanted = np.arange(first, n, dtype=np.int32)
    if ring and first < cells.pos[0] < n:
        wanted = np.roll(wanted, first - int(cells.pos[0]))
    _expect_column(name, "position", cells.pos, wanted)
    if shape.ext_bytes:
        _expect_column(name, "x", cells.ext[:, 0], wanted)
        _expect_column(name, "y", cells.ext[:, 1], wanted)
    if shape.ext_bytes == 12:
        _expect_column(name, "token", cells.ext[:, 2], tokens[wanted])


def _expect_column(name: str, field: str, found: _Ints, wanted: _Ints) -> None:
    wrong = found != wanted
    if wrong.any():
        at = int(np.argmax(wrong))
        raise StateFileError(
            f"section {name}, cell {at}: {field} {found[at]}, {wanted[at]} expected"
        )


def _expect_finite(buf: Source, block: Block) -> None:
    """Refuse an infinity or a NaN; types that are not cache types are let through unread."""
    unit, find = _finder(block.tensor.type)
    if unit == 0 or block.n_bytes % unit:
        return
    for start, data in _chunks(buf, block, unit):
        index = find(data)
        if index is not None:
            at = start + index * unit
            raise StateFileError(
                f"{block.what}: a NaN or an infinity at byte {block.offset + at} "
                f"({_place(block, at)})"
            )


def _chunks(
    buf: Source, block: Block, unit: int
) -> Iterator[tuple[int, bytes | bytearray | memoryview]]:
    step = CHUNK_BYTES - CHUNK_BYTES % unit
    for start in range(0, block.n_bytes, step):
        n_bytes = min(step, block.n_bytes - start)
        yield start, _slice(buf, block.offset + start, n_bytes)


_Find: TypeAlias = Callable[[bytes | bytearray | memoryview], int | None]


def _finder(type_: int) -> tuple[int, _Find]:
    """Return the bytes of one unit of a type, and what finds the first bad unit in many."""
    if type_ in _FLOATS:
        dtype, mask = _FLOATS[type_]

        def find_float(data: bytes | bytearray | memoryview) -> int | None:
            bits = np.frombuffer(data, dtype) & mask
            return int(bits.argmax()) if bits.max() == mask else None

        return np.dtype(dtype).itemsize, find_float
    if type_ in _BLOCKS:
        size, scales = _BLOCKS[type_]
        record = np.dtype([("scale", "<u2", (scales,)), ("rest", f"V{size - 2 * scales}")])

        def find_block(data: bytes | bytearray | memoryview) -> int | None:
            bits = (np.frombuffer(data, record)["scale"] & 0x7C00).max(axis=1)
            return int(bits.argmax()) if bits.max() == 0x7C00 else None

        return size, find_block
    return 0, lambda data: None


def _place(block: Block, at: int) -> str:
    if isinstance(block.tensor, Rows):
        return f"cell {at // block.tensor.row_size}"
    element = at // block.tensor.el_size
    return f"channel {element // block.cells}, cell {element % block.cells}"


def _type(number: int) -> str:
    return _TYPE_NAMES.get(number, str(number))


def _types(tensors: Sequence[Tensor]) -> str:
    return "/".join(dict.fromkeys(_type(tensor.type) for tensor in tensors)) or "none"
