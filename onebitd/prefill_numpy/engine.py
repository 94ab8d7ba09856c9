"""The layers: token ids in, the rows of the cache out. All in float32.

One layer at a time, and within it `CHUNK` tokens at a time: a chunk's keys and values depend on
nothing behind it, so its hidden state can be replaced at once. Keys and values are rounded to the
cache's type before anything is computed with them, as the decoder will compute with them too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from onebitd.core.state_layout import Rows
from onebitd.core.state_values import decode, encode
from onebitd.prefill_llama import EXIT_PREFILL, EXIT_USAGE, PrefillError
from onebitd.prefill_numpy.attention import attend
from onebitd.prefill_numpy.model_file import Floats, ModelFile
from onebitd.prefill_numpy.shape import LAYER_TENSORS, Shape

CHUNK: Final = 512


@dataclass(frozen=True, slots=True)
class LayerRows:
    """One layer of the cache: for each position one row of K and one of V, in the cache's types."""

    k: bytes
    v: bytes


def prefill(
    model: ModelFile, shape: Shape, ids: Sequence[int], types: Sequence[tuple[int, int]]
) -> list[LayerRows]:
    """Evaluate the ids at positions 0 to N-1.

    Args:
        types: ggml's types of K and of V, for each layer: f32, f16 or bf16.

    Returns:
        the cache, layer by layer.

    Raises:
        PrefillError: status 2, an id that the model does not have; 4, a value that the cache's
            type cannot hold.
    """
    if max(ids) >= shape.n_vocab:
        raise PrefillError(
            EXIT_USAGE, f"token id {max(ids)}: the model has {shape.n_vocab}; is it its tokenizer?"
        )
    hidden = model.rows("token_embd.weight", ids) * np.float32(shape.embedding_scale)
    cache: list[LayerRows] = []
    for number in range(shape.n_layer):
        layer = Layer(model, shape, number)
        rows = layer.evaluate(hidden, types[number], last=number == shape.n_layer - 1)
        cache.append(rows)
    return cache


class Layer:
    """One layer's weights, and what is computed with them."""

    def __init__(self, model: ModelFile, shape: Shape, number: int) -> None:
        self._shape = shape
        self._number = number
        self._rope = shape.sliding_rope if shape.sliding[number] else shape.rope
        self._window = shape.window if shape.sliding[number] else 0
        here = [name for name in LAYER_TENSORS if f"blk.{number}.{name}" in model.names]
        self._weights: Mapping[str, Floats] = {
            name: model.tensor(f"blk.{number}.{name}") for name in here
        }

    def evaluate(self, hidden: Floats, types: tuple[int, int], *, last: bool) -> LayerRows:
        """Return the layer's rows of the cache, and replace the hidden state by the next one.

        Args:
            hidden: shape (tokens, n_embd). Of the last layer it is left as it is.
        """
        shape, n = self._shape, len(hidden)
        keys = np.empty((n, shape.n_head_kv, shape.head_k), np.float32)
        values = np.empty((n, shape.n_head_kv, shape.head_v), np.float32)
        k_rows, v_rows = bytearray(), bytearray()
        for start in range(0, n, CHUNK):
            chunk = hidden[start : start + CHUNK]
            stop = start + len(chunk)
            angles = self._rope.angles(start, stop)
            normed = self._norm("attn_norm", chunk)
            k = self._heads("k", normed, shape.n_head_kv)
            self._rope.turn(k, angles)
            v = self._heads("v", normed, shape.n_head_kv)
            keys[start:stop] = self._keep(k_rows, "K", types[0], k)
            values[start:stop] = self._keep(v_rows, "V", types[1], v)
            if last:
                continue
            q = self._heads("q", normed, shape.n_head)
            self._rope.turn(q, angles)
            gathered = attend(
                q, keys[:stop], values[:stop], start,
                scale=shape.attention_scale, window=self._window,
            )  # fmt: skip
            chunk += self._post("post_attention_norm", self._project("attn_output", gathered))
            chunk += self._post("post_ffw_norm", self._feed_forward(chunk))
        return LayerRows(bytes(k_rows), bytes(v_rows))

    def _heads(self, part: str, normed: Floats, n_head: int) -> Floats:
        """Return Q, K or V by head, before rope: shape (tokens, heads, values of a head)."""
        rows = self._project(f"attn_{part}", normed)
        heads = rows.reshape(len(rows), n_head, -1)
        if f"attn_{part}_norm.weight" in self._weights:
            return self._norm(f"attn_{part}_norm", heads)
        return heads

    def _keep(self, rows: bytearray, kind: str, type_: int, heads: Floats) -> Floats:
        """Append the heads to a cache's rows; return them as the decoder will read them."""
        encoded = encode(type_, heads.reshape(len(heads), -1))
        rows += encoded
        kept = decode(Rows(type_, len(encoded) // len(heads)), encoded, len(heads))
        if not np.isfinite(kept).all():
            raise PrefillError(
                EXIT_PREFILL,
                f"layer {self._number} {kind}: a value is not finite, or the cache's type cannot "
                "hold it; is this the model that the decoder has?",
            )
        return kept.reshape(heads.shape)

    def _feed_forward(self, hidden: Floats) -> Floats:
        normed = self._norm("ffn_norm", hidden)
        gate = self._project("ffn_gate", normed)
        gate *= _gelu_factor(gate) if self._shape.activation == "gelu" else _silu_factor(gate)
        gate *= self._project("ffn_up", normed)
        return self._project("ffn_down", gate)

    def _project(self, name: str, rows: Floats) -> Floats:
        found = rows @ self._weights[f"{name}.weight"].T
        if f"{name}.bias" in self._weights:
            found += self._weights[f"{name}.bias"]
        return found

    def _post(self, name: str, rows: Floats) -> Floats:
        """Apply a norm that some architectures have behind a part."""
        return self._norm(name, rows) if f"{name}.weight" in self._weights else rows

    def _norm(self, name: str, rows: Floats) -> Floats:
        """Divide by the root mean square of the last axis, and weigh.

        Of gemma models the GGUF holds the weights with their 1 added.
        """
        square = np.square(rows).mean(axis=-1, keepdims=True)
        if not np.isfinite(square).all():  # the rows would become zeros, which nothing else tells
            raise PrefillError(
                EXIT_PREFILL,
                f"layer {self._number}, {name}: what it is applied to is not finite; are the "
                "model's weights damaged?",
            )
        scale = 1.0 / np.sqrt(square + np.float32(self._shape.norm_eps))
        return np.asarray(rows * scale * self._weights[f"{name}.weight"], np.float32)


def _silu_factor(gate: Floats) -> Floats:
    with np.errstate(over="ignore"):  # exp of a large number: the factor is 0 then
        return np.asarray(1.0 / (1.0 + np.exp(-gate)), np.float32)


def _gelu_factor(gate: Floats) -> Floats:
    """Return what a value is multiplied by: the approximation with tanh, as ggml has it."""
    inner = np.float32(np.sqrt(2.0 / np.pi)) * gate * (1.0 + np.float32(0.044715) * gate * gate)
    return np.asarray(0.5 * (1.0 + np.tanh(inner)), np.float32)
