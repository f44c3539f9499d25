"""Qwen dense decoders: Qwen2 and Qwen2.5 (bias on q, k, v) and Qwen3 (RMSNorm on the heads of q and k)."""

from __future__ import annotations

from slime.megatron_backend.hf_weights.base import Direct, Family, GateUp, GroupedQkv, Row, Vocab

_MG, _HF = "decoder.layers.{i}.", "model.layers.{i}."


def _qkv(suffix: str) -> Row:
    names = tuple(f"{_HF}self_attn.{x}_proj.{suffix}" for x in "qkv")
    return Row(f"{_MG}self_attention.linear_qkv.{suffix}", names, GroupedQkv())


_ROWS = (
    Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Vocab()),
    Row(_MG + "input_layernorm.weight", (_HF + "input_layernorm.weight",)),
    _qkv("weight"),
    _qkv("bias"),
    Row(_MG + "self_attention.q_layernorm.weight", (_HF + "self_attn.q_norm.weight",)),
    Row(_MG + "self_attention.k_layernorm.weight", (_HF + "self_attn.k_norm.weight",)),
    Row(_MG + "self_attention.linear_proj.weight", (_HF + "self_attn.o_proj.weight",), Direct(axis=1)),
    Row(_MG + "pre_mlp_layernorm.weight", (_HF + "post_attention_layernorm.weight",)),
    Row(_MG + "mlp.linear_fc1.weight", (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"), GateUp()),
    Row(_MG + "mlp.linear_fc2.weight", (_HF + "mlp.down_proj.weight",), Direct(axis=1)),
    Row("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Row("output_layer.weight", ("lm_head.weight",), Vocab()),
)
_IGNORED = (_HF + "self_attn.rotary_emb.inv_freq",)

QWEN2 = Family("qwen2", _ROWS, qkv_bias=True, qk_norm=False, ignored=_IGNORED)
QWEN3 = Family("qwen3", _ROWS, qkv_bias=False, qk_norm=True, ignored=_IGNORED)
