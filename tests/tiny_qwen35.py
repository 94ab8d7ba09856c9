"""A tiny random hybrid whose attention has M-RoPE: qwen35, three layers of four a gated delta net.

Apart from that it is as the models of `tests.tiny_models`. Tensor and key names are llama.cpp's
(`src/models/qwen35.cpp`).
"""

from __future__ import annotations

from typing import Any

from tests.tiny_models import CONV, FFN, HEAD, HEADS, KV_HEADS, LAYERS, WIDTH, TinyModel

STATE, GROUPS, STEP = 16, 2, 4
KEYS, VALUES = STATE * GROUPS, STATE * STEP


def _fill(out: Any) -> None:
    out.heads()
    out.keys.add_key_length(HEAD)
    out.keys.add_value_length(HEAD)
    out.keys.add_rope_dimension_sections([2, 3, 3, 0])
    out.keys.add_ssm_conv_kernel(CONV)
    out.keys.add_ssm_inner_size(VALUES)
    out.keys.add_ssm_state_size(STATE)
    out.keys.add_ssm_time_step_rank(STEP)
    out.keys.add_ssm_group_count(GROUPS)
    out.ones("output_norm.weight", WIDTH)
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        out.ones(f"{prefix}attn_norm.weight", WIDTH)
        out.ones(f"{prefix}post_attention_norm.weight", WIDTH)
        if layer % 4 == 3:
            _attention(out, prefix)
        else:
            _delta_net(out, prefix)
        out.random(f"{prefix}ffn_gate.weight", WIDTH, FFN)
        out.random(f"{prefix}ffn_up.weight", WIDTH, FFN)
        out.random(f"{prefix}ffn_down.weight", FFN, WIDTH)


def _attention(out: Any, prefix: str) -> None:
    out.random(f"{prefix}attn_q.weight", WIDTH, 2 * HEADS * HEAD)  # with a gate
    out.random(f"{prefix}attn_k.weight", WIDTH, KV_HEADS * HEAD)
    out.random(f"{prefix}attn_v.weight", WIDTH, KV_HEADS * HEAD)
    out.random(f"{prefix}attn_output.weight", HEADS * HEAD, WIDTH)
    out.ones(f"{prefix}attn_q_norm.weight", HEAD)
    out.ones(f"{prefix}attn_k_norm.weight", HEAD)


def _delta_net(out: Any, prefix: str) -> None:
    out.random(f"{prefix}attn_qkv.weight", WIDTH, 2 * KEYS + VALUES)
    out.random(f"{prefix}attn_gate.weight", WIDTH, VALUES)
    out.random(f"{prefix}ssm_conv1d.weight", CONV, 2 * KEYS + VALUES, scale=0.3)
    # A slow decay, or the first tokens would be forgotten after a few more.
    out.random(f"{prefix}ssm_dt.bias", STEP, mean=-3.0)
    out.random(f"{prefix}ssm_a", STEP, scale=0.03, mean=-0.18)
    out.random(f"{prefix}ssm_beta.weight", WIDTH, STEP)
    out.random(f"{prefix}ssm_alpha.weight", WIDTH, STEP)
    out.ones(f"{prefix}ssm_norm.weight", STATE)
    out.random(f"{prefix}ssm_out.weight", VALUES, WIDTH)


QWEN35 = TinyModel("qwen35", "qwen35", "hybrid whose cells have two more coordinates", _fill)
