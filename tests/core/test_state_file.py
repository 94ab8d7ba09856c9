"""The state file: reading every kind, learning the layout, refusing what would hurt the decoder."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebitd.core.errors import StateFileError
from onebitd.core.state_check import CHUNK_BYTES, check
from onebitd.core.state_file import learn_layout, parse
from onebitd.core.state_layout import Channels, KvSection, Layout, RecrSection, Rows
from tests.core.state_files import (
    BF16,
    F16,
    F32,
    Q8_0,
    Appendix,
    Checkpoint,
    Kv,
    Recr,
    build,
    row_bytes,
)

PROBE = [1, 2, 3]
PROMPT = list(range(100, 140))
KV = Kv()
SWA = Kv(layers=3, width=64)
RECR = Recr()
WINDOW = 16


@dataclass(frozen=True)
class Kind:
    """One kind of decoder: what its state files hold."""

    name: str
    sections: Sequence[Kv | Recr]
    version: int = 2
    packed: bool = False

    def file(
        self,
        tokens: Sequence[int] = PROMPT,
        sections: Sequence[Kv | Recr] | None = None,
        *,
        packed: bool | None = None,
        appendix: Appendix | None = None,
    ) -> bytes:
        """Return a good state file of this decoder, or one with other sections."""
        parts = self.sections if sections is None else sections
        if packed is None:
            packed = self.packed
        return build(tokens, parts, version=self.version, packed=packed, appendix=appendix)

    @property
    def layout(self) -> Layout:
        """What the daemon learns from a three-token state."""
        return learn_layout(self.file(PROBE), PROBE)


PLAIN = Kind("plain", [KV])
SLIDING = Kind("sliding", [KV, SWA], version=3)
HYBRID = Kind("hybrid", [KV, RECR])
HYBRID_V4 = Kind("hybrid, version 4", [KV, RECR], version=4, packed=True)
SLIDING_V4 = Kind("sliding, version 4", [KV, SWA], version=4, packed=True)
KINDS = [
    PLAIN,
    SLIDING,
    HYBRID,
    HYBRID_V4,
    SLIDING_V4,
    Kind("packed", [KV], packed=True),
    Kind("transposed", [replace(KV, v_trans=1)]),
    Kind("q8_0", [replace(KV, k_type=Q8_0, v_type=Q8_0, n_rot=(64, 32))], version=4),
    Kind("f32 and bf16", [replace(KV, k_type=F32, v_type=BF16)]),
    Kind("q4_0 and q5_1", [replace(KV, k_type=2, v_type=7)]),
    Kind("q4_1 and iq4_nl", [replace(KV, k_type=3, v_type=20)]),
    Kind("q5_0 and f16", [replace(KV, k_type=6)]),
    Kind("MLA", [replace(KV, has_v=False)]),
    Kind("M-RoPE, version 2", [replace(KV, ext_bytes=8)]),
    Kind("M-RoPE, version 4", [replace(KV, ext_bytes=12)], version=4),
    Kind("hybrid with M-RoPE", [replace(KV, ext_bytes=12), RECR], version=3),
    Kind("sliding hybrid", [KV, SWA, RECR]),
    Kind("recurrent", [RECR]),
    Kind("recurrent, S rows without bytes", [replace(RECR, s_width=0)]),
]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def refusal(
    kind: Kind, damaged: bytes, tokens: Sequence[int] = PROMPT, window: int | None = None
) -> str:
    """Return why a file is refused; fail if it is not, or if the good one is."""
    layout = kind.layout
    check(kind.file(), layout, PROMPT)
    with pytest.raises(StateFileError) as caught:
        check(damaged, layout, tokens, swa_window=window)
    return str(caught.value)


@each_kind
def test_learn_layout_three_tokens_describes_what_was_built(kind: Kind) -> None:
    """A three-token state tells version, sections, types, row sizes, rotation and extensions."""
    layout = kind.layout

    assert (layout.version, layout.packed_tokens) == (kind.version, kind.packed)
    assert len(layout.sections) == len(kind.sections)
    for found, built in zip(layout.sections, kind.sections, strict=True):
        if isinstance(built, Recr):
            assert isinstance(found, RecrSection)
            sizes = [built.r_width * 4] * built.states + [built.s_width * 4] * built.states
            assert found == RecrSection(built.layers, tuple(Rows(F32, size) for size in sizes))
            continue
        assert isinstance(found, KvSection)
        row = Rows(built.k_type, row_bytes(built.k_type, built.width))
        assert found.k == (row,) * built.layers
        assert len(found.v) == (built.layers if built.has_v else 0)
        assert (found.ext_bytes, found.v_trans) == (built.ext_bytes, bool(built.v_trans))
        assert (found.n_rot_k, found.n_rot_v) == (built.n_rot if kind.version >= 4 else (None,) * 2)
        if built.v_trans:
            assert found.v[0] == Channels(F16, 2, built.width)


@each_kind
def test_check_good_long_file_passes_and_has_the_estimated_size(kind: Kind) -> None:
    """A whole state of the same decoder passes, packed or plain, and bytes_for knows its size."""
    layout = kind.layout
    plain = kind.file(packed=False)

    check(kind.file(), layout, PROMPT, swa_window=WINDOW)
    check(plain, layout, PROMPT)
    assert layout.bytes_for(len(PROMPT)) == len(plain)


def _metadata(whole: bytes) -> list[range]:
    """Return the byte ranges of a file that are not tensor data."""
    blocks = [block for part in parse(whole).sections for block in part.blocks]
    ends = [0, *(block.offset + block.n_bytes for block in blocks)]
    starts = [*(block.offset for block in blocks), len(whole)]
    return [range(low, high) for low, high in zip(ends, starts, strict=True) if high > low]


def _lengths(whole: bytes) -> list[int]:
    """Return where to cut: anywhere outside the data, the last bytes, now and then in the data."""
    cuts = {at for part in _metadata(whole) for at in part} | set(range(0, len(whole), 61))
    return sorted(cuts | {len(whole) - 1, len(whole) - 2})


@each_kind
def test_check_truncated_anywhere_is_refused(kind: Kind) -> None:
    """No proper beginning of a good file passes: one byte short aborts a real decoder."""
    whole, layout = kind.file(PROMPT[:5]), kind.layout
    check(whole, layout, PROMPT[:5])
    for length in _lengths(whole):
        with pytest.raises(StateFileError):
            check(whole[:length], layout, PROMPT[:5])


@each_kind
def test_parse_truncated_anywhere_is_refused_or_another_whole_state(kind: Kind) -> None:
    """A cut file is a StateFileError, or what is left is by itself a state of another kind."""
    whole = kind.file(PROBE)
    shape = parse(whole).layout
    for length in _lengths(whole):
        try:
            assert parse(whole[:length]).layout != shape
        except StateFileError:
            continue


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_check_flipped_metadata_byte_is_refused_or_means_the_same(data: st.DataObject) -> None:
    """Whatever happens to the bytes around the data: StateFileError, or a file of equal shape."""
    kind = data.draw(st.sampled_from(KINDS))
    whole, layout = bytearray(kind.file(PROMPT[:4])), kind.layout
    places = [at for part in _metadata(bytes(whole)) for at in part]
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.sampled_from(places))] = data.draw(st.integers(0, 255))
    try:
        check(whole, layout, PROMPT[:4])
    except StateFileError:
        return
    state = parse(whole)
    assert state.layout == layout
    assert state.tokens.tolist() == PROMPT[:4]


HEADER_DAMAGES = [
    (b"", "the file ends at byte 0, 4 bytes before the end of the header"),
    (b"GGUF" + bytes(60), "not a state file: it does not start with 71 73 67 67 (qsgg)"),
    (struct.pack("<II", 0x67677371, 9), "state version 9 is not known (2, 3 and 4 are)"),
    (PLAIN.file()[:20], "the file ends at byte 20, 152 bytes before the end of the list of 40"),
    (Kind("", [KV], version=3).file(), "the file: state version 3, the decoder has 2"),
    (PLAIN.file(packed=True), "the token list is packed; the decoder's build reads a plain one"),
    (PLAIN.file([*PROMPT, 5]), "holds 41 tokens, 40 were handed over"),
    (PLAIN.file(PROMPT[:-1]), "holds 39 tokens, 40 were handed over"),
    (PLAIN.file([]), "holds 0 tokens, 40 were handed over"),
    (PLAIN.file([*PROMPT[:-1], 77]), "token 39 is not the one that was handed over"),
    (PLAIN.file() + b"\0" * 16, "16 bytes too many: the state ends at byte 10956, the file at"),
    (
        struct.pack("<III", 0x67677371, 2, 0x7FFFFFFF) + bytes(100),
        "the token list takes 2147483647 words, too many for 40 tokens",
    ),
    (
        build([-1, 2, 36, *PROMPT[3:], 0], [KV]),
        "the packed token list is cut, or not version 1",
    ),
    (
        build([-1, 1, 9, *PROMPT[3:], 0], [KV]),
        "the packed token list says 9 ids in 41 words",
    ),
]


@pytest.mark.parametrize(("damaged", "sentence"), HEADER_DAMAGES)
def test_check_bad_header_or_tokens_is_refused_by_name(damaged: bytes, sentence: str) -> None:
    """Magic, version, token list and length are each refused with what was found."""
    assert sentence in refusal(PLAIN, damaged)


SECTION_DAMAGES = [
    (replace(KV, n_stream=2), "section attention: 2 streams, a decoder with one slot has 1"),
    (replace(KV, n_stream=0), "section attention: 0 streams"),
    (replace(KV, count=41), "section attention: 41 cells, 40 expected"),
    (replace(KV, count=0x7FFFFFFF), "section attention: 2147483647 cells, 40 expected"),
    (replace(KV, count=0xFFFFFFFF), "section attention: 4294967295 cells, 40 expected"),
    (replace(KV, pos=[]), "section attention: 0 cells, 40 expected"),
    (replace(KV, last=39), "section attention: 39 cells, 40 expected"),
    (replace(KV, n_seq_id=0), "section attention, cell 0: n_seq_id 0, not 1"),
    (replace(KV, n_seq_id=2), "section attention, cell 0: n_seq_id 2, not 1"),
    (replace(KV, n_seq_id=0xFFFFFFFF), "section attention, cell 0: n_seq_id 4294967295, not 1"),
    (replace(KV, pos=range(5, 45)), "section attention, cell 0: position 5, 0 expected"),
    (replace(KV, pos=[-1, *range(1, 40)]), "cell 0: position -1, 0 expected"),
    (replace(KV, pos=[-5] * 40), "cell 0: position -5, 0 expected"),
    (replace(KV, pos=[0] * 40), "cell 1: position 0, 1 expected"),
    (replace(KV, pos=[*range(39), 0x7FFFFFFF]), "cell 39: position 2147483647, 39 expected"),
    (replace(KV, pos=[*range(39), 38]), "cell 39: position 38, 39 expected"),
    (replace(KV, pos=[*range(39), 40]), "cell 39: position 40, 39 expected"),
    (replace(KV, pos=[*range(38), 39, 38]), "cell 38: position 39, 38 expected"),
    (replace(KV, pos=range(39, -1, -1)), "cell 0: position 39, 0 expected"),
    (replace(KV, v_trans=1), "section attention: v_trans 1, the decoder has 0"),
    (replace(KV, layer_count=3), "section attention: layers 3, the decoder has 2"),
    (replace(KV, layers=1), "section attention: layers 1, the decoder has 2"),
    (replace(KV, k_type=Q8_0), "layer 0 K: type q8_0, the decoder has f16"),
    (replace(KV, v_type=F32), "layer 0 V: type f32, the decoder has f16"),
    (replace(KV, k_type=F16, width=64), "layer 0 K: row size 128, the decoder has 64"),
    (replace(KV, row_extra=2), "layer 0 K: row size 66, the decoder has 64"),
    (replace(KV, has_v=False), "before the end of the header of layer 0 V"),
]


@pytest.mark.parametrize(("section", "sentence"), SECTION_DAMAGES)
def test_check_bad_attention_section_is_refused_by_name(section: Kv, sentence: str) -> None:
    """Each field of an attention section is refused in terms of what the decoder has."""
    assert sentence in refusal(PLAIN, PLAIN.file(sections=[section]))


RECR_DAMAGES = [
    (replace(RECR, count=0, cells=0), "recurrent state: 0 cells, there must be 1"),
    (replace(RECR, count=2, cells=2), "recurrent state: 2 cells, there must be 1"),
    (replace(RECR, count=0x7FFFFFFF), "recurrent state: 2147483647 cells, there must be 1"),
    (replace(RECR, pos=38), "recurrent state: position 38, 39 expected"),
    (replace(RECR, pos=-1), "recurrent state: position -1, 39 expected"),
    (replace(RECR, pos=0x7FFFFFFF), "recurrent state: position 2147483647, 39 expected"),
    (replace(RECR, n_seq_id=1), "recurrent state: n_seq_id 1 and s_trans 0 must be 0"),
    (replace(RECR, s_trans=1), "recurrent state: n_seq_id 0 and s_trans 1 must be 0"),
    (replace(RECR, layers=5), "recurrent state: layers 5, the decoder has 4"),
    (replace(RECR, s_width=24), "recurrent state, S 0: row size 96, the decoder has 80"),
    (replace(RECR, type=F16), "recurrent state, R 0: type f16, the decoder has f32"),
    (replace(RECR, states=1), "recurrent state, R 1: row size 80, the decoder has 48"),
]


@pytest.mark.parametrize(("section", "sentence"), RECR_DAMAGES)
def test_check_bad_recurrent_state_is_refused_by_name(section: Recr, sentence: str) -> None:
    """An empty, doubled or misplaced recurrent state never reaches the decoder."""
    assert sentence in refusal(HYBRID, HYBRID.file(sections=[KV, section]))


def test_check_hybrid_with_empty_attention_is_refused() -> None:
    """A hybrid state without attention cells would answer silently wrong."""
    damaged = HYBRID.file(sections=[replace(KV, pos=[]), RECR])
    assert "section attention: 0 cells, 40 expected" in refusal(HYBRID, damaged)


def test_check_other_rotation_is_refused_where_the_file_records_it() -> None:
    """Quantized rows are stored rotated; version 4 says by how much."""
    section = replace(KV, k_type=Q8_0, v_type=Q8_0, n_rot=(64, 32))
    kind = Kind("", [section], version=4)
    damaged = kind.file(sections=[replace(section, n_rot=(64, 0))])
    assert "section attention: n_rot_v 0, the decoder has 32" in refusal(kind, damaged)


@pytest.mark.parametrize(("ext_bytes", "version"), [(8, 2), (12, 4)])
@pytest.mark.parametrize(("shift", "sentence"), [((3, 0), "x 3"), ((0, -1), "y -1")])
def test_check_other_two_dimensional_position_is_refused(
    ext_bytes: int, version: int, shift: tuple[int, int], sentence: str
) -> None:
    """A text cell has x and y equal to its position."""
    section = replace(KV, ext_bytes=ext_bytes)
    kind = Kind("", [section], version=version)
    damaged = kind.file(sections=[replace(section, ext_shift=shift)])
    assert f"section attention, cell 0: {sentence}, 0 expected" in refusal(kind, damaged)


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        ((F16, 2, 16), "layer 0 V: n_embd_v_gqa 16, the decoder has 32"),
        ((F16, 4, 32), "layer 0 V: element size 4, the decoder has 2"),
        ((BF16, 2, 32), "layer 0 V: type bf16, the decoder has f16"),
    ],
)
def test_check_bad_transposed_header_is_refused_by_name(
    header: tuple[int, int, int], sentence: str
) -> None:
    """Each field of a transposed V's header must be the decoder's."""
    kind = Kind("", [replace(KV, v_trans=1)])
    good = struct.pack("<iII", F16, 2, 32)
    damaged = kind.file().replace(good, struct.pack("<iII", *header))
    assert refusal(kind, damaged) == sentence


def test_check_other_token_in_a_cell_is_refused() -> None:
    """A 12-byte extension repeats the token id of its cell."""
    kind = Kind("", [replace(KV, ext_bytes=12)], version=4)
    whole = bytearray(kind.file())
    at = whole.index(struct.pack("<iIiiii", 9, 1, 9, 9, PROMPT[9], 7)) + 16
    struct.pack_into("<i", whole, at, 1)
    sentence = "section attention, cell 9: not the token that was handed over"
    assert sentence in refusal(kind, bytes(whole))


@pytest.mark.parametrize("cells", [WINDOW, WINDOW + 1, 40])
def test_check_sliding_tail_of_a_window_or_more_passes(cells: int) -> None:
    """llama-server saves the last window of a sliding cache; more is fine too."""
    file = SLIDING.file(sections=[KV, replace(SWA, last=cells)])
    check(file, SLIDING.layout, PROMPT, swa_window=WINDOW)


@pytest.mark.parametrize("start", [24, 25, 30, 39])
@pytest.mark.parametrize("ext_bytes", [0, 12])
def test_check_sliding_tail_in_ring_order_passes(start: int, ext_bytes: int) -> None:
    """Without --swa-full the cache is a ring, which a save writes from its first place on."""
    swa = replace(SWA, ext_bytes=ext_bytes)
    kind = Kind("", [replace(KV, ext_bytes=ext_bytes), swa], version=3)
    ring = replace(swa, pos=[*range(start, 40), *range(24, start)])
    check(kind.file(sections=[kind.sections[0], ring]), kind.layout, PROMPT, swa_window=WINDOW)


@pytest.mark.parametrize(
    ("positions", "sentence"),
    [
        ([*range(30, 40), *range(25, 30), 23], "cell 10: position 25, 24 expected"),
        ([*range(39, 23, -1)], "cell 1: position 38, 24 expected"),
        ([40, *range(24, 39)], "cell 0: position 40, 24 expected"),
    ],
)
def test_check_sliding_tail_in_no_ring_order_is_refused(
    positions: list[int], sentence: str
) -> None:
    """A ring has one seam; anything else was not written by a cache."""
    damaged = SLIDING.file(sections=[KV, replace(SWA, pos=positions)])
    assert f"section sliding window, {sentence}" in refusal(SLIDING, damaged, window=WINDOW)


def test_check_attention_in_ring_order_is_refused() -> None:
    """Full attention holds its cells in order."""
    damaged = PLAIN.file(sections=[replace(KV, pos=[*range(20, 40), *range(20)])])
    assert "section attention, cell 0: position 20, 0 expected" in refusal(PLAIN, damaged)


def test_check_sliding_tail_shorter_than_the_window_is_refused() -> None:
    """One cell less than the window attends to nothing where the model saw a token."""
    damaged = SLIDING.file(sections=[KV, replace(SWA, last=WINDOW - 1)])
    sentence = "section sliding window: 15 cells, 16 to 40 expected"
    assert sentence in refusal(SLIDING, damaged, window=WINDOW)


def test_check_sliding_tail_of_a_short_prompt_must_be_whole() -> None:
    """A prompt shorter than the window has every cell in it."""
    tokens = PROMPT[:10]
    damaged = SLIDING.file(tokens, sections=[KV, replace(SWA, last=9)])
    sentence = "section sliding window: 9 cells, 10 expected"
    assert sentence in refusal(SLIDING, damaged, tokens, window=WINDOW)


def test_check_sliding_tail_without_a_known_window_must_be_whole() -> None:
    """Without a window to go by, only the whole section is safe."""
    damaged = SLIDING.file(sections=[KV, replace(SWA, last=39)])
    assert "section sliding window: 39 cells, 40 expected" in refusal(SLIDING, damaged)


def test_check_sliding_tail_that_ends_early_is_refused() -> None:
    """The tail must end at the last position that was handed over."""
    damaged = SLIDING.file(sections=[KV, replace(SWA, pos=range(16, 39))])
    sentence = "section sliding window, cell 0: position 16, 17 expected"
    assert sentence in refusal(SLIDING, damaged, window=WINDOW)


def test_check_window_is_not_asked_of_full_attention() -> None:
    """The full-attention section of a sliding model holds every cell, window or not."""
    damaged = SLIDING.file(sections=[replace(KV, last=WINDOW), SWA])
    sentence = "section attention: 16 cells, 40 expected"
    assert sentence in refusal(SLIDING, damaged, window=WINDOW)


NAN = {F32: b"\0\0\xc0\x7f", F16: b"\0\x7e", BF16: b"\xc0\x7f"}
INF = {F32: b"\0\0\x80\xff", F16: b"\0\xfc", BF16: b"\x80\xff"}


@pytest.mark.parametrize("bits", [NAN, INF], ids=["nan", "inf"])
@pytest.mark.parametrize("type_", [F32, F16, BF16])
@pytest.mark.parametrize("v_trans", [0, 1])
def test_check_one_value_that_is_not_finite_is_refused_where_it_is(
    bits: dict[int, bytes], type_: int, v_trans: int
) -> None:
    """A single NaN or infinity in V spoils replies, also those of later requests."""
    kind = Kind("", [replace(KV, v_type=type_, v_trans=v_trans)])
    whole = bytearray(kind.file())
    block = parse(whole).sections[0].blocks[-1]
    size = len(bits[type_])
    at = block.offset + 7 * 32 * size if not v_trans else block.offset + (3 * 40 + 7) * size
    whole[at : at + size] = bits[type_]
    place = "channel 3, cell 7" if v_trans else "cell 7"
    sentence = f"layer 1 V: a NaN or an infinity at byte {at} ({place})"
    assert refusal(kind, bytes(whole)) == sentence


@pytest.mark.parametrize(("type_", "scales"), [(2, 1), (3, 2), (6, 1), (7, 2), (8, 1), (20, 1)])
def test_check_block_scale_that_is_not_finite_is_refused(type_: int, scales: int) -> None:
    """In quantized rows only the scales are floats, and each of them counts."""
    kind = Kind("", [replace(KV, k_type=type_, width=64)])
    block = parse(kind.file()).sections[0].blocks[0]
    for number in range(scales):
        whole = bytearray(kind.file())
        at = block.offset + 5 * row_bytes(type_, 64) + 2 * number
        whole[at : at + 2] = b"\0\x7c"
        assert "layer 0 K: a NaN or an infinity at byte" in refusal(kind, bytes(whole))
        assert "(cell 5)" in refusal(kind, bytes(whole))


def test_check_recurrent_value_that_is_not_finite_is_refused() -> None:
    """A NaN in a recurrent state survives an erase, so it must not get in."""
    whole = bytearray(HYBRID.file())
    whole[-4:] = NAN[F32]
    assert "recurrent state, S 1: a NaN or an infinity at byte" in refusal(HYBRID, bytes(whole))


def test_check_value_that_is_not_finite_beyond_the_first_chunk_is_refused() -> None:
    """The walk goes on to the last byte of a tensor that takes several reads."""
    width = CHUNK_BYTES // 16
    kind = Kind("", [Kv(layers=1, width=width)])
    whole = bytearray(kind.file())
    whole[-2:] = NAN[F16]
    sentence = f"layer 0 V: a NaN or an infinity at byte {len(whole) - 2} (cell 39)"
    assert refusal(kind, bytes(whole)) == sentence


def test_check_type_that_is_no_cache_type_skips_only_the_finite_check() -> None:
    """An unknown type is compared with the decoder's and measured, but its bytes are opaque."""
    kind = Kind("", [replace(KV, k_type=F16)])
    swapped = {n: kind.file(n).replace(struct.pack("<iQ", F16, 64), struct.pack("<iQ", 39, 64))
               for n in (tuple(PROBE), tuple(PROMPT))}  # fmt: skip
    layout = learn_layout(swapped[tuple(PROBE)], PROBE)
    whole = bytearray(swapped[tuple(PROMPT)])
    whole[-2:] = NAN[F16]
    check(whole, layout, PROMPT)
    with pytest.raises(StateFileError, match="layer 0 K: type f16, the decoder has 39"):
        check(kind.file(), layout, PROMPT)


POINT = Checkpoint(20, [replace(SWA, last=WINDOW)])
GOOD_APPENDIX = Appendix([POINT, Checkpoint(40, [replace(SWA, last=WINDOW)])])


def test_check_context_checkpoints_of_the_decoders_kind_pass() -> None:
    """Version 4 builds append checkpoints to sliding and recurrent states."""
    file = SLIDING_V4.file(appendix=GOOD_APPENDIX)
    check(file, SLIDING_V4.layout, PROMPT, swa_window=WINDOW)
    assert parse(file).n_checkpoints == 2

    hybrid = HYBRID_V4.file(appendix=Appendix([Checkpoint(20, [RECR])]))
    check(hybrid, HYBRID_V4.layout, PROMPT)
    check(HYBRID_V4.file(appendix=Appendix()), HYBRID_V4.layout, PROMPT)


APPENDIX_DAMAGES = [
    (Appendix([POINT], version=2), "context checkpoints: version 2, only 1 is known"),
    (Appendix([POINT], count=0x7FFFFFFF), "context checkpoints: 2147483647 of them do not fit"),
    (Appendix([POINT], count=0), "bytes too many"),
    (Appendix([POINT], count=2), "context checkpoint 1"),
    (Appendix([replace(POINT, magic=1)]), "does not start as a partial state does"),
    (Appendix([replace(POINT, pos=(0, 40))]), "20 tokens at positions 0 to 40, in a state of 40"),
    (Appendix([replace(POINT, pos=(-3, 19))]), "20 tokens at positions -3 to 19"),
    (Appendix([replace(POINT, says_n_tokens=21)]), "21 tokens at positions 0 to 19"),
    (Appendix([replace(POINT, extra_bytes=1)]), "its sizes are not those"),
    (Appendix([replace(POINT, sections=[KV])]), "layers 2, the decoder has 3"),
    (Appendix([replace(POINT, sections=[replace(SWA, last=15)])]), "15 cells, 16 to 20 expected"),
    (Appendix([replace(POINT, draft=b"12345678")]), "its sizes are not those"),
    (Appendix([replace(POINT, sections=[SWA, SWA])]), "its sizes are not those"),
]


@pytest.mark.parametrize(("appendix", "sentence"), APPENDIX_DAMAGES)
def test_check_bad_context_checkpoint_is_refused_by_name(appendix: Appendix, sentence: str) -> None:
    """A checkpoint may be restored later on, so it is held to the same layout."""
    damaged = SLIDING_V4.file(appendix=appendix)
    assert sentence in refusal(SLIDING_V4, damaged, window=WINDOW)


def test_check_checkpoint_that_is_not_finite_is_refused() -> None:
    """The data of checkpoints is checked like all other data."""
    whole = bytearray(SLIDING_V4.file(appendix=GOOD_APPENDIX))
    whole[-18:-16] = NAN[F16]
    sentence = "context checkpoint 1, sliding window layer 2 V: a NaN or an infinity"
    assert sentence in refusal(SLIDING_V4, bytes(whole), window=WINDOW)


@pytest.mark.parametrize("kind", [PLAIN, SLIDING, Kind("", [KV], version=4)])
def test_check_checkpoints_where_no_build_writes_them_are_refused(kind: Kind) -> None:
    """Plain attention and older versions have no appendix: these bytes are too many."""
    assert "bytes too many" in refusal(kind, kind.file(appendix=Appendix()))


@each_kind
def test_check_file_of_another_kind_is_refused(kind: Kind) -> None:
    """The state of every other decoder is refused."""
    for other in KINDS:
        if other.layout.sections != kind.layout.sections or other.version != kind.version:
            with pytest.raises(StateFileError):
                check(other.file(), kind.layout, PROMPT)


def test_check_mmap_refused_can_be_closed_at_once(tmp_path: Path) -> None:
    """No view of the file outlives a refusal, so closing the map does not raise BufferError."""
    path = tmp_path / "state"
    path.write_bytes(PLAIN.file() + b"!")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        with pytest.raises(StateFileError, match="1 byte too many") as caught:
            check(view, PLAIN.layout, PROMPT)
        view.close()
        assert view.closed
        assert caught.tb is not None  # the frames of the refusal are still alive


def test_check_source_that_shrinks_is_refused() -> None:
    """A source that has fewer bytes than it said is a StateFileError, not a crash."""

    class Shrinking:
        def __init__(self, data: bytes) -> None:
            self._data = data

        def __len__(self) -> int:
            return len(self._data) + 8

        def __getitem__(self, index: slice, /) -> bytes:
            return self._data[index]

    with pytest.raises(StateFileError, match="the file became shorter than"):
        check(Shrinking(PLAIN.file()[:-8]), PLAIN.layout, PROMPT)


def test_check_reads_in_bounded_pieces() -> None:
    """Whatever the size of a tensor, no read takes more than a chunk."""
    reads: list[int] = []

    class Watched:
        def __init__(self, data: bytes) -> None:
            self._data = data

        def __len__(self) -> int:
            return len(self._data)

        def __getitem__(self, index: slice, /) -> bytes:
            piece = self._data[index]
            reads.append(len(piece))
            return piece

    kind = Kind("", [Kv(layers=1, width=CHUNK_BYTES // 16)])
    whole = kind.file()
    check(Watched(whole), kind.layout, PROMPT)
    assert max(reads) <= CHUNK_BYTES
    assert sum(reads) == len(whole)


def test_learn_layout_other_tokens_are_refused() -> None:
    """The probe's state must be the state of the probe's prompt."""
    with pytest.raises(StateFileError, match="token 2 is not the one that was handed over"):
        learn_layout(PLAIN.file(PROBE), [1, 2, 4])
    with pytest.raises(StateFileError, match="holds 3 tokens, 2 were handed over"):
        learn_layout(PLAIN.file(PROBE), [1, 2])


def test_learn_layout_two_streams_are_refused() -> None:
    """A decoder with two slots does not save states for one that has one."""
    with pytest.raises(StateFileError, match="section attention: 2 streams, a decoder with one"):
        learn_layout(PLAIN.file(PROBE, sections=[replace(KV, streams=(3, 0))]), PROBE)


def test_parse_tells_where_each_tensor_lies() -> None:
    """Blocks lie in file order, each of its layout's size, the last one at the end."""
    whole = SLIDING.file()
    blocks = [block for part in parse(whole).sections for block in part.blocks]
    assert [block.what for block in blocks[:4]] == [
        "layer 0 K", "layer 1 K", "layer 0 V", "layer 1 V",
    ]  # fmt: skip
    assert blocks[4].what == "sliding window layer 0 K"
    assert all(one.offset + one.n_bytes <= two.offset for one, two in pairwise(blocks))
    assert blocks[-1].offset + blocks[-1].n_bytes == len(whole)
    assert [block.n_bytes for block in blocks[:1]] == [64 * 40]


def test_layout_describe_is_one_short_line() -> None:
    """The status page shows version, caches and types."""
    kind = Kind(
        "", [replace(KV, k_type=Q8_0, v_trans=1, ext_bytes=8), replace(SWA, ext_bytes=8), RECR]
    )
    assert kind.layout.describe() == (
        "v2: attention 2 layers, K q8_0, V f16, V transposed, 8 bytes of position; "
        "sliding window 3 layers, K f16, V f16, 8 bytes of position; recurrent state 4 rows, f32"
    )
    assert Kind("", [replace(KV, has_v=False)]).layout.describe() == (
        "v2: attention 2 layers, K f16, no V"
    )
