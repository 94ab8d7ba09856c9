"""The check of a state file: what it refuses, and that its quick and thorough readings agree."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from onebitd.core import state_baseline, state_data, state_walk
from onebitd.core.errors import StateFileError
from onebitd.core.state_baseline import learn_baseline
from onebitd.core.state_check import check, plan
from onebitd.core.state_data import Baseline
from onebitd.core.state_file import parse
from onebitd.core.state_layout import Block, Channels, Layout, Rows, StateFile
from tests.core.state_files import BF16, F16, F32, Q8_0, Appendix, Checkpoint, Kv, Recr, build
from tests.core.test_state_file import (
    HYBRID_V4,
    KINDS,
    KV,
    PLAIN,
    PROBE,
    PROMPT,
    RECR,
    SLIDING_V4,
    SWA,
    WINDOW,
    Kind,
    each_kind,
)

SHORT = PROMPT[:3]
SIX = PROMPT[:6]
DAMAGED_FILES = 10_000
PEAK_BYTES = 4 << 20
TRANSPOSED = Kind("transposed", [replace(KV, v_trans=1)])
QUANTIZED = Kind("q8_0", [replace(KV, k_type=Q8_0, v_type=Q8_0, width=64)])
Q4_1 = Kind("q4_1", [replace(KV, k_type=3, v_type=3, width=64)])
HALVES = Kind("bf16", [Kv(v_type=BF16)])
SMALL_CHUNK = 1 << 12
LONG_ROWS = Kind("rows longer than a piece", [Kv(layers=2, width=SMALL_CHUNK)])
LONG = Kind("tensors longer than a piece", [Kv(layers=3, width=256)])
LONG_CHANNELS = Kind("long channels", [Kv(layers=2, v_trans=1, width=128)])


def baseline_of(kind: Kind, probe: bytes | None = None) -> Baseline:
    """Return what is learned from the decoder's own state."""
    file = kind.file(PROBE) if probe is None else probe
    return learn_baseline(file, parse(file, kind.layout))


def block_of(file: bytes, kind: Kind, what: str) -> Block:
    """Return a tensor by its name."""
    blocks = [block for part in parse(file, kind.layout).sections for block in part.blocks]
    return next(block for block in blocks if block.what == what)


def put(file: bytes, at: int, data: bytes) -> bytes:
    """Return the file with other bytes at a place."""
    return file[:at] + data + file[at + len(data) :]


def refusal(kind: Kind, file: bytes, baseline: Baseline | None = None) -> str:
    """Return why a file is refused."""
    with pytest.raises(StateFileError) as caught:
        check(file, kind.layout, PROMPT, swa_window=WINDOW, baseline=baseline)
    return str(caught.value)


# --- cells and tensors without values, and of another size --------------------------------------


@each_kind
def test_check_good_file_passes_against_the_baseline(kind: Kind) -> None:
    """Values like those of the decoder's own state are no reason for a refusal."""
    check(kind.file(), kind.layout, PROMPT, baseline=baseline_of(kind))


def zero_cell(file: bytes, block: Block, cell: int) -> bytes:
    """Return the file with one cell of a tensor zero throughout."""
    if isinstance(block.tensor, Rows):
        size = block.tensor.row_size
        return put(file, block.offset + cell * size, bytes(size))
    for channel in range(block.tensor.n_embd_v_gqa):
        at = block.offset + (channel * block.cells + cell) * block.tensor.el_size
        file = put(file, at, bytes(block.tensor.el_size))
    return file


@pytest.mark.parametrize("cell", [0, 17, 39])
@pytest.mark.parametrize(
    "kind",
    [PLAIN, TRANSPOSED, QUANTIZED, Q4_1, HALVES, LONG_ROWS, LONG, LONG_CHANNELS],
    ids=lambda kind: kind.name,
)
def test_check_cell_that_was_not_written_is_refused_where_it_is(
    kind: Kind, cell: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of zeros is what a provider leaves that skips a position."""
    monkeypatch.setattr(state_data, "CHUNK_BYTES", SMALL_CHUNK)
    file = kind.file()
    layer = len(kind.layout.sections[0].k) - 1  # type: ignore[union-attr]
    block = block_of(file, kind, f"layer {layer} V")
    damaged = zero_cell(file, block, cell)
    check(damaged, kind.layout, PROMPT)  # finite, and nothing is known to compare with
    sentence = f"layer {layer} V, cell {cell}: every value is zero, as if it had not been written"
    assert refusal(kind, damaged, baseline_of(kind)) == sentence


def test_check_cell_of_negative_zeros_is_refused() -> None:
    """A zero may carry a sign."""
    file = PLAIN.file()
    block = block_of(file, PLAIN, "layer 1 K")
    damaged = put(file, block.offset + 5 * 64, b"\0\x80" * 32)
    assert "layer 1 K, cell 5: every value is zero" in refusal(PLAIN, damaged, baseline_of(PLAIN))


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (PLAIN, "layer 1 K"),
        (TRANSPOSED, "layer 0 V"),
        (QUANTIZED, "layer 0 K"),
        (SLIDING_V4, "sliding window layer 2 V"),
        (HYBRID_V4, "recurrent state, R 1"),
        (HYBRID_V4, "recurrent state, S 0"),
    ],
)
def test_check_tensor_of_zeros_is_refused(kind: Kind, what: str) -> None:
    """A layer that was left out has a sentence of its own."""
    file = kind.file()
    block = block_of(file, kind, what)
    damaged = put(file, block.offset, bytes(block.n_bytes))
    sentence = f"{what}: every value is zero; the decoder's own are not"
    assert refusal(kind, damaged, baseline_of(kind)) == sentence


def test_check_zeros_in_a_context_checkpoint_are_refused() -> None:
    """A checkpoint may be restored later; it has the bounds of its own sections."""
    point = Checkpoint(20, [replace(SWA, last=WINDOW)])
    file = SLIDING_V4.file(appendix=Appendix([point]))
    check(file, SLIDING_V4.layout, PROMPT, swa_window=WINDOW, baseline=baseline_of(SLIDING_V4))
    damaged = put(file, len(file) - 16 - 128, bytes(128))  # the last row, before two sizes
    sentence = "context checkpoint 0, sliding window layer 2 V, cell 15: every value is zero"
    assert sentence in refusal(SLIDING_V4, damaged, baseline_of(SLIDING_V4))


def test_check_zeros_where_the_decoders_own_state_has_them_pass() -> None:
    """A model with a tensor or a cell of zeros is no fault of the provider's."""
    probe = PLAIN.file(PROBE)
    block = block_of(probe, PLAIN, "layer 1 V")
    baseline = baseline_of(PLAIN, zero_cell(probe, block, 2))
    file = PLAIN.file()
    block = block_of(file, PLAIN, "layer 1 V")
    check(zero_cell(file, block, 9), PLAIN.layout, PROMPT, baseline=baseline)
    other = block_of(file, PLAIN, "layer 0 V")
    assert "layer 0 V, cell 9" in refusal(PLAIN, zero_cell(file, other, 9), baseline)


@pytest.mark.parametrize("kind", [PLAIN, TRANSPOSED, QUANTIZED], ids=lambda kind: kind.name)
def test_check_first_value_zero_in_every_cell_passes(kind: Kind) -> None:
    """One channel that is always zero does not make a cell of zeros."""
    file = kind.file()
    block = block_of(file, kind, "layer 0 V")
    if isinstance(block.tensor, Channels):
        file = put(file, block.offset, bytes(2 * block.cells))
    else:
        for cell in range(block.cells):
            file = put(file, block.offset + cell * block.tensor.row_size, b"\0\0")
    check(file, kind.layout, PROMPT, baseline=baseline_of(kind))


def scaled(kind: Kind, what: str, dtype: str, factor: float) -> bytes:
    """Return a file in which one tensor of floats is multiplied."""
    file = kind.file()
    block = block_of(file, kind, what)
    values = np.frombuffer(file, dtype, block.n_bytes // np.dtype(dtype).itemsize, block.offset)
    return put(file, block.offset, (values * factor).astype(dtype).tobytes())


@pytest.mark.parametrize(
    ("kind", "what", "dtype"),
    [
        (PLAIN, "layer 1 K", "<f2"),
        (TRANSPOSED, "layer 0 V", "<f2"),
        (Kind("f32", [Kv(k_type=F32)]), "layer 1 K", "<f4"),
    ],
    ids=["f16", "transposed", "f32"],
)
@pytest.mark.parametrize(
    ("factor", "says"), [(2000.0, "a value of "), (1 / 2000, "no value above "), (20.0, "")]
)
def test_check_values_of_another_size_than_the_decoders_are_refused(
    kind: Kind, what: str, dtype: str, factor: float, says: str
) -> None:
    """What no prompt explains is refused with both figures; twenty times is nothing unusual."""
    file = scaled(kind, what, dtype, factor)
    check(file, kind.layout, PROMPT)
    if not says:
        check(file, kind.layout, PROMPT, baseline=baseline_of(kind))
        return
    sentence = refusal(kind, file, baseline_of(kind))
    assert sentence.startswith(f"{what}: {says}")
    assert "where the decoder's own state of a few tokens has " in sentence


def test_check_recurrent_values_of_any_size_pass() -> None:
    """A recurrent state grows with its prompt."""
    file = scaled(HYBRID_V4, "recurrent state, S 1", "<f4", 1e6)
    check(file, HYBRID_V4.layout, PROMPT, baseline=baseline_of(HYBRID_V4))


def test_learn_baseline_value_that_is_not_finite_is_refused() -> None:
    """Such a decoder is broken; nothing is handed to it."""
    file = PLAIN.file(PROBE)[:-2] + b"\0\x7c"
    with pytest.raises(StateFileError, match="layer 1 V: a NaN or an infinity"):
        learn_baseline(file, parse(file, PLAIN.layout))


# --- the quick way ------------------------------------------------------------------------------


def quick_verdict(layout: Layout, tokens: Sequence[int], file: bytes) -> bool:
    """Tell whether the quick way accepts the description of a file, headers included."""
    try:
        walk = state_walk.Walk(file, layout, tokens, WINDOW, None)
    except StateFileError:
        return False
    runs = walk.quick_runs()
    if runs is None:
        return False
    headers = [
        (file[run.offset + i * run.stride :][:12], run.tensor.header())
        for run in runs
        for i in range(len(run.names))
    ]
    return all(found == wanted for found, wanted in headers)


def thorough_verdict(layout: Layout, tokens: Sequence[int], file: bytes) -> bool:
    """Tell whether reading from header to header accepts it."""
    try:
        state_walk.Walk(file, layout, tokens, WINDOW, None).runs()
    except StateFileError:
        return False
    return True


def descriptions(kind: Kind) -> list[int]:
    """Return the places of a short file that are not data."""
    whole = kind.file(SHORT)
    data = [block for part in parse(whole, kind.layout).sections for block in part.blocks]
    covered = np.zeros(len(whole), bool)
    for block in data:
        covered[block.offset : block.offset + block.n_bytes] = True
    return np.flatnonzero(~covered).tolist()


@each_kind
def test_quick_way_accepts_what_the_thorough_one_does_and_nothing_else(kind: Kind) -> None:
    """Each byte of the description is changed in turn: one definition of what is right."""
    whole, layout = kind.file(SHORT), kind.layout
    assert quick_verdict(layout, SHORT, whole)
    assert thorough_verdict(layout, SHORT, whole)
    accepted = 0
    for at in descriptions(kind):
        damaged = put(whole, at, bytes([whole[at] ^ 0x01]))
        verdict = quick_verdict(layout, SHORT, damaged)
        assert verdict is thorough_verdict(layout, SHORT, damaged), at
        accepted += verdict
    cells = sum(1 for part in kind.sections if isinstance(part, Kv)) * len(SHORT)
    assert accepted == 4 * cells  # the sequence ids, which nobody looks at


@pytest.mark.parametrize("ext_bytes", [0, 12])
@pytest.mark.parametrize("turned", ["attention", "sliding window"])
def test_quick_way_knows_rings_as_the_thorough_one_does(turned: str, ext_bytes: int) -> None:
    """A sliding window may begin in the middle, full attention may not."""
    full, swa = replace(KV, ext_bytes=ext_bytes), replace(SWA, ext_bytes=ext_bytes)
    layout = Kind("", [full, swa], version=3).layout
    ring = [4, 5, 0, 1, 2, 3]
    is_ring = turned == "sliding window"
    full, swa = (full, replace(swa, pos=ring)) if is_ring else (replace(full, pos=ring), swa)
    file = build(SIX, [full, swa], version=3)
    assert quick_verdict(layout, SIX, file) is is_ring
    assert thorough_verdict(layout, SIX, file) is is_ring


def test_check_header_of_equal_size_is_refused_by_what_differs() -> None:
    """Found along with the data, told as if it had been read from the front."""
    good = struct.pack("<iQ", F16, 64)
    damaged = PLAIN.file()
    at = block_of(damaged, PLAIN, "layer 1 V").offset - 12
    assert damaged[at : at + 12] == good
    damaged = put(damaged, at, struct.pack("<iQ", BF16, 64))
    assert refusal(PLAIN, damaged) == "layer 1 V: type bf16, the decoder has f16"


def test_plan_pieces_cover_every_byte_of_data_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In file order, none longer than a chunk, whatever the shape of the tensors."""
    monkeypatch.setattr(state_data, "CHUNK_BYTES", SMALL_CHUNK)
    for kind in [*KINDS, LONG_ROWS, LONG, LONG_CHANNELS]:
        file = kind.file()
        pieces = plan(file, kind.layout, PROMPT, swa_window=WINDOW).pieces
        assert max((piece.n_bytes for piece in pieces), default=0) <= SMALL_CHUNK
        covered = np.zeros(len(file), np.uint8)
        for piece in pieces:
            covered[piece.offset : piece.offset + piece.n_bytes] += 1
        assert covered.max() == 1
        blocks = [block for part in parse(file, kind.layout).sections for block in part.blocks]
        assert all(covered[b.offset - 12 : b.offset + b.n_bytes].all() for b in blocks)
        assert [piece.offset for piece in pieces] == sorted(piece.offset for piece in pieces)


# --- ten thousand damaged files -----------------------------------------------------------------


def flip(file: bytearray, rng: random.Random) -> None:
    """Change up to four bytes anywhere."""
    for _ in range(rng.randint(1, 4)):
        file[rng.randrange(len(file))] = rng.randrange(256)


def set_field(file: bytearray, rng: random.Random) -> None:
    """Replace a word by one of those that break readers."""
    at = rng.randrange(len(file) // 4) * 4
    value = rng.choice([0, 1, 2, 0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 0x7FC00000, 0x7C007C00])
    file[at : at + 4] = struct.pack("<I", value)


def add_one(file: bytearray, rng: random.Random) -> None:
    """Count one of the first words up or down, where the description is."""
    at = rng.randrange(min(64, len(file) // 4)) * 4
    (value,) = struct.unpack_from("<I", file, at)
    struct.pack_into("<I", file, at, (value + rng.choice([-1, 1])) & 0xFFFFFFFF)


def cut(file: bytearray, rng: random.Random) -> None:
    """Cut the end off, or a piece out of the middle."""
    at = rng.randrange(len(file))
    del file[at : rng.choice([len(file), at + rng.randint(1, 64)])]


def extend(file: bytearray, rng: random.Random) -> None:
    """Put bytes in, or behind the end."""
    at = rng.choice([len(file), rng.randrange(len(file))])
    file[at:at] = rng.randbytes(rng.randint(1, 64))


def swap(file: bytearray, rng: random.Random) -> None:
    """Exchange two stretches of equal length."""
    length = rng.randint(1, len(file) // 4)
    one, other = sorted(rng.randrange(len(file) - length) for _ in range(2))
    if other - one >= length:
        first, second = file[one : one + length], file[other : other + length]
        file[one : one + length], file[other : other + length] = second, first


def shift(file: bytearray, rng: random.Random) -> None:
    """Move a stretch by a few bytes, or by a row."""
    length, by = rng.randint(16, 80), rng.choice([1, 2, 4, 12, 64])
    at = rng.randrange(len(file) - length - by)
    file[at + by : at + by + length] = file[at : at + length]


DAMAGES: list[Callable[[bytearray, random.Random], None]] = [
    flip, set_field, add_one, cut, extend, swap, shift,
]  # fmt: skip


class Oracle:
    """Says of a damaged file, without the check's code, whether it may be accepted.

    It may if all that is not data equals the good file, but for sequence ids, and every float is
    finite.
    """

    def __init__(self, good: bytes, state: StateFile) -> None:
        self.good = good
        self._described = np.ones(len(good), bool)
        self._blocks = [block for part in state.sections for block in part.blocks]
        for block in self._blocks:
            self._described[block.offset : block.offset + block.n_bytes] = False
        for part in state.sections:
            if part.cells.seq_id.size:
                width = 12 + 4 * part.cells.ext.shape[1]
                first = part.blocks[0].offset - 12 - 8 - 8 * (state.version >= 4)
                start = first - width * len(part.cells.pos)
                for end in range(start + width, first + 1, width):
                    self._described[end - 4 : end] = False

    def allows(self, file: bytes) -> bool:
        if len(file) != len(self.good):
            return False
        differs = np.frombuffer(file, np.uint8) != np.frombuffer(self.good, np.uint8)
        if (differs & self._described).any():
            return False
        return all(self._is_finite(file, block) for block in self._blocks)

    @staticmethod
    def _is_finite(file: bytes, block: Block) -> bool:
        data, type_ = file[block.offset : block.offset + block.n_bytes], block.tensor.type
        if type_ == F32:
            return bool(np.isfinite(np.frombuffer(data, "<f4")).all())
        if type_ == F16:
            return bool(np.isfinite(np.frombuffer(data, "<f2")).all())
        if type_ == BF16:
            wide = np.frombuffer(data, "<u2").astype("<u4") << 16
            return bool(np.isfinite(wide.view("<f4")).all())
        size, scales = {2: (18, 1), 3: (20, 2), 6: (22, 1), 7: (24, 2), 8: (34, 1), 20: (18, 1)}[
            type_
        ]
        blocks = np.frombuffer(data, np.uint8).reshape(-1, size)[:, : 2 * scales]
        return bool(np.isfinite(np.ascontiguousarray(blocks).view("<f2")).all())


def good_files() -> list[tuple[Kind, Oracle]]:
    """Return each kind with a short good file of it."""
    found = []
    for kind in KINDS:
        file = kind.file(SHORT, packed=False)
        found.append((kind, Oracle(file, parse(file, kind.layout))))
    return found


def test_check_ten_thousand_damaged_files_none_of_another_shape_is_accepted() -> None:
    """Whatever the damage: a StateFileError, or a file that differs in finite data only."""
    rng = random.Random(2026)  # noqa: S311 - the same files in every run
    files = [(kind, oracle, kind.layout) for kind, oracle in good_files()]
    accepted = refused = 0
    for number in range(DAMAGED_FILES):
        kind, oracle, layout = files[number % len(files)]
        damaged = bytearray(oracle.good)
        rng.choice(DAMAGES)(damaged, rng)
        verdict = is_accepted(damaged, layout)
        file = bytes(damaged)
        assert verdict is oracle.allows(file), (kind.name, number)
        accepted += verdict and file != oracle.good
        refused += not verdict
    assert accepted > DAMAGED_FILES // 20
    assert refused > DAMAGED_FILES // 2


def is_accepted(file: bytearray, layout: Layout) -> bool:
    """Check a damaged file; whatever is raised but StateFileError fails the test."""
    try:
        check(file, layout, SHORT)
    except StateFileError:
        return False
    return True


def test_check_damaged_files_leave_memory_flat() -> None:
    """The last hundred of them leave as little behind as the first, and never take much."""
    rng = random.Random(7)  # noqa: S311 - the same files in every run
    files = [(oracle, kind.layout) for kind, oracle in good_files()]
    left: list[int] = []
    tracemalloc.start()
    try:
        for number in range(600):
            oracle, layout = files[number % len(files)]
            damaged = bytearray(oracle.good)
            rng.choice(DAMAGES)(damaged, rng)
            is_accepted(damaged, layout)
            if number % 100 == 99:
                left.append(tracemalloc.get_traced_memory()[0])
        assert tracemalloc.get_traced_memory()[1] < PEAK_BYTES
    finally:
        tracemalloc.stop()
    assert left[-1] - left[2] < 1 << 16, left


def test_check_lying_counts_allocate_nothing() -> None:
    """A count that no file could hold is refused before anything is read for it."""
    file = bytearray(build(SHORT, [KV, RECR]))
    layout = Kind("", [KV, RECR]).layout
    tracemalloc.start()
    try:
        for at in range(0, 12 + 4 * len(SHORT) + 8, 4):
            for value in (0x7FFFFFFF, 0xFFFFFFFF, 1 << 24):
                damaged = bytearray(file)
                struct.pack_into("<I", damaged, at, value)
                with pytest.raises(StateFileError):
                    check(damaged, layout, SHORT)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_bounds_leave_room_on_both_sides_of_what_was_measured() -> None:
    """Eight times more than the extremes of honest states, which the module's docstring names."""
    assert state_baseline.MOST >= 8 * 20.4
    assert state_baseline.LEAST <= 0.29 / 8


def test_recurrent_sections_only_kind_is_checked_too() -> None:
    """A model without attention has no cells with sequence ids, and all of its rows are data."""
    kind = Kind("recurrent", [Recr(states=3)])
    file = kind.file()
    check(file, kind.layout, PROMPT, baseline=baseline_of(kind))
    assert "recurrent state: position" in refusal(kind, put(file, 12 + 160 + 4, b"\1"))
