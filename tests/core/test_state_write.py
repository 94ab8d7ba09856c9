"""Writing state files: what was read comes out again byte for byte, a new one is a decoder's own.

The property tests here draw files of every kind, and read, cut and spoil them.
"""

from __future__ import annotations

import mmap
import struct
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebitd.core.errors import StateFileError
from onebitd.core.state_cursor import Source
from onebitd.core.state_file import parse
from onebitd.core.state_layout import Channels, KvSection, Layout, RecrSection, Rows, StateFile
from onebitd.core.state_write import CHUNK_BYTES, rewrite, write_state
from tests.core.state_files import (
    BF16,
    BLOCKS,
    F16,
    F32,
    Q8_0,
    Appendix,
    Checkpoint,
    Kv,
    Recr,
    build,
)

WINDOW = 4
FLOATS = (F16, F32, BF16)


@dataclass(frozen=True)
class Described:
    """A state file as `build` makes it."""

    tokens: list[int]
    sections: list[Kv | Recr]
    version: int
    packed: bool = False
    appendix: Appendix | None = None

    @property
    def data(self) -> bytes:
        """The file."""
        return build(
            self.tokens, self.sections,
            version=self.version, packed=self.packed, appendix=self.appendix,
        )  # fmt: skip


@st.composite
def described(draw: st.DrawFn) -> Described:
    """Draw a state of any kind that a decoder writes, of a few tokens."""
    version = draw(st.sampled_from((2, 3, 4)))
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=3, max_size=9))
    ext_bytes = draw(st.sampled_from((0, 8 if version == 2 else 12)))
    v_trans = draw(st.integers(0, 1))
    has_v = draw(st.integers(0, 9)) > 0
    seq_id = draw(st.integers(0, 3))
    streams = draw(st.sampled_from((None, None, (len(tokens), 0), (0, len(tokens), 0))))

    def kv() -> Kv:
        return Kv(
            layers=draw(st.integers(1, 3)),
            k_type=draw(st.sampled_from(sorted(BLOCKS))),
            v_type=draw(st.sampled_from(FLOATS if v_trans else sorted(BLOCKS))),
            width=32 * draw(st.integers(1, 3)),
            v_trans=v_trans,
            ext_bytes=ext_bytes,
            n_rot=draw(st.sampled_from(((0, 0), (64, 32), (0, 128)))),
            has_v=has_v,
            seq_id=seq_id,
            streams=streams,
        )

    recr = Recr(states=draw(st.integers(1, 4)), s_width=draw(st.sampled_from((0, 20))))
    kinds = draw(st.sampled_from(("kv", "kv kv", "kv recr", "kv kv recr", "recr")))
    sections: list[Kv | Recr] = [kv() if kind == "kv" else recr for kind in kinds.split()]
    appendix = None
    if len(sections) > 1 and version == 4 and draw(st.booleans()):
        some = draw(st.lists(st.integers(1, len(tokens)), max_size=3))
        appendix = Appendix([Checkpoint(n, sections[1:], draft=b"abc") for n in some])
    return Described(tokens, sections, version, draw(st.booleans()), appendix)


def written(state: StateFile, source: bytes | mmap.mmap) -> bytes:
    """Return the file that `rewrite` makes."""
    out = bytearray()
    assert rewrite(out.extend, state, source) == len(out)
    return bytes(out)


@settings(max_examples=100, deadline=None)
@given(file=described())
def test_rewrite_any_state_is_byte_equal(file: Described) -> None:
    """Reading keeps all that the file says: written again it is the same, by layout or without."""
    data = file.data
    state = parse(data)
    assert written(state, data) == data
    assert parse(data, state.layout).layout == state.layout
    plain = written(replace(state, packed=False), data)
    assert plain == replace(file, packed=False).data
    assert state.tokens.tolist() == file.tokens


@settings(max_examples=60, deadline=None)
@given(file=described(), draw=st.data())
def test_parse_cut_anywhere_is_refused_by_its_layout(file: Described, draw: st.DataObject) -> None:
    """No beginning of a file is its decoder's, but one that lacks the whole appendix."""
    data = file.data
    state = parse(data)
    blocks = [block for section in state.sections for block in section.blocks]
    borders = {12, *(block.offset for block in blocks), *(b.offset + b.n_bytes for b in blocks)}
    borders |= {at + step for at in borders for step in (-12, -1, 1)} | {len(data) - 1}
    borders.add(draw.draw(st.integers(0, len(data) - 1)))
    for length in sorted(borders - {state.sections_end}):
        if length < len(data):
            with pytest.raises(StateFileError):
                parse(data[:length], state.layout)
    assert parse(data[: state.sections_end], state.layout).n_checkpoints is None


DAMAGE_WORDS = (0, 1, -1, 2, 2**31 - 1, -(2**31))


def damaged(data: bytes, draw: st.DataObject) -> bytes:
    """Return the file with bytes flipped, put in, taken out, and fields that lie."""
    spoiled = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 4))):
        at = draw.draw(st.integers(0, min(len(spoiled), 400)) | st.integers(0, len(spoiled)))
        match draw.draw(st.sampled_from(("field", "field", "flip", "insert", "delete"))):
            case "field":
                at -= at % 4
                spoiled[at : at + 4] = struct.pack("<i", draw.draw(st.sampled_from(DAMAGE_WORDS)))
            case "flip":
                spoiled[at : at + 1] = bytes([draw.draw(st.integers(0, 255))])
            case "insert":
                spoiled[at:at] = draw.draw(st.binary(min_size=1, max_size=16))
            case "delete":
                del spoiled[at : at + draw.draw(st.integers(1, 16))]
    return bytes(spoiled)


def parse_within(source: Source, most_bytes: int, like: Layout | None = None) -> StateFile | None:
    """Return the reading, None where it is refused; fail if that took more memory."""
    tracemalloc.start()
    try:
        return parse(source, like)
    except StateFileError:
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < most_bytes


@settings(max_examples=120, deadline=None)
@given(file=described(), draw=st.data())
def test_parse_damaged_file_is_refused_or_read_whole(file: Described, draw: st.DataObject) -> None:
    """Whatever is in a file: StateFileError, or a reading that accounts for every byte of it."""
    good = file.data
    layout = parse(good).layout
    spoiled = damaged(good, draw)
    for like in (None, layout):
        state = parse_within(spoiled, 4 << 20, like)
        assert state is None or written(state, spoiled) == spoiled


@given(junk=st.binary(max_size=300))
def test_parse_random_tail_raises_nothing_but_state_file_error(junk: bytes) -> None:
    """Random bytes after a good header are refused, or happen to be a small state."""
    try:
        parse(build([1, 2, 3], []) + junk)
    except StateFileError:
        return


class Endless:
    """A file that claims to be huge: a start, then zeros, of which nothing is held."""

    def __init__(self, start: bytes, size: int) -> None:
        self._start = start
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: slice, /) -> bytes:
        start, stop, _ = index.indices(self._size)
        return self._start[start:stop].ljust(stop - start, b"\0")


KV = Kv(layers=2, streams=(3, 0))
LYING = [
    build([1, 2, 3], [Kv(count=count)], version=version, packed=packed)
    for count in (2**24, 2**31 - 1, 2**32 - 1)
    for version, packed in ((2, False), (4, True))
] + [
    build([1, 2, 3], [replace(Kv(), n_stream=256)]),
    build([1, 2, 3], [replace(Kv(), n_stream=2**31 - 1)]),
    build([1, 2, 3], [replace(Kv(), layer_count=1024)]),
    build([1, 2, 3], [replace(Kv(), layer_count=2**31 - 1)]),
    build([1, 2, 3], [Kv(), Recr(layers=2**31 - 1)]),
    build([1, 2, 3], [Kv(), Recr(count=2**31 - 1)]),
    build([1, 2, 3], [Kv(), Kv()], appendix=Appendix(count=4096)),
    struct.pack("<III", 0x67677371, 2, 2**32 - 1),
    # As many streams and layers without a byte of data as can be.
    struct.pack("<IIIi", 0x67677371, 2, 1, 5)
    + struct.pack("<I", 256)
    + (struct.pack("<IiIiII", 1, 0, 1, 0, 0, 1024) + bytes(12 * 2048)) * 256,
]


@pytest.mark.parametrize("start", LYING, ids=range(len(LYING)))
def test_parse_lying_counts_allocates_little(start: bytes) -> None:
    """What a field claims is never allocated: only what was found in the file."""
    for source in (start, Endless(start, 1 << 36)):
        assert parse_within(source, 4 << 20) is None


def test_parse_and_rewrite_through_a_map_hold_no_data(tmp_path: Path) -> None:
    """Memory goes with tokens and cells, not with the rows: 48 MB take less than 4."""
    path = tmp_path / "state"
    sparse = build([1, 2, 3], [Kv(layers=1, width=1 << 23, has_v=False, k_type=Q8_0)])
    path.write_bytes(sparse)
    size = len(sparse)
    del sparse
    longest = 0
    total = 0

    def write(piece: bytes | bytearray | memoryview) -> None:
        nonlocal longest, total
        longest, total = max(longest, len(piece)), total + len(piece)

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        tracemalloc.start()
        try:
            state = parse(view)
            assert rewrite(write, state, view) == size
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert (total, longest) == (size, CHUNK_BYTES)
    assert peak < 4 << 20


def test_parse_many_tokens_and_cells_stay_near_their_own_size() -> None:
    """A long prompt costs a few times what its tokens and cells take, however often it is tried."""
    n_tokens = 100_000
    pos = np.arange(n_tokens, dtype="<i4")
    cells = np.column_stack((pos, np.ones_like(pos), np.zeros_like(pos))).astype("<i4")
    head = struct.pack("<III", 0x67677371, 2, n_tokens) + pos.tobytes()
    data = head + struct.pack("<II", 1, n_tokens) + cells.tobytes()
    data += struct.pack("<II", 0, 1) + (struct.pack("<iQ", 1, 2) + bytes(2 * n_tokens)) * 2
    state = parse_within(data, (4 << 20) + 3 * (pos.nbytes + cells.nbytes))
    assert state is not None
    assert state.sections[0].cells.pos.tolist() == list(range(n_tokens))


# --- several streams, and files that need a layout ----------------------------------------------


def test_parse_several_streams_one_section_each() -> None:
    """A decoder with several slots saves a stream a slot; the saved slot's alone has cells."""
    data = build([5, 6, 7], [replace(KV, seq_id=1, streams=(0, 3))])
    state = parse(data)
    empty, full = state.sections
    assert (empty.stream, full.stream, state.n_stream) == (0, 1, 2)
    assert (empty.what, full.what) == ("attention", "attention")
    assert (len(empty.cells.pos), empty.blocks) == (0, ())
    assert empty.shape == full.shape
    assert full.cells.seq_id.tolist() == [1, 1, 1]
    assert [block.what for block in full.blocks][:2] == ["stream 1 layer 0 K", "stream 1 layer 1 K"]
    assert state.layout == parse(build([5, 6, 7], [replace(KV, streams=None)])).layout


def test_parse_streams_of_different_shape_are_refused() -> None:
    """The streams of a section are of one cache."""
    one = build([5, 6, 7], [Kv()])[24:]
    other = build([5, 6, 7], [Kv(width=64)])[24:]
    both = build([5, 6, 7], []) + struct.pack("<I", 2)
    assert parse(both + one[4:] + one[4:]).n_stream == 2
    with pytest.raises(StateFileError, match="stream 1 is not shaped as the ones before it"):
        parse(both + one[4:] + other[4:])


def test_parse_without_any_cells_is_refused() -> None:
    """Nothing tells the shape of a cache that is empty in every stream."""
    with pytest.raises(StateFileError, match="section attention: no cells"):
        parse(build([5, 6, 7], [Kv(streams=(0, 0))]))


def test_parse_block_places_are_those_of_the_section() -> None:
    """A block says which of K, V, R and S it is, and of which layer or row."""
    kv, recr = parse(build([5, 6, 7], [Kv(layers=2), Recr(states=2)])).sections
    places = [(block.part, block.layer) for block in (*kv.blocks, *recr.blocks)]
    assert places == [
        ("K", 0), ("K", 1), ("V", 0), ("V", 1), ("R", 0), ("R", 1), ("S", 0), ("S", 1),
    ]  # fmt: skip
    assert [block.what for block in recr.blocks][1:3] == [
        "recurrent state, R 1", "recurrent state, S 0",
    ]  # fmt: skip


def test_parse_ambiguous_file_is_read_by_its_layout() -> None:
    """Where several readings reach the end, the decoder's layout tells which one is meant."""
    latent = Kv(layers=1, ext_bytes=12, has_v=False, seq_id=0)
    layout = parse(build([1, 2, 3], [latent], version=4)).layout
    data = build([1], [latent], version=4)
    with pytest.raises(StateFileError, match="can be read in 2 ways"):
        parse(data)
    assert parse(data, layout).layout == layout


def test_parse_file_of_another_layout_is_refused_by_name() -> None:
    """With a layout the sentence says what differs, not that nothing is known."""
    layout = parse(build([1, 2, 3], [Kv()])).layout
    with pytest.raises(StateFileError, match=r"^layer 0 K: row size 128, the decoder has 64$"):
        parse(build([1, 2, 3], [Kv(width=64)]), layout)
    with pytest.raises(StateFileError, match=r"^the file: state version 3, the decoder has 2$"):
        parse(build([1, 2, 3], [Kv()], version=3), layout)


PLAIN = build([5, 6, 7], [Kv()])
IMPOSSIBLE = [
    (build([5, 6, 7], [Kv(v_trans=2)]), "v_trans 2 or 2 layers cannot be"),
    (PLAIN.replace(struct.pack("<iQ", F16, 64), struct.pack("<iQ", 256, 64)), "type 256 cannot be"),
    (PLAIN.replace(struct.pack("<iQ", F16, 64), struct.pack("<iQ", -1, 64)), "type -1 cannot be"),
    (build([5, 6, 7], [Kv(), Recr(s_trans=1)]), "n_seq_id 0 and s_trans 1 must be 0"),
    (build([-1, 1, 3, 5, 6, 7, 1], [Kv(pos=range(3))]), "text without media"),
    (build([5, 6, 7], [Kv(streams=(0,) * 256 + (3,))]), "257 streams, 1 to 256 can be"),
]


@pytest.mark.parametrize(("data", "sentence"), IMPOSSIBLE)
def test_parse_field_that_no_decoder_writes_is_refused(data: bytes, sentence: str) -> None:
    """What the reader does not keep must be what every decoder writes, or it would be lost."""
    with pytest.raises(StateFileError) as caught:
        parse(data)
    assert sentence in str(caught.value)


def test_parse_odd_number_of_recurrent_rows_is_refused() -> None:
    """Each layer with a state has an R row and an S row."""
    data = build([1, 2, 3], [Recr(states=2)])
    with pytest.raises(StateFileError, match="3 rows, but each R row has an S row"):
        parse(data[: -12 - 80])


# --- a new state --------------------------------------------------------------------------------


def tensors(state: StateFile, data: bytes) -> Iterator[bytes]:
    """Yield the data of each tensor."""
    for section in state.sections:
        for block in section.blocks:
            yield data[block.offset : block.offset + block.n_bytes]


@settings(max_examples=60, deadline=None)
@given(file=described())
def test_write_state_is_the_file_that_the_decoder_saves(file: Described) -> None:
    """From layout, tokens and data comes the file of slot 0 of such a decoder, listed plainly."""
    slot_0 = [
        replace(part, seq_id=0, streams=None) if isinstance(part, Kv) else part
        for part in file.sections
    ]
    wanted = replace(file, sections=slot_0, packed=False, appendix=None).data
    state = parse(wanted)
    out = bytearray()
    written_bytes = write_state(out.extend, state.layout, file.tokens, tensors(state, wanted))
    assert out == wanted
    assert written_bytes == len(out) == state.layout.bytes_for(len(file.tokens))


@pytest.mark.parametrize("swa_cells", [1, 4, 40, 99])
def test_write_state_sliding_window_holds_the_last_positions(swa_cells: int) -> None:
    """A sliding window's section may be a tail; full attention is whole."""
    tokens = list(range(100, 140))
    full = Kv(ext_bytes=12, seq_id=0)
    sections = [full, replace(full, layers=3, width=64, last=swa_cells)]
    wanted = build(tokens, sections, version=3)
    state = parse(wanted)
    out = bytearray()
    write_state(out.extend, state.layout, tokens, tensors(state, wanted), swa_cells=swa_cells)
    assert out == wanted
    assert parse(out).sections[1].cells.pos.tolist() == list(range(max(0, 40 - swa_cells), 40))


def test_write_state_takes_views_of_arrays() -> None:
    """The data may come as arrays' own memory, also where there is none."""
    layout = Layout(2, False, (RecrSection(4, (Rows(F32, 8), Rows(F32, 0))),))
    rows = [np.ones((1, 2), np.float32).data, np.ones((1, 0), np.float32).data]
    out = bytearray()
    write_state(out.extend, layout, np.array([4, 5]).tolist(), rows)
    assert parse(out).layout == layout
    assert out.endswith(np.ones(2, "<f4").tobytes() + Rows(F32, 0).header())


def test_write_state_asks_for_one_tensor_at_a_time() -> None:
    """A generator holds one tensor: each is asked for when the one before was written."""
    layout = parse(build([1, 2, 3], [Kv()])).layout
    out = bytearray()
    sizes: list[int] = []

    def data() -> Iterator[bytes]:
        for _ in range(4):
            sizes.append(len(out))
            yield bytes(64 * 3)

    write_state(out.extend, layout, [1, 2, 3], data())
    assert np.diff(sizes).tolist() == [12 + 64 * 3] * 3


LAYOUT = Layout(
    2, False, (KvSection(0, False, None, None, (Rows(F16, 8),) * 2, (Rows(F16, 4),) * 2),)
)
HYBRID = replace(LAYOUT, sections=(*LAYOUT.sections, RecrSection(3, (Rows(F32, 4),) * 2)))
GOOD = [bytes(24), bytes(24), bytes(12), bytes(12)]


@pytest.mark.parametrize(
    ("layout", "tokens", "data", "sentence"),
    [
        (LAYOUT, [1, 2, 3], GOOD[:3], "layer 1 V: the data ends before it"),
        (LAYOUT, [1, 2, 3], [*GOOD, b""], "there is more data than the layout has tensors"),
        (
            LAYOUT,
            [1, 2, 3],
            [GOOD[0], bytes(23), *GOOD[2:]],
            "layer 1 K: 23 bytes of data, 24 expected",
        ),
        (HYBRID, [1, 2, 3], [*GOOD, bytes(4), bytes(8)], "recurrent state, S 0: 8 bytes of data"),
        (LAYOUT, [], GOOD, "there are no tokens"),
        (LAYOUT, [1, -2, 3], GOOD, "token 1 is -2, which is no id"),
        (LAYOUT, [1, 2, 2**31], GOOD, "token 2 is 2147483648, which is no id"),
        (LAYOUT, [1, 2, 2**70], GOOD, "which is no id"),
        (replace(LAYOUT, version=5), [1, 2, 3], GOOD, "state version 5 is not known"),
        (
            replace(LAYOUT, version=4),
            [1, 2, 3],
            GOOD,
            "section attention: n_rot is part of version",
        ),
    ],
)
def test_write_state_what_cannot_be_written_is_refused_by_name(
    layout: Layout, tokens: Sequence[int], data: list[bytes], sentence: str
) -> None:
    """A provider's own mistake is told before a decoder stumbles over it."""
    with pytest.raises(StateFileError) as caught:
        write_state(bytearray().extend, layout, tokens, data)
    assert sentence in str(caught.value)


def test_write_state_window_of_no_cells_is_refused() -> None:
    """A sliding window holds one position at least."""
    with pytest.raises(StateFileError, match="a sliding window of 0 cells cannot be"):
        write_state(bytearray().extend, LAYOUT, [1, 2, 3], GOOD, swa_cells=0)


def test_write_state_transposed_values_are_channels() -> None:
    """Without flash attention each channel of V is a row of N elements."""
    section = KvSection(0, True, None, None, (Rows(F16, 4),), (Channels(F16, 2, 2),))
    out = bytearray()
    write_state(out.extend, Layout(2, False, (section,)), [8, 9], [bytes(8), b"aAbBcCdD"])
    assert out.endswith(struct.pack("<iII", 1, 2, 2) + b"aAbBcCdD")
