"""Two state files compared: how far apart they are, and which planted fault is recognized."""

from __future__ import annotations

import dataclasses
import functools
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from onebitd.core.state_compare import StateDiff, TensorDiff, compare
from onebitd.core.state_file import parse
from onebitd.core.state_values import encode, turn
from tests.core import state_faults as faults
from tests.core import state_files as sf

N, LAYERS, WIDTH, DIM, BASE = 60, 4, 128, 32, 10000.0
TOKENS = list(range(100, 100 + N))


@functools.cache
def state(halves: bool = False, type_: int = sf.F16, v_trans: int = 0, version: int = 2) -> bytes:
    """Return a state whose keys went through RoPE, each tensor with values of its own."""
    section = sf.Kv(LAYERS, type_, type_, WIDTH, v_trans)
    return filled(sf.build(TOKENS, [section], version=version), halves)


def filled(file: bytes, halves: bool = False) -> bytes:
    """Return a file with plausible values: each channel has a size and a mean of its own."""
    for what, block in faults.blocks_of(file).items():
        rng = np.random.default_rng(sum(what.encode()) * 31 + block.layer)
        shape = (block.cells, faults.rows_of(file, what).shape[1])
        rows = rng.standard_normal(shape) * rng.uniform(0.3, 3, shape[1])
        if block.part == "K":
            rows = faults.rope(rows + rng.standard_normal(shape[1]), DIM, BASE, halves=halves)
        file = faults.put(file, what, rows.astype(np.float32))
    return file


@functools.cache
def drifted(halves: bool, relative: float) -> bytes:
    """Return the same state with noise on every row."""
    file = state(halves)
    for number, what in enumerate(faults.blocks_of(file) if relative else ()):
        file = faults.plant(file, what, faults.drifted(relative, number))
    return file


def diff(a: bytes, b: bytes, **options: Any) -> StateDiff:
    """Compare two files."""
    return compare(parse(a), a, parse(b), b, **{"head_dim": DIM, **options})


def off(found: StateDiff) -> dict[str, str | None]:
    """Return the tensors that are not within tolerance, with the cause of each."""
    return {tensor.what: tensor.cause for tensor in found.tensors if not tensor.within}


def tensor(found: StateDiff, what: str) -> TensorDiff:
    """Return one tensor's figures."""
    return next(tensor for tensor in found.tensors if tensor.what == what)


def bare(rows: Any, *, halves: bool) -> Any:
    """Take RoPE away."""
    return faults.rope(rows, DIM, BASE, halves=halves, times=-1)


def in_k(fault: faults.Fault) -> Callable[[bytes, bool], bytes]:
    """Plant a fault into the keys of layer 2."""
    return lambda file, halves: faults.plant(file, "layer 2 K", fault)


def in_v(fault: faults.Fault) -> Callable[[bytes, bool], bytes]:
    """Plant a fault into the values of layer 1."""
    return lambda file, halves: faults.plant(file, "layer 1 V", fault)


def with_rope(**how: Any) -> Callable[[bytes, bool], bytes]:
    """Apply another RoPE to the keys of layer 2, from none on."""
    how = {"base": BASE, **how}

    def plant(file: bytes, halves: bool) -> bytes:
        turned = {"halves": halves, **how}
        if how.get("halves") == "other":
            turned["halves"] = not halves
        return faults.plant(
            file, "layer 2 K", lambda rows: faults.rope(bare(rows, halves=halves), DIM, **turned)
        )

    return plant


def with_rows_of(*moves: tuple[str, str]) -> Callable[[bytes, bool], bytes]:
    """Give each first tensor the rows of the second."""

    def plant(file: bytes, halves: bool) -> bytes:
        new = file
        for into, from_ in moves:
            new = faults.put(new, into, faults.rows_of(file, from_))
        return new

    return plant


def with_bytes(make: Callable[[Any], bytes]) -> Callable[[bytes, bool], bytes]:
    """Write the values of layer 1 in another way."""
    return lambda file, halves: faults.put_bytes(
        file, "layer 1 V", make(faults.rows_of(file, "layer 1 V"))
    )


PLANTED: dict[str, tuple[Callable[[bytes, bool], bytes], dict[str, str]]] = {
    "rope-not-applied": (with_rope(times=0), {"layer 2 K": "RoPE is not applied"}),
    "rope-twice": (with_rope(times=2), {"layer 2 K": "RoPE is applied twice"}),
    "rope-backwards": (with_rope(times=-1), {"layer 2 K": "RoPE turns the wrong way"}),
    "rope-base": (with_rope(base=500000.0), {"layer 2 K": "another base"}),
    "rope-scaled": (with_rope(times=0.25), {"layer 2 K": "another scaling"}),
    "rope-pairs": (with_rope(halves="other"), {"layer 2 K": "RoPE is applied to the wrong pairs"}),
    "rope-positions": (with_rope(first=1), {"layer 2 K": "positions that are 1 too high"}),
    "rope-order": (
        lambda file, halves: faults.plant(
            file, "layer 2 K", faults.reordered_pairs(DIM, halves=halves)
        ),
        {"layer 2 K": "RoPE pairs stand"},
    ),
    "k-and-v": (
        with_rows_of(("layer 2 K", "layer 2 V"), ("layer 2 V", "layer 2 K")),
        {"layer 2 K": "K and V are exchanged", "layer 2 V": "K and V are exchanged"},
    ),
    "v-in-k": (with_rows_of(("layer 2 K", "layer 2 V")), {"layer 2 K": "the rows are V rows"}),
    "other-layer": (
        with_rows_of(("layer 3 V", "layer 0 V")),
        {"layer 3 V": "the rows are those of layer 0 V"},
    ),
    "layers-exchanged": (
        with_rows_of(("layer 1 K", "layer 3 K"), ("layer 3 K", "layer 1 K")),
        {
            "layer 1 K": "those of layer 3 K, which has this one's",
            "layer 3 K": "those of layer 1 K, which has this one's",
        },
    ),
    "layers-shifted": (
        with_rows_of(*((f"layer {i} K", f"layer {i - 1} K") for i in range(1, LAYERS))),
        {f"layer {i} K": "3 K tensors are shifted by 1 layer" for i in range(1, LAYERS)},
    ),
    "shifted-1": (
        in_k(faults.shifted(1)),
        {"layer 2 K": "shifted by 1 position: they belong to e"},
    ),
    "shifted-back": (in_v(faults.shifted(-1)), {"layer 1 V": "by 1 position: they belong to l"}),
    "shifted-4": (in_v(faults.shifted(4)), {"layer 1 V": "shifted by 4 positions"}),
    "transposed": (
        with_bytes(lambda rows: encode(sf.F16, np.ascontiguousarray(rows.T))),
        {"layer 1 V": "V is transposed"},
    ),
    "bf16-bits": (with_bytes(lambda rows: encode(sf.BF16, rows)), {"layer 1 V": "bf16 bits in"}),
    "f32-bits": (with_bytes(lambda rows: encode(sf.F32, rows)), {"layer 1 V": "f32 bits in a"}),
    "big-endian": (
        with_bytes(lambda rows: rows.astype(">f2").tobytes()),
        {"layer 1 V": "big-endian"},
    ),
    "heads-exchanged": (
        in_k(faults.exchanged_heads(1, 3, DIM)),
        {"layer 2 K": "heads 1 and 3 are exchanged"},
    ),
    "heads-rolled": (in_v(faults.rolled_heads(DIM)), {"layer 1 V": "heads are rotated: head 0 h"}),
    "head-scaled": (
        in_v(faults.scaled_head(2, DIM, 1.3)),
        {"layer 1 V": "head 2 is scaled by 1.3"},
    ),
    "all-scaled": (in_k(lambda rows: rows / 8), {"layer 2 K": "all values are scaled by 0.125"}),
    "row-not-written": (in_k(faults.zeroed(7, 7)), {"layer 2 K": "position 7 is all zero"}),
    "not-written": (in_v(faults.zeroed(0, N)), {"layer 1 V": "all 60 positions are all zero"}),
    "nan": (in_v(faults.spoiled(9, np.nan)), {"layer 1 V": "position 9 is no numbers"}),
}


@pytest.mark.parametrize("drift", [0.0, 0.02], ids=["exact", "drifted"])
@pytest.mark.parametrize("halves", [False, True], ids=["neighbours", "halves"])
@pytest.mark.parametrize("fault", PLANTED)
def test_compare_planted_fault_is_named_in_its_tensors_alone(
    fault: str, halves: bool, drift: float
) -> None:
    """Each fault is found and named where it is, with and without an honest drift over all rows."""
    reference, file = state(halves), drifted(halves, drift)
    plant, wanted = PLANTED[fault]
    found = diff(plant(file, halves), reference, tolerance=0.2)
    assert not found.within
    causes = off(found)
    assert set(causes) == set(wanted)
    for what, words in wanted.items():
        assert words in (causes[what] or ""), causes
    assert found.worst is not None
    assert found.worst.what in wanted


@pytest.mark.parametrize("fault", ["rope-not-applied", "rope-pairs", "heads-exchanged"])
def test_compare_fault_of_heads_of_unknown_size_is_named_too(fault: str) -> None:
    """The usual sizes are tried where nobody says how large a head is."""
    plant, wanted = PLANTED[fault]
    found = off(diff(plant(state(), False), state(), head_dim=None, tolerance=0.2))
    assert {what: wanted[what] in (cause or "") for what, cause in found.items()} == {
        "layer 2 K": True
    }


def test_compare_other_way_round_of_bits_and_order_is_named() -> None:
    """f16 where the file says bf16 or f32, and rows where it says channels, are recognized too."""
    for type_, transposed, make, words in (
        (sf.BF16, 0, lambda rows: encode(sf.F16, rows), "f16 bits in a tensor of bf16"),
        (sf.F32, 0, lambda rows: encode(sf.F16, rows), "f16 bits in a tensor of f32"),
        (sf.F32, 0, lambda rows: rows.astype(">f4").tobytes(), "big-endian"),
        (sf.F16, 1, lambda rows: encode(sf.F16, rows), "V is not transposed"),
        (sf.F16, 1, lambda rows: encode(sf.BF16, np.ascontiguousarray(rows.T)), "bf16 bits in a"),
    ):
        reference = state(type_=type_, v_trans=transposed)
        found = off(diff(with_bytes(make)(reference, False), reference))
        assert words in str(found["layer 1 V"])
        assert len(found) == 1


def test_compare_quantized_rows_that_are_not_rotated_are_named() -> None:
    """llama.cpp rotates the rows of a quantized cache; a provider that does not is told."""
    reference = q8_0_state(4, (64, 64), turned=True)
    found = off(diff(q8_0_state(4, (64, 64), turned=False), reference))
    assert len(found) == 2 * LAYERS
    assert all("not rotated as the reference's are (n_rot 64)" in str(c) for c in found.values())


def q8_0_state(version: int, n_rot: tuple[int, int], *, turned: bool) -> bytes:
    """Return the values of `state` in a quantized cache, rotated by 64 or not."""
    section = sf.Kv(LAYERS, sf.Q8_0, sf.Q8_0, WIDTH, n_rot=n_rot)
    file = sf.build(TOKENS, [section], version=version)
    for what in faults.blocks_of(file):
        rows = faults.rows_of(state(), what)
        rows = turn(rows, 64 if turned else 0).reshape(-1, 32)
        scale = (np.abs(rows).max(axis=1, keepdims=True) / 127).astype("<f2")
        levels = np.round(rows / scale.astype(np.float32)).astype(np.int8)
        data = np.concatenate((scale.view(np.int8), levels), axis=1).tobytes()
        file = faults.put_bytes(file, what, data)
    return file


@pytest.mark.parametrize("version", [2, 4])
def test_compare_of_a_rotated_quantized_cache_with_floats_undoes_the_rotation(version: int) -> None:
    """Version 4 says how far rows are rotated; before, what fits is taken, and that is noted."""
    found = diff(q8_0_state(version, (64, 64), turned=True), state(version=version))
    assert found.within
    assert found.worst is not None
    assert 0.001 < found.worst.row_error < 0.03
    assert [("64 fits best" in note) for note in found.notes] == (
        [] if version == 4 else [True] * 2
    )


@pytest.mark.parametrize("drift", ["noise-1e-3", "noise-3e-2", "bf16", "first-rows-only"])
def test_compare_honest_drift_outside_the_tolerance_gets_no_cause(drift: str) -> None:
    """Noise and rounding may be too much, but no fault is made up for them."""
    reference = state(type_=sf.F32)
    file = reference
    for what in faults.blocks_of(reference):
        if drift == "bf16":
            rows = faults.rows_of(file, what).view(np.uint32) >> 16 << 16
            file = faults.put(file, what, rows.view(np.float32))
        elif drift == "first-rows-only":
            noisy = faults.drifted(0.01)(faults.rows_of(file, what))
            keep = np.arange(N)[:, None] < 3
            file = faults.put(file, what, np.where(keep, noisy, faults.rows_of(file, what)))
        else:
            noise = float(drift.removeprefix("noise-"))
            file = faults.plant(file, what, faults.drifted(noise, len(what)))
    found = diff(file, reference, tolerance=1e-4, scale_tolerance=0.006)
    assert off(found) == dict.fromkeys(faults.blocks_of(reference))
    assert diff(file, reference).within


def test_compare_rounding_to_f16_is_within_a_thousandth() -> None:
    """The same values in f32 and f16 agree as f16 can, and types need not be the same."""
    found = diff(state(type_=sf.F16), state(type_=sf.F32), tolerance=1e-3)
    assert found.within
    assert found.worst is not None
    assert 0 < found.worst.row_error < 5e-4
    assert found.notes == ()


@pytest.mark.parametrize("by", [0.99, 1.01])
def test_compare_head_scaled_by_a_hundredth_is_found_under_an_honest_drift(by: float) -> None:
    """A per cent on one head of one layer shows through noise of 4 per cent on every row."""
    file = drifted(False, 0.04)
    assert off(diff(file, state())) == {}
    found = diff(faults.plant(file, "layer 3 K", faults.scaled_head(1, DIM, by)), state())
    assert off(found) == {"layer 3 K": tensor(found, "layer 3 K").cause}
    assert "head 1 is scaled by" in str(tensor(found, "layer 3 K").cause)
    assert tensor(found, "layer 3 K").head == 1
    assert tensor(found, "layer 3 K").head_scale == pytest.approx(by, abs=0.004)
    assert tensor(diff(file, state(), head_dim=None), "layer 3 K").head_scale == 1.0


@pytest.mark.parametrize(("n_positions", "head"), [(15, None), (16, 1)])
def test_compare_scale_of_few_positions_is_not_judged(n_positions: int, head: int | None) -> None:
    """One row's honest error alone can make a head 4 per cent larger."""
    file = faults.plant(state(), "layer 3 K", faults.scaled_head(1, DIM, 1.04))
    found = diff(file, state(), positions=range(n_positions))
    assert tensor(found, "layer 3 K").head == head
    assert found.within is (head is None)


def test_compare_repetitive_text_that_is_off_is_not_called_shifted() -> None:
    """Rows one period on are more like a drifted row than its own; that is the text's doing."""
    period, what = 12, "layer 1 V"
    rows = faults.rows_of(state(type_=sf.F32), what)
    turns = np.arange(N)[:, None] // period
    text = rows[np.arange(N) % period] + 0.6 * turns * rows[np.arange(N) % period + period]
    reference = faults.put(state(type_=sf.F32), what, text.astype(np.float32))
    late = np.where(turns < 3, text, np.roll(text, period, axis=0))
    found = diff(faults.put(reference, what, late.astype(np.float32)), reference, tolerance=0.2)
    assert off(found) == {what: None}


def test_compare_without_causes_measures_only() -> None:
    """The figures are there, the search is left out."""
    plant, wanted = PLANTED["rope-twice"]
    found = diff(plant(state(), False), state(), causes=False)
    assert off(found) == dict.fromkeys(wanted)


def test_compare_equal_files_is_all_zero() -> None:
    """Nothing differs, and every value was looked at."""
    found = diff(state(), state())
    assert found.within
    assert found.compared_values == 2 * LAYERS * N * WIDTH
    assert {(t.max_abs, t.mean_abs, t.row_error, t.rms_error) for t in found.tensors} == {(0,) * 4}
    assert [t.cosine for t in found.tensors] == [pytest.approx(1.0)] * 2 * LAYERS
    assert {(t.first_off, t.head_scale, t.cause) for t in found.tensors} == {(None, 1.0, None)}
    assert found.notes == ()


def test_compare_figures_are_those_of_the_values() -> None:
    """Errors, cosine and positions are what they say, computed the plain way."""
    a = faults.plant(state(), "layer 2 K", faults.drifted(0.4))
    rows, wanted = (faults.rows_of(file, "layer 2 K").astype(float) for file in (a, state()))
    found = tensor(diff(a, state(), tolerance=0.45), "layer 2 K")
    norms = np.linalg.norm(wanted, axis=1)
    errors = np.linalg.norm(rows - wanted, axis=1) / np.maximum(
        norms, 0.1 * np.sqrt(np.mean(norms**2))
    )
    assert found.max_abs == pytest.approx(np.abs(rows - wanted).max())
    assert found.mean_abs == pytest.approx(np.abs(rows - wanted).mean())
    cosine = (rows * wanted).sum() / np.linalg.norm(rows) / np.linalg.norm(wanted)
    assert found.cosine == pytest.approx(cosine)
    assert found.row_error == pytest.approx(errors.max())
    assert found.rms_error == pytest.approx(np.sqrt(np.mean(errors**2)))
    assert found.worst_pos == errors.argmax()
    assert found.first_off == np.flatnonzero(errors > 0.45)[0]
    assert found.positions == N


def test_compare_row_of_next_to_nothing_is_held_against_the_size_of_the_others() -> None:
    """Rounding in a row that is nearly zero is no error, though it is as large as the row."""
    rows = faults.rows_of(state(), "layer 1 V")
    rows[0] *= 1e-4
    reference = faults.put(state(), "layer 1 V", rows)
    rows[0] *= 3
    assert diff(faults.put(state(), "layer 1 V", rows), reference, tolerance=0.01).within


def test_compare_uniform_error_below_the_tolerance_of_a_row_is_off() -> None:
    """A third of the tolerance on every row is not honest drift."""
    found = diff(faults.plant(state(), "layer 2 K", faults.drifted(0.3)), state(), tolerance=0.5)
    assert tensor(found, "layer 2 K").row_error < 0.5
    assert off(found) == {"layer 2 K": None}
    assert tensor(found, "layer 2 K").first_off is None


def test_compare_value_that_is_no_number_is_infinitely_off_and_noted() -> None:
    """One NaN does not hide in a mean, and the same NaN in both files is no difference."""
    spoiled = faults.plant(state(), "layer 1 V", faults.spoiled(9, np.inf))
    found = tensor(diff(spoiled, state()), "layer 1 V")
    assert (found.row_error, found.max_abs, found.mean_abs) == (np.inf,) * 3
    assert (found.worst_pos, found.first_off) == (9, 9)
    assert found.cosine == pytest.approx(1.0)
    assert off(diff(state(), spoiled)) != {}
    assert diff(spoiled, spoiled).within


def test_compare_ring_of_a_window_and_a_whole_cache_meet_by_position() -> None:
    """The last rows in another order, and fewer of them, are the same rows."""
    sections = [sf.Kv(2, width=WIDTH), sf.Kv(2, width=WIDTH)]
    whole = filled(sf.build(TOKENS, sections))
    order = [*range(50, 60), *range(40, 50)]
    ring = sf.build(TOKENS, [sections[0], dataclasses.replace(sections[1], pos=order)])
    for what in faults.blocks_of(whole):
        rows = faults.rows_of(whole, what)
        ring = faults.put(ring, what, rows[order] if "window" in what else rows)
    found = diff(ring, whole)
    assert (found.within, found.notes) == (True, ())
    assert {t.positions for t in found.tensors if t.section == "sliding window"} == {20}
    assert {t.max_abs for t in found.tensors} == {0}
    spoiled = faults.plant(whole, "sliding window layer 1 V", faults.zeroed(45, 45))
    bad = tensor(diff(ring, spoiled), "sliding window layer 1 V")
    assert (bad.worst_pos, bad.first_off) == (45, 45)


def test_compare_transposed_and_plain_values_are_the_same_and_noted() -> None:
    """Flash attention changes how V lies, not what it is."""
    rows = faults.rows_of(state(), "layer 1 V")
    transposed = state(v_trans=1)
    for what in faults.blocks_of(transposed):
        transposed = faults.put(transposed, what, faults.rows_of(state(), what))
    assert (faults.rows_of(transposed, "layer 1 V") == rows).all()
    found = diff(transposed, state())
    assert found.within
    assert {t.max_abs for t in found.tensors} == {0}
    assert ["transposed in the first file" in note for note in found.notes] == [True]


def test_compare_of_a_longer_prompt_compares_the_common_prefix_and_says_so() -> None:
    """Rows depend on what is before them only."""
    section = sf.Kv(2, width=WIDTH)
    longer = filled(sf.build([*TOKENS, 7, 8], [section]))
    shorter = sf.build(TOKENS[:40] + [1] * 20, [section])
    for what in faults.blocks_of(longer):
        shorter = faults.put(shorter, what, faults.rows_of(longer, what)[:N])
    shorter = faults.plant(shorter, "layer 1 K", faults.zeroed(40, N))
    found = diff(shorter, longer)
    assert found.within
    assert {t.positions for t in found.tensors} == {40}
    assert found.notes == (
        "the tokens differ from number 40 on: only positions 0 to 39 can be compared",
    )
    asked = diff(shorter, longer, positions=range(10, 40))
    assert ({t.positions for t in asked.tensors}, asked.notes) == ({30}, ())
    beyond = diff(shorter, longer, positions=range(10, 50))
    assert ({t.positions for t in beyond.tensors}, beyond.notes) == ({30}, found.notes)
    plain = diff(sf.build(TOKENS, [section]), sf.build([*TOKENS, 7], [section]))
    assert plain.notes == (
        "the files hold 60 and 61 tokens: only positions 0 to 59 can be compared",
    )


def test_compare_positions_restrict_what_is_looked_at() -> None:
    """A fault outside them does not count."""
    spoiled = faults.plant(state(), "layer 1 V", faults.zeroed(50, N))
    assert diff(spoiled, state(), positions=range(50)).within
    assert not diff(spoiled, state(), positions=range(51)).within


def build(*sections: sf.Kv | sf.Recr, tokens: Sequence[int] = TOKENS, **how: Any) -> bytes:
    """Return a file of these sections."""
    return sf.build(tokens, sections, **how)


KV = sf.Kv(2, width=WIDTH)


@pytest.mark.parametrize(
    ("a", "b", "says", "values"),
    [
        pytest.param(build(KV, tokens=[1, 2, 3]), build(KV), "no row can be", 0, id="other-tokens"),
        pytest.param(
            build(sf.Kv(3, width=WIDTH)), build(KV), "3 K and 3 V tensors in the first", 0,
            id="layers",
        ),
        pytest.param(
            build(dataclasses.replace(KV, pos=range(200, 260))), build(KV),
            "first file has 200 to 259, the second 0 to 59", 0, id="no-common-position",
        ),
        pytest.param(
            build(KV), build(sf.Kv(2, width=64)),
            "layer 1 V: 128 values a row (f16) in the first file, 64 (f16) in the second", 0,
            id="width",
        ),
        pytest.param(
            build(KV), build(KV, KV),
            "section sliding window: the second file alone has cells", 4 * N * WIDTH, id="section",
        ),
        pytest.param(
            build(KV, sf.Recr()), build(KV, sf.Recr(pos=50)),
            "recurrent state: no position to compare: the first file has 59 to 59, the second 50",
            4 * N * WIDTH, id="recurrent-position",
        ),
    ],
)  # fmt: skip
def test_compare_what_has_no_counterpart_is_noted_and_not_within(
    a: bytes, b: bytes, says: str, values: int
) -> None:
    """What cannot be compared is never passed over in silence."""
    found = diff(a, b)
    assert not found.within
    assert found.compared_values == values
    assert [note for note in found.notes if says in note]
    assert (found.worst is None) is (values == 0)


def test_compare_type_that_cannot_be_read_is_noted_and_not_within() -> None:
    """A tensor of an unknown type is one that was not compared."""
    unknown = bytearray(state())
    at = faults.blocks_of(state())["layer 1 K"].offset - 12
    unknown[at] = 14
    found = diff(bytes(unknown), state())
    assert found.notes == ("layer 1 K: values of type 14 cannot be read",)
    assert (found.within, len(found.tensors), off(found)) == (False, 2 * LAYERS - 1, {})


def test_compare_of_a_decoder_with_several_slots_takes_the_stream_that_has_cells() -> None:
    """Which slot a state was saved from does not matter."""
    one = filled(build(KV))
    other = build(dataclasses.replace(KV, streams=(0, N, 0)))
    for what in faults.blocks_of(one):
        other = faults.put(other, f"stream 1 {what}", faults.rows_of(one, what))
    found = diff(other, one)
    assert (found.within, found.compared_values) == (True, 4 * N * WIDTH)
    assert {t.max_abs for t in found.tensors} == {0}


def test_compare_recurrent_rows_are_compared_as_one_row_each() -> None:
    """R and S rows of the same position are held against each other."""
    file = build(sf.Recr(states=2, r_width=12, s_width=20))
    assert diff(file, file).within
    whats = [what for what in faults.blocks_of(file) if "S" in what]
    found = diff(faults.plant(file, whats[1], faults.drifted(1.0)), file)
    assert list(off(found)) == [whats[1]]
    assert {(t.part, t.layer, t.positions) for t in found.tensors} == {
        (part, layer, 1) for part in "RS" for layer in (0, 1)
    }


def test_compare_of_a_large_state_takes_little_memory() -> None:
    """What is held does not grow with the file."""
    tokens = range(5, 16005)
    file = sf.build(tokens, [sf.Kv(1, width=512)])
    ring = sf.build(tokens, [sf.Kv(1, width=512, v_trans=1)])
    parsed = parse(file), parse(ring)
    tracemalloc.start()
    try:
        found = compare(parsed[0], file, parsed[1], ring, head_dim=64, causes=False)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.compared_values == 2 * 16000 * 512
    assert len(file) > 31 << 20
    assert peak < 30 << 20, peak
