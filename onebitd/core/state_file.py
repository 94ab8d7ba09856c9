"""llama.cpp sequence-state files: what is in them, and the layout that a decoder writes.

The format is llama.cpp's own (`src/llama-context.cpp`, `src/llama-kv-cache.cpp`,
`src/llama-memory-recurrent.cpp`), versions 2, 3 and 4, little endian, without padding:

    u32 magic, u32 version, u32 n_words, i32[n_words] tokens, plain or packed
    sections    kv            plain attention
                kv kv         full attention, then sliding window (SWA)
                kv recr       hybrid
                kv kv recr    hybrid with a sliding window
                recr          recurrent
    appendix    SCKP          context checkpoints; some version 4 builds, never for plain attention

    packed  i32 -1, i32 1, i32 n, i32[n] tokens, i32 n_media(0); every build reads a plain list too
    kv      u32 n_stream, that many streams (1 if the decoder has one slot, or its slots share the
            cache; otherwise one a slot, and the saved slot's alone has cells)
    stream  u32 count, nothing more if that is 0,
            count x (i32 pos, u32 n_seq_id(1), ext, i32 seq_id),
            u32 v_trans, u32 n_layer, version 4: u32 n_rot_k, u32 n_rot_v,
            K of each layer: i32 type, u64 row_size, count rows
            V of each layer: the same, or with v_trans: i32 type, u32 el_size, u32 n_embd_v_gqa,
            count elements for each channel; models with MLA have no V
    ext     nothing; M-RoPE, and models with embeddings per layer: i32 x, i32 y, from version 3
            on i32 token; of text x and y are the position
    recr    u32 count(1), i32 pos, u32 n_seq_id(0), u32 s_trans(0), u32 n_layer (of the model),
            R rows, then S rows: i32 type, u64 row_size, the row; one each for a layer that has a
            state (which layers these are is not in the file)
    SCKP    'SCKP', u32 1, u32 count, count x (i64 n_tokens, i32 pos_min, i32 pos_max,
            u64 size, u32 0xaf143cd8, i32 seq_id, a partial state: the SWA section and recr alone,
            u64 size of a draft model's, u64 size of a speculation's, with their bytes)

A row is one cell: all KV heads, K after RoPE. Rows of a quantized cache are rotated by a Hadamard
matrix of n_rot values; versions 2 and 3 do the same and do not record it.

The file does not say which section kinds follow, nor whether a cell has an `ext` (0, 8 or 12
bytes). `parse` finds out by trying each combination to the end of the file; `state_check.check`,
and `parse` with `like`, know them from a file that the decoder itself saved.

Cost: `parse` reads only headers, cells and tokens, for each of 25 combinations: 1 ms for 3 tokens
of 30 layers, 2 ms for 30000; by a layout a third of that. It holds them and no data, whatever the
file's fields claim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from onebitd.core.errors import StateFileError
from onebitd.core.state_check import expect_cells, expect_tokens
from onebitd.core.state_cursor import Cursor, Source
from onebitd.core.state_layout import (
    KV_NAMES,
    RECURRENT,
    KvSection,
    Layout,
    ReadSection,
    StateFile,
    layout_names,
)
from onebitd.core.state_sections import (
    MAX_CELLS,
    Trial,
    expect_one_stream,
    expect_same,
    read_recr,
    read_streams,
    read_tokens,
    read_version,
    skip_checkpoints,
)

# What may come after a section; "" is the start, and the end.
_NEXT = {
    "": (KV_NAMES[0], RECURRENT),
    KV_NAMES[0]: ("", KV_NAMES[1], RECURRENT),
    KV_NAMES[1]: ("", RECURRENT),
    RECURRENT: ("",),
}


def parse(buf: Source, like: Layout | None = None) -> StateFile:
    """Read a whole state file, and say where everything is.

    Args:
        buf: the whole file; anything with a length and slices will do, an mmap too.
        like: the layout of the decoder that saved it, if that is known. The file is then read in
            this way only, which is cheap and never ambiguous; what differs is refused. Files of
            one or two tokens may need it. Token list, streams and appendix are its own affair.

    Returns:
        the one reading that reaches exactly the end of the file.

    Raises:
        StateFileError: no reading does, and then the message tells how far the best one came, or
            several do. Never anything else, whatever the bytes.
    """
    header = Cursor(buf)
    version = read_version(header)
    if like is not None:
        expect_same("the file", "state version", version, like.version)
    packed, tokens = read_tokens(header, MAX_CELLS)
    start = StateFile(header.size, version, packed, tokens, (), None, header.at)
    if like is not None:
        return _finish(header, replace(start, sections=_read_by(header, like)))
    search = _Search(buf)
    for trial in product((0, 8, 12), (True, False)):
        search.follow(start, "", Trial(version, *trial))
    if not search.found:
        raise StateFileError(f"not a state of a known kind: {search.stuck}")
    if len(search.found) > 1:
        raise StateFileError(f"can be read in {len(search.found)} ways: use more tokens")
    return next(iter(search.found.values()))


def _read_by(cursor: Cursor, like: Layout) -> tuple[ReadSection, ...]:
    """Read the sections that a layout has."""
    sections: list[ReadSection] = []
    for name, shape in zip(layout_names(like.sections), like.sections, strict=True):
        if isinstance(shape, KvSection):
            sections += read_streams(cursor, name, shape)
        else:
            sections.append(read_recr(cursor, name, shape))
    return tuple(sections)


def _finish(cursor: Cursor, state: StateFile) -> StateFile:
    """Return the state with what follows its last section, which must be the end of the file."""
    end = cursor.at
    n_checkpoints = skip_checkpoints(cursor)
    cursor.expect_end()
    return replace(state, n_checkpoints=n_checkpoints, sections_end=end)


class _Search:
    """Reads a file in every way that is possible.

    Attributes:
        found: the readings that reach exactly its end.
        stuck: why the one that came furthest does not.
    """

    def __init__(self, buf: Source) -> None:
        self._buf = buf
        self._furthest = -1
        self.found: dict[Layout, StateFile] = {}
        self.stuck = ""

    def follow(self, state: StateFile, last: str, trial: Trial) -> None:
        """Try everything that may come after the last section of what has been read."""
        for name in _NEXT[last]:
            cursor = Cursor(self._buf, state.sections_end)
            try:
                if not name:
                    whole = _finish(cursor, state)
                    self.found.setdefault(whole.layout, whole)
                    continue
                if name == RECURRENT:
                    more = [read_recr(cursor, name, None)]
                else:
                    more = read_streams(cursor, name, trial)
            except StateFileError as error:
                if cursor.at > self._furthest:
                    self._furthest, self.stuck = cursor.at, str(error)
                continue
            read = replace(state, sections=(*state.sections, *more), sections_end=cursor.at)
            self.follow(read, name, trial)


def expect_single_stream(state: StateFile) -> None:
    """Refuse the state of a decoder whose slots each have a cache of their own.

    Raises:
        StateFileError: an attention section has several streams.
    """
    expect_one_stream(state.sections[0].what, state.n_stream)


def learn_layout(buf: Source, tokens: Sequence[int]) -> Layout:
    """Return the layout of a state that the decoder itself saved.

    Args:
        buf: the file, after a prompt of a few tokens (three are enough to be unambiguous).
        tokens: that prompt.

    Raises:
        StateFileError: not readable, not in one way only, or not the state of these tokens in a
            decoder with one slot.
    """
    state = parse(buf)
    expect_single_stream(state)
    expect_tokens(state.tokens, tokens)
    for section in state.sections:
        expect_cells(section.what, section.shape, section.cells, state.tokens, len(tokens))
    return state.layout
