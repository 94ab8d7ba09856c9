"""The parts of onebit-prefill-numpy by themselves: what it refuses, rope, attention, layouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from onebitd.core import state_file
from onebitd.core.state_layout import KvSection
from onebitd.prefill_llama import PrefillError
from onebitd.prefill_numpy import attention, layout
from onebitd.prefill_numpy.engine import LayerRows
from onebitd.prefill_numpy.model_file import Floats, ModelFile
from onebitd.prefill_numpy.rope import Pairing, Rope
from onebitd.prefill_numpy.shape import Shape, read_shape
from tests.core.state_files import BF16, F32, Q8_0, Kv, Recr, build
from tests.tiny_models import HEAD, KV_HEADS, LAYERS, TINY_MODELS, WIDTH, TinyModel, _Writer, write

QWEN3 = next(model for model in TINY_MODELS if model.name == "qwen3")
ROW = KV_HEADS * HEAD


def with_more(more: Callable[[_Writer], None], architecture: str = "qwen3") -> TinyModel:
    """Return the tiny qwen3 with more keys or tensors."""

    def fill(out: _Writer) -> None:
        QWEN3.fill(out)
        more(out)

    return TinyModel("more", architecture, "", fill)


def shape_of(folder: Path, model: TinyModel = QWEN3) -> Shape:
    """Return the shape of a model that is written to the folder."""
    return read_shape(ModelFile(str(write(model, folder).path)))


def refusal(folder: Path, model: TinyModel) -> str:
    """Return what is said about a model that is refused, with status 3."""
    with pytest.raises(PrefillError) as caught:
        shape_of(folder, model)
    assert caught.value.exit_status == 3
    return str(caught.value)


# --- models -------------------------------------------------------------------------------------


def test_shape_of_another_architecture_is_refused_with_those_that_are_known(
    tmp_path: Path,
) -> None:
    """A hybrid model is named, and what could be served instead."""
    said = refusal(tmp_path, next(model for model in TINY_MODELS if model.name == "lfm2"))
    assert "architecture 'lfm2'; this engine knows llama, qwen3, gemma3" in said


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            lambda out: out.keys.add_rope_scaling_type(gguf.RopeScalingType.YARN),
            "rope scaling 'yarn' is not known here; linear and none are",
        ),
        (
            lambda out: out.random("blk.1.ffn_gate_inp.weight", WIDTH, 4),
            "tensor blk.1.ffn_gate_inp.weight is not part of qwen3",
        ),
        (lambda out: out.random("rope_freqs.weight", 3), "rope: 16 values of 16 cannot be turned"),
        (
            lambda out: out.random("cls.weight", WIDTH, 4),
            "tensor cls.weight is not part of qwen3",
        ),
    ],
    ids=["yarn", "experts", "rope-factors", "head"],
)
def test_shape_of_a_model_with_more_than_is_computed_is_refused(
    more: Callable[[_Writer], None], said: str, tmp_path: Path
) -> None:
    """What would be left out of the computation is never left out silently."""
    assert said in refusal(tmp_path, with_more(more))


def test_shape_of_gemma3_has_a_window_in_five_layers_of_six(tmp_path: Path) -> None:
    """Sliding layers have a rope of their own, whatever the scaling of the others is."""

    def more(out: _Writer) -> None:
        out.keys.add_sliding_window(64)
        out.keys.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        out.keys.add_rope_scaling_factor(8.0)

    shape = shape_of(tmp_path, with_more(more, "gemma3"))
    assert (shape.window, shape.sliding) == (64, (True,) * LAYERS)
    assert (shape.rope.factor, shape.sliding_rope.factor) == (8.0, 1.0)
    assert (shape.embedding_scale, shape.activation) == (math.sqrt(WIDTH), "gelu")
    assert shape.attention_scale == HEAD**-0.5


def test_model_file_cut_short_is_refused_not_read(tmp_path: Path) -> None:
    """A download that stopped in the middle of the weights is told, tensor by name."""
    path = write(QWEN3, tmp_path).path
    path.write_bytes(path.read_bytes()[:-1000])
    model = ModelFile(str(path))
    with pytest.raises(PrefillError, match="does not fit the file; fetch it again") as caught:
        model.tensor(model.names[-1])
    assert caught.value.exit_status == 2


# --- arithmetic ---------------------------------------------------------------------------------


@pytest.mark.parametrize("pairing", ["adjacent", "halves"])
def test_rope_turns_pairs_by_the_position_and_leaves_the_rest(pairing: Pairing) -> None:
    """Against complex numbers, one pair at a time; values behind `dims` stay."""
    factors = (1.0, 2.0, 4.0)
    rope = Rope(pairing, 6, 100.0, 2.0, factors)
    rows = np.random.default_rng(1).standard_normal((3, 2, 8)).astype(np.float32)
    turned = rows.copy()
    rope.turn(turned, rope.angles(5, 8))
    for pair in range(3):
        first, second = (2 * pair, 2 * pair + 1) if pairing == "adjacent" else (pair, pair + 3)
        for number in range(3):
            angle = (5 + number) / 2.0 * 100.0 ** (-2 * pair / 6) / factors[pair]
            was = rows[number, :, first] + 1j * rows[number, :, second]
            found = turned[number, :, first] + 1j * turned[number, :, second]
            assert np.allclose(found, was * np.exp(1j * angle), atol=1e-6)
    assert (turned[..., 6:] == rows[..., 6:]).all()


@pytest.mark.parametrize("window", [0, 1, 7, 100])
@pytest.mark.parametrize("start", [0, 9])
def test_attend_in_blocks_is_attention_by_the_definition(
    window: int, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Query by query, with two heads for each head of the keys; blocks of three queries."""
    monkeypatch.setattr(attention, "MAX_SCORES", 3 * 2 * (start + 11))
    rng = np.random.default_rng(2)

    def random(*shape: int) -> Floats:
        return rng.standard_normal(shape).astype(np.float32)

    queries, keys, values = random(11, 4, 8), random(start + 11, 2, 8), random(start + 11, 2, 5)
    found = attention.attend(queries, keys, values, start, scale=0.3, window=window)
    for number in range(11):
        last = start + number
        seen = slice(max(0, last - window + 1) if window else 0, last + 1)
        for head in range(4):
            scores = keys[seen, head // 2] @ queries[number, head] * 0.3
            weights = np.exp(scores - scores.max())
            expected = weights / weights.sum() @ values[seen, head // 2]
            assert np.allclose(found[number, 5 * head : 5 * head + 5], expected, atol=1e-5)


# --- layouts ------------------------------------------------------------------------------------


def example(folder: Path, *sections: Kv | Recr) -> str:
    """Write a decoder's example and return its path."""
    path = folder / "example.state"
    path.write_bytes(build([1, 2, 3], sections, version=4))
    return str(path)


OURS = Kv(layers=LAYERS, width=ROW)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ((replace(OURS, k_type=Q8_0),), "attention layer 0 K is q8_0; this engine writes f32"),
        ((replace(OURS, v_type=Q8_0),), "attention layer 0 V is q8_0"),
        ((replace(OURS, width=64),), "attention layer 0 K: 128 bytes a position, the model has 64"),
        ((replace(OURS, layers=3),), "section attention: 3 layers, the model has 4"),
        ((replace(OURS, has_v=False),), "section attention: it has no V"),
        ((replace(OURS, n_rot=(16, 16)),), "section attention: its rows are rotated"),
        ((OURS, OURS), "it has 2 sections, qwen3 has 1"),
        ((OURS, Recr()), "it has 2 sections, qwen3 has 1"),
        ((Recr(),), "it has a recurrent state"),
    ],
    ids=["k", "v", "width", "layers", "no-v", "rotated", "two", "hybrid", "recurrent"],
)
def test_read_layout_of_a_cache_that_cannot_be_written_is_refused(
    sections: tuple[Kv | Recr, ...], said: str, tmp_path: Path
) -> None:
    """Status 6 and a sentence; a file that the decoder refuses is not written."""
    with pytest.raises(PrefillError) as caught:
        layout.read_layout(example(tmp_path, *sections), shape_of(tmp_path))
    assert caught.value.exit_status == 6
    assert said in str(caught.value)


def test_tensor_data_follows_the_examples_types_and_transposition(tmp_path: Path) -> None:
    """K as rows of bf16, V by channels of f32, each with the values that were computed."""
    shape = shape_of(tmp_path)
    path = example(tmp_path, replace(OURS, k_type=BF16, v_type=F32, v_trans=1))
    found = layout.read_layout(path, shape)
    assert layout.layer_types(found, shape) == [(BF16, F32)] * LAYERS
    values = np.arange(5 * ROW, dtype=np.float32).reshape(5, ROW)
    cache = [LayerRows(bytes([n]) * (5 * ROW * 2), values.tobytes()) for n in range(LAYERS)]
    data = [bytes(piece) for piece in layout.tensor_data(found, shape, cache, 5, None)]
    assert data[:LAYERS] == [rows.k for rows in cache]
    assert data[LAYERS:] == [values.T.tobytes()] * LAYERS


def test_tensor_data_of_a_window_is_the_last_cells(tmp_path: Path) -> None:
    """The sliding section has fewer rows, the others all; layers come section by section."""

    def more(out: _Writer) -> None:
        out.keys.add_sliding_window(2)

    shape = shape_of(tmp_path, with_more(more, "gemma3"))
    shape = replace(shape, sliding=(True, False, True, True))
    found = layout.default_layout(shape, 4)
    assert [len(s.k) for s in found.sections if isinstance(s, KvSection)] == [1, 3]
    rows = 2 * ROW
    cache = [LayerRows(b"k%d" % n * 5 * ROW, b"v%d" % n * 5 * ROW) for n in range(LAYERS)]
    sizes = [len(piece) for piece in layout.tensor_data(found, shape, cache, 5, 3)]
    assert sizes == [5 * rows] * 2 + [3 * rows] * 6
    first = [bytes(piece[:2]) for piece in layout.tensor_data(found, shape, cache, 5, 3)]
    assert first == [b"k1", b"v1", b"k0", b"k2", b"k3", b"v0", b"v2", b"v3"]


def test_default_layout_is_what_a_decoder_of_that_version_writes(tmp_path: Path) -> None:
    """Without an example: f16, flash attention, and no rotation where the version records it."""
    shape = shape_of(tmp_path)
    for version in (2, 3, 4):
        state = state_file.parse(build([1, 2, 3], [OURS], version=version, packed=False))
        assert layout.default_layout(shape, version) == state.layout
