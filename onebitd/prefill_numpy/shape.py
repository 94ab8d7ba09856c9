"""What a model computes: its sizes and the choices of its architecture, from the GGUF's metadata.

Key and tensor names are llama.cpp's (`src/llama-arch.cpp`); what an architecture does with them is
in `src/models/llama.cpp`, `qwen3.cpp` and `gemma3.cpp` there. Whatever would change the numbers and
is not known here is refused: a wrong cache answers from another text, and nobody would see why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from onebitd.prefill_llama import EXIT_START, PrefillError
from onebitd.prefill_numpy.model_file import ModelFile
from onebitd.prefill_numpy.rope import Pairing, Rope

Activation: TypeAlias = Literal["silu", "gelu"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """How models of one name differ from the others.

    Attributes:
        pairing: which values of a head rope turns together. GGUFs of llama models hold Q and K with
            their rows reordered, so that neighbours belong together.
        activation: of the gate in the feed-forward part.
        scaled_embedding: token embeddings are multiplied by the root of the model's width.
        sliding_period: every so many-th layer sees the whole text, the others a window.
        sliding_rope_base: of the layers with a window.
    """

    pairing: Pairing
    activation: Activation = "silu"
    scaled_embedding: bool = False
    sliding_period: int | None = None
    sliding_rope_base: float = 10000.0


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture("adjacent"),
    "qwen3": Architecture("halves"),
    "gemma3": Architecture(
        "halves", activation="gelu", scaled_embedding=True, sliding_period=6
    ),
}  # fmt: skip

LAYER_TENSORS: Final = frozenset(
    ["attn_norm.weight", "attn_q_norm.weight", "attn_k_norm.weight", "post_attention_norm.weight"]
    + [f"attn_{part}.{kind}" for part in "qkv" for kind in ("weight", "bias")]
    + ["attn_output.weight", "attn_output.bias", "ffn_norm.weight", "post_ffw_norm.weight"]
    + [f"ffn_{part}.{kind}" for part in ("gate", "up", "down") for kind in ("weight", "bias")]
)
"""What a layer may have; anything else would be left out of the computation."""
_OTHER_TENSORS: Final = frozenset(
    ["token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight"]
)
_GEMMA3_27B_LAYERS: Final = 62
"""llama.cpp knows this size by its number of layers; its attention is scaled in its own way."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of one model.

    Attributes:
        n_embd: width of the hidden state.
        n_head, n_head_kv: heads of the queries, and of keys and values.
        head_k, head_v: values of one head.
        window: of the sliding layers, in tokens: a query sees itself and `window` - 1 before it.
        sliding: for each layer, whether it has the window.
        rope, sliding_rope: of the layers without a window, and with one.
    """

    architecture: str
    activation: Activation
    n_layer: int
    n_embd: int
    n_vocab: int
    n_head: int
    n_head_kv: int
    head_k: int
    head_v: int
    norm_eps: float
    embedding_scale: float
    attention_scale: float
    window: int
    sliding: tuple[bool, ...]
    rope: Rope
    sliding_rope: Rope

    @property
    def row_k(self) -> int:
        """Values in a row of K: one position, all heads."""
        return self.n_head_kv * self.head_k

    @property
    def row_v(self) -> int:
        """Values in a row of V."""
        return self.n_head_kv * self.head_v

    def layers(self, *, sliding: bool) -> list[int]:
        """Return the numbers of the layers with a window, or of those without."""
        return [number for number, kind in enumerate(self.sliding) if kind is sliding]


def read_shape(model: ModelFile) -> Shape:
    """Return what a model computes.

    Raises:
        PrefillError: status 3, an architecture, tensor or setting that is not known here.
    """
    keys = _Keys(model)
    known = ARCHITECTURES.get(keys.architecture)
    if known is None:
        raise keys.refuse(
            f"architecture {keys.architecture!r}; this engine knows {', '.join(ARCHITECTURES)}"
        )
    n_layer, n_embd = keys.count("block_count"), keys.count("embedding_length")
    n_head = keys.count("attention.head_count")
    head_k = keys.count("attention.key_length", n_embd // n_head)
    window, sliding = _windows(keys, known, n_layer)
    rope, sliding_rope = _ropes(keys, known, model, head_k)
    _refuse_unknown_tensors(keys, model, n_layer)
    return Shape(
        architecture=keys.architecture,
        activation=known.activation,
        n_layer=n_layer,
        n_embd=n_embd,
        n_vocab=model.dims("token_embd.weight")[1],
        n_head=n_head,
        n_head_kv=keys.count("attention.head_count_kv", n_head),
        head_k=head_k,
        head_v=keys.count("attention.value_length", n_embd // n_head),
        norm_eps=keys.real("attention.layer_norm_rms_epsilon"),
        embedding_scale=math.sqrt(n_embd) if known.scaled_embedding else 1.0,
        attention_scale=_attention_scale(keys.architecture, n_layer, n_embd, n_head, head_k),
        window=window,
        sliding=sliding,
        rope=rope,
        sliding_rope=sliding_rope,
    )


class _Keys:
    """The metadata of one model, by the second half of their names."""

    def __init__(self, model: ModelFile) -> None:
        self._model = model
        words = model.words("general.architecture")
        self.architecture = str(words[0]) if words else ""

    def refuse(self, what: str) -> PrefillError:
        return PrefillError(EXIT_START, f"model {self._model.path}: {what}")

    def has(self, name: str) -> bool:
        return bool(self._model.words(f"{self.architecture}.{name}"))

    def real(self, name: str, default: float | None = None) -> float:
        """Return a number; an array of one value for each layer must have one value only."""
        key = f"{self.architecture}.{name}"
        found = {word for word in self._model.words(key) if not isinstance(word, str)}
        if not found and default is not None:
            return default
        if len(found) != 1:
            raise self.refuse(f"{key}: one number is needed, it has {sorted(found) or 'none'}")
        return float(found.pop())

    def count(self, name: str, default: int | None = None) -> int:
        found = int(self.real(name, default))
        if found < 1:
            raise self.refuse(f"{self.architecture}.{name}: {found} cannot be")
        return found

    def text(self, name: str, default: str) -> str:
        words = self._model.words(f"{self.architecture}.{name}")
        return str(words[0]) if words else default


def _windows(keys: _Keys, known: Architecture, n_layer: int) -> tuple[int, tuple[bool, ...]]:
    window = int(keys.real("attention.sliding_window", 0))
    if known.sliding_period is None or window < 1:
        return 0, (False,) * n_layer
    if keys.has("attention.sliding_window_pattern"):
        raise keys.refuse("attention.sliding_window_pattern is set, which this engine cannot read")
    period = known.sliding_period
    return window, tuple(number % period < period - 1 for number in range(n_layer))


def _ropes(keys: _Keys, known: Architecture, model: ModelFile, head_k: int) -> tuple[Rope, Rope]:
    """Return the rope of the layers without a window, and of those with one."""
    dims = keys.count("rope.dimension_count", head_k)
    base = keys.real("rope.freq_base", 10000.0)
    kind = keys.text("rope.scaling.type", "linear")
    factor = keys.real("rope.scaling.factor", keys.real("rope.scale_linear", 1.0)) or 1.0
    if kind == "none":
        factor = 1.0
    elif kind != "linear":
        raise keys.refuse(f"rope scaling {kind!r} is not known here; linear and none are")
    factors = None
    if "rope_freqs.weight" in model.names:
        factors = tuple(model.tensor("rope_freqs.weight").tolist())
    if dims % 2 or dims > head_k or (factors is not None and len(factors) != dims // 2):
        raise keys.refuse(f"rope: {dims} values of {head_k} cannot be turned")
    sliding_base = keys.real("rope.freq_base_swa", known.sliding_rope_base)
    return (
        Rope(known.pairing, dims, base, factor, factors),
        Rope(known.pairing, dims, sliding_base, 1.0, None),
    )


def _attention_scale(
    architecture: str, n_layer: int, n_embd: int, n_head: int, head_k: int
) -> float:
    if architecture == "gemma3" and n_layer == _GEMMA3_27B_LAYERS:
        return 1.0 / math.sqrt(n_embd / n_head)
    return 1.0 / math.sqrt(head_k)


def _refuse_unknown_tensors(keys: _Keys, model: ModelFile, n_layer: int) -> None:
    layers = {f"blk.{number}" for number in range(n_layer)}
    for name in model.names:
        start, _, number = name.partition(".")
        prefix = f"{start}.{number.partition('.')[0]}"
        if name in _OTHER_TENSORS or (
            prefix in layers and name.removeprefix(f"{prefix}.") in LAYER_TENSORS
        ):
            continue
        raise keys.refuse(
            f"tensor {name} is not part of {keys.architecture} as this engine knows it"
        )
