"""Qwen dense decoders: Qwen2 and Qwen2.5 (bias on q, k, v) and Qwen3 (RMSNorm on the heads of q and k)."""

from __future__ import annotations

from slime.megatron_backend.hf_weights.base import Direct, Family, GateUp, GroupedQkv, Row, Vocab

MG, HF = "decoder.layers.{i}.", "model.layers.{i}."


def _qkv(suffix: str) -> Row:
    names = tuple(f"{HF}self_attn.{x}_proj.{suffix}" for x in "qkv")
    return Row(f"{MG}self_attention.linear_qkv.{suffix}", names, GroupedQkv())


ROWS = (
    Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Vocab()),
    Row(MG + "input_layernorm.weight", (HF + "input_layernorm.weight",)),
    _qkv("weight"),
    _qkv("bias"),
    Row(MG + "self_attention.q_layernorm.weight", (HF + "self_attn.q_norm.weight",)),
    Row(MG + "self_attention.k_layernorm.weight", (HF + "self_attn.k_norm.weight",)),
    Row(MG + "self_attention.linear_proj.weight", (HF + "self_attn.o_proj.weight",), Direct(axis=1)),
    Row(MG + "pre_mlp_layernorm.weight", (HF + "post_attention_layernorm.weight",)),
    Row(MG + "mlp.linear_fc1.weight", (HF + "mlp.gate_proj.weight", HF + "mlp.up_proj.weight"), GateUp()),
    Row(MG + "mlp.linear_fc2.weight", (HF + "mlp.down_proj.weight",), Direct(axis=1)),
    Row("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Row("output_layer.weight", ("lm_head.weight",), Vocab()),
)
IGNORED = (HF + "self_attn.rotary_emb.inv_freq",)

QWEN2 = Family("qwen2", ROWS, qkv_bias=True, qk_norm=False, ignored=IGNORED)
QWEN3 = Family("qwen3", ROWS, qkv_bias=False, qk_norm=True, ignored=IGNORED)
