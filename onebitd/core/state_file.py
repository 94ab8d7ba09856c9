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

    kv    u32 n_stream(1), u32 count, count x (i32 pos, u32 n_seq_id(1), ext, i32 seq_id),
          u32 v_trans, u32 n_layer, version 4: u32 n_rot_k, u32 n_rot_v,
          K of each layer: i32 type, u64 row_size, count rows
          V of each layer: the same, or with v_trans: i32 type, u32 el_size, u32 n_embd_v_gqa,
          count elements for each channel; models with MLA have no V
    recr  u32 count(1), i32 pos, u32 n_seq_id(0), u32 s_trans(0), u32 n_layer,
          R rows, then S rows: i32 type, u64 row_size, the row

The file does not say which section kinds follow, nor whether a cell has an `ext` (0, 8 or 12
bytes: M-RoPE x and y, and the token id). `parse` finds out by trying each combination to the end
of the file; `state_check.check` knows them from the layout of a file that the decoder itself saved.

Cost: `parse` reads only headers, cells and tokens, at most once for each of 25 combinations: 2 to
5 ms for three tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from onebitd.core.errors import StateFileError
from onebitd.core.state_check import expect_cells, expect_tokens
from onebitd.core.state_cursor import Cursor, Source
from onebitd.core.state_layout import KV_NAMES, Layout, StateFile, section_names
from onebitd.core.state_sections import (
    MAX_CELLS,
    Trial,
    read_kv,
    read_recr,
    read_tokens,
    read_version,
    skip_checkpoints,
)

_KINDS = (("kv",), ("kv", "kv"), ("kv", "recr"), ("kv", "kv", "recr"), ("recr",))


def parse(buf: Source) -> StateFile:
    """Read a whole state file whose kind is not known, and say where everything is.

    Returns:
        the one reading that reaches exactly the end of the file.

    Raises:
        StateFileError: no reading does, and then the message tells how far the best one came, or
            several do. Never anything else, whatever the bytes.
    """
    header = Cursor(buf)
    version = read_version(header)
    packed, tokens = read_tokens(header, MAX_CELLS)
    found: dict[Layout, StateFile] = {}
    stuck: list[tuple[int, str]] = []
    for kinds, ext_bytes, has_v in product(_KINDS, (0, 8, 12), (True, False)):
        cursor = Cursor(buf, header.at)
        try:
            sections = tuple(
                read_kv(cursor, name, Trial(version, ext_bytes, has_v))
                if name in KV_NAMES
                else read_recr(cursor, name, None)
                for name in section_names(kinds)
            )
            n_checkpoints = skip_checkpoints(cursor)
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
    expect_tokens(state.tokens, tokens)
    for section in state.sections:
        expect_cells(section.what, section.shape, section.cells, state.tokens, len(tokens))
    return state.layout
