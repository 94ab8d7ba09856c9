"""Tiny random models, one for each kind of memory that llama.cpp has; written in a second.

A real hybrid or recurrent model is gigabytes. What a handoff has to carry over depends on the kind
of memory alone, so four layers of random weights do: loading takes 50 ms, a prompt of 700 tokens
about 100 ms. The weights are the same in every run. The replies are noise, but noise that depends
on the whole prompt, so a cache that is wrong anywhere changes them.

The vocabulary is two control tokens, the printable ASCII characters, a newline and a few merges:
every reply is ASCII text, and a prompt has about as many tokens as letters. The chat template
puts the contents of the messages one after the other.

Tensor and key names are llama.cpp's (`src/llama-arch.cpp`, `src/models/`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import gguf
import numpy as np

from tests.llama_builds import LlamaModel

LAYERS = 4
WIDTH = 64
HEADS, KV_HEADS, HEAD = 4, 2, 16
FFN = 128
INNER, STATE, CONV, STEP = 128, 16, 4, 4  # of mamba
LATENT, ROPE = 32, 16  # of MLA
CTX_SIZE = 2048
WINDOW = 192
"""The sliding window, in tokens, of `lfm2-swa`."""

_CONTROL = ["<s>", "</s>"]
_MERGES = ["t h", "th e", "Ġ the", "i n", "a n"]
_CHARACTERS = ["Ġ", "Ċ", *(chr(code) for code in range(33, 127))]
VOCABULARY = [*_CONTROL, *_CHARACTERS, *(merge.replace(" ", "") for merge in _MERGES)]
"""The tokens, in the order of their ids, as a byte-level BPE spells them (Ġ is the space)."""


@dataclass(frozen=True)
class TinyModel:
    """One model; `memory` is its kind in words, `fill` writes its keys and tensors."""

    name: str
    architecture: str
    memory: str
    fill: Callable[[_Writer], None]


class _Writer:
    """A GGUF in the making; shapes are given in llama.cpp's order, the row's length first."""

    def __init__(self, path: Path, architecture: str) -> None:
        self.keys = gguf.GGUFWriter(path, architecture)
        self._rng = np.random.default_rng(1)

    def random(self, name: str, *shape: int, scale: float = 0.1, mean: float = 0.0) -> None:
        """Add normally distributed values; these keep activations near one."""
        self._add(name, self._rng.standard_normal(shape[::-1]) * scale + mean)

    def ones(self, name: str, *shape: int) -> None:
        """Add the weights of a norm."""
        self._add(name, np.ones(shape[::-1]))

    def _add(self, name: str, values: np.typing.NDArray[np.float64]) -> None:
        self.keys.add_tensor(name, values.astype(np.float32))

    def heads(self, counts: int | Sequence[int] = KV_HEADS) -> None:
        """Add the keys that every model with attention has."""
        self.keys.add_feed_forward_length(FFN)
        self.keys.add_head_count(HEADS)
        self.keys.add_head_count_kv(counts if isinstance(counts, int) else list(counts))
        self.keys.add_rope_freq_base(10000.0)

    def feed_forward(self, layer: int) -> None:
        """Add a layer's feed-forward part."""
        self.ones(f"blk.{layer}.ffn_norm.weight", WIDTH)
        self.random(f"blk.{layer}.ffn_gate.weight", WIDTH, FFN)
        self.random(f"blk.{layer}.ffn_up.weight", WIDTH, FFN)
        self.random(f"blk.{layer}.ffn_down.weight", FFN, WIDTH)

    def attention(self, layer: int, *, bias: bool = False, norms: bool = False) -> None:
        """Add a layer's projections, with their biases or the norms of Q and K."""
        for letter, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            self.random(f"blk.{layer}.attn_{letter}.weight", WIDTH, heads * HEAD)
            if bias:
                self.random(f"blk.{layer}.attn_{letter}.bias", heads * HEAD)
            if norms and letter != "v":
                self.ones(f"blk.{layer}.attn_{letter}_norm.weight", HEAD)
        self.random(f"blk.{layer}.attn_output.weight", HEADS * HEAD, WIDTH)

    def close(self) -> None:
        """Write it all to the file."""
        self.keys.write_header_to_file()
        self.keys.write_kv_data_to_file()
        self.keys.write_tensors_to_file()
        self.keys.close()


_Fill: TypeAlias = Callable[[_Writer], None]


def _qwen3(out: _Writer) -> None:
    out.heads()
    out.keys.add_key_length(HEAD)
    out.keys.add_value_length(HEAD)
    out.ones("output_norm.weight", WIDTH)
    for layer in range(LAYERS):
        out.ones(f"blk.{layer}.attn_norm.weight", WIDTH)
        out.attention(layer, norms=True)
        out.feed_forward(layer)


def _qwen2vl(out: _Writer) -> None:
    out.heads()
    out.keys.add_rope_dimension_sections([2, 3, 3, 0])
    out.ones("output_norm.weight", WIDTH)
    for layer in range(LAYERS):
        out.ones(f"blk.{layer}.attn_norm.weight", WIDTH)
        out.attention(layer, bias=True)
        out.feed_forward(layer)


def _lfm2(window: int | None) -> _Fill:
    def fill(out: _Writer) -> None:
        out.heads([KV_HEADS if layer % 2 else 0 for layer in range(LAYERS)])
        out.keys.add_shortconv_l_cache(3)
        if window is not None:
            out.keys.add_sliding_window(window)
        out.ones("token_embd_norm.weight", WIDTH)
        for layer in range(LAYERS):
            out.ones(f"blk.{layer}.attn_norm.weight", WIDTH)
            out.feed_forward(layer)
            if layer % 2:
                out.attention(layer, norms=True)
                continue
            out.random(f"blk.{layer}.shortconv.conv.weight", 3, WIDTH)
            out.random(f"blk.{layer}.shortconv.in_proj.weight", WIDTH, 3 * WIDTH)
            out.random(f"blk.{layer}.shortconv.out_proj.weight", WIDTH, WIDTH)

    return fill


def _mamba(out: _Writer) -> None:
    out.keys.add_feed_forward_length(0)
    out.keys.add_head_count(0)
    out.keys.add_ssm_conv_kernel(CONV)
    out.keys.add_ssm_inner_size(INNER)
    out.keys.add_ssm_state_size(STATE)
    out.keys.add_ssm_time_step_rank(STEP)
    out.ones("output_norm.weight", WIDTH)
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        out.ones(f"{prefix}attn_norm.weight", WIDTH)
        out.random(f"{prefix}ssm_in.weight", WIDTH, 2 * INNER, scale=0.3)
        out.random(f"{prefix}ssm_conv1d.weight", CONV, INNER)
        out.random(f"{prefix}ssm_conv1d.bias", INNER)
        out.random(f"{prefix}ssm_x.weight", INNER, STEP + 2 * STATE, scale=0.3)
        out.random(f"{prefix}ssm_dt.weight", STEP, INNER)
        # Short steps and a slow decay, or the first tokens would be forgotten after a few more.
        out.random(f"{prefix}ssm_dt.bias", INNER, mean=-3.0)
        out.random(f"{prefix}ssm_a", STATE, INNER, scale=0.03, mean=-0.18)
        out.random(f"{prefix}ssm_d", INNER)
        out.random(f"{prefix}ssm_out.weight", INNER, WIDTH, scale=0.3)


def _deepseek2(out: _Writer) -> None:
    out.heads(1)
    out.keys.add_leading_dense_block_count(LAYERS)
    out.keys.add_expert_feed_forward_length(FFN)
    out.keys.add_expert_shared_count(0)
    out.keys.add_expert_count(0)
    out.keys.add_expert_used_count(0)
    out.keys.add_expert_weights_scale(1.0)
    out.keys.add_q_lora_rank(LATENT)
    out.keys.add_kv_lora_rank(LATENT)
    out.keys.add_key_length(LATENT + ROPE)
    out.keys.add_value_length(LATENT)
    out.keys.add_key_length_mla(HEAD + ROPE)
    out.keys.add_value_length_mla(HEAD)
    out.keys.add_rope_dimension_count(ROPE)
    out.ones("output_norm.weight", WIDTH)
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        out.ones(f"{prefix}attn_norm.weight", WIDTH)
        out.random(f"{prefix}attn_q_a.weight", WIDTH, LATENT)
        out.ones(f"{prefix}attn_q_a_norm.weight", LATENT)
        out.random(f"{prefix}attn_q_b.weight", LATENT, HEADS * (HEAD + ROPE))
        out.random(f"{prefix}attn_kv_a_mqa.weight", WIDTH, LATENT + ROPE)
        out.ones(f"{prefix}attn_kv_a_norm.weight", LATENT)
        out.random(f"{prefix}attn_k_b.weight", HEAD, LATENT, HEADS)
        out.random(f"{prefix}attn_v_b.weight", LATENT, HEAD, HEADS)
        out.random(f"{prefix}attn_output.weight", HEADS * HEAD, WIDTH)
        out.feed_forward(layer)


TINY_MODELS = (
    TinyModel("qwen3", "qwen3", "plain attention", _qwen3),
    TinyModel("qwen2vl", "qwen2vl", "attention whose cells have two more coordinates", _qwen2vl),
    TinyModel("deepseek2", "deepseek2", "latent attention: no V in the cache", _deepseek2),
    TinyModel("lfm2", "lfm2", "hybrid: attention and recurrent state", _lfm2(None)),
    TinyModel("lfm2-swa", "lfm2", "hybrid whose attention has a sliding window", _lfm2(WINDOW)),
    TinyModel("mamba", "mamba", "recurrent state alone", _mamba),
)


def write(model: TinyModel, folder: Path) -> LlamaModel:
    """Write `folder/NAME.gguf` (about 1 MB) unless it is there; the caller owns the folder.

    The model returned says `swa=False`: whoever runs it passes --swa-full or does not.
    """
    path = folder / f"{model.name}.gguf"
    if not path.exists():
        out = _Writer(path, model.architecture)
        _add_common(out)
        model.fill(out)
        out.close()
    return LlamaModel(model.name, path, swa=False)


def _add_common(out: _Writer) -> None:
    keys = out.keys
    keys.add_tokenizer_model("gpt2")
    keys.add_tokenizer_pre("gpt-2")
    keys.add_token_list(VOCABULARY)
    control, normal = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
    ordinary = len(VOCABULARY) - len(_CONTROL)
    keys.add_token_types([control] * len(_CONTROL) + [normal] * ordinary)
    keys.add_token_merges(_MERGES)
    keys.add_bos_token_id(0)
    keys.add_eos_token_id(1)
    keys.add_add_bos_token(False)
    keys.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")
    keys.add_context_length(CTX_SIZE)
    keys.add_embedding_length(WIDTH)
    keys.add_block_count(LAYERS)
    keys.add_layer_norm_rms_eps(1e-5)
    keys.add_vocab_size(len(VOCABULARY))
    out.random("token_embd.weight", WIDTH, len(VOCABULARY))
