"""Converts config.json to TransformerConfig, and raises errors for unsupported settings."""

from __future__ import annotations

import json

import pytest
import torch
from megatron_cases import make_config

from slime.megatron_backend.model.model_config import (
    check_hf_config,
    load_hf_config,
    padded_vocab_size,
    params_dtype,
    transformer_config,
)
from slime.models import family_for, read_decoder

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 99,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
}


def test_fields_of_qwen3_and_qwen2():
    core = transformer_config(QWEN3, make_config())
    assert (core.num_layers, core.hidden_size, core.ffn_hidden_size) == (3, 64, 96)
    assert (core.num_attention_heads, core.num_query_groups, core.kv_channels) == (4, 2, 32)
    assert (core.qk_layernorm, core.add_qkv_bias, core.layernorm_epsilon) == (True, False, 1e-6)
    assert core.params_dtype == torch.float32 and not core.bf16 and core.calculate_per_token_loss
    qwen2 = {k: v for k, v in QWEN3.items() if k != "head_dim"} | {"model_type": "qwen2"}
    core = transformer_config(qwen2, make_config(params_dtype="bfloat16"))
    assert (core.qk_layernorm, core.add_qkv_bias, core.kv_channels, core.bf16) == (False, True, 16, True)


def test_flags_of_the_user_are_applied():
    overrides = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    core = transformer_config(QWEN3, make_config(overrides={**overrides, "overlap_grad_reduce": True}))
    assert (core.recompute_granularity, core.recompute_num_layers) == ("full", 1)


@pytest.mark.parametrize(
    "places",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ],
)
def test_rope_theta_from_old_and_new_files(places):
    assert read_decoder({k: v for k, v in QWEN3.items() if k != "rope_theta"} | places).ropes[0].theta == 5e5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "mamba"},
            r"model_type in config.json must be one of .*glm4, glm4_moe, .*, got 'mamba'",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4}},
            "must give original_max_position_embeddings for rope_type yarn, got none",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "must be one of default, linear, llama3, proportional, yarn, got 'dynamic'; its frequencies change with "
            "the length",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "warp": 3}},
            "rotary settings in config.json must be among .* for rope_type linear, got warp",
        ),
        ({"rope_scaling": {"rope_type": "spiral"}}, "got 'spiral'; it is not known"),
        (
            {"num_key_value_heads": 3},
            "num_key_value_heads in config.json must divide the 4 num_attention_heads, got 3: 4 / 3 = 1.333",
        ),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": None},
            "must divide hidden_size without head_dim, got 64 / 3 = 21.333",
        ),
        (
            {"model_type": "mistral", "sliding_window": 0},
            "sliding_window in config.json must be at least 1 or null",
        ),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config in config.json must be fp8 with a weight_block_size, .* got fp8",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor in config.json must be 1, got 0.5"),
        ({"use_sliding_window": True}, "use_sliding_window in config.json must be False, got True"),
        ({"hidden_act": "gelu"}, "hidden_act in config.json must be silu, got gelu"),
        ({"attention_bias": True}, "attention_bias in config.json must be False, got True"),
    ],
)
def test_unsupported_architectures_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        check_hf_config({**QWEN3, **change})


def test_missing_keys_and_files(tmp_path):
    with pytest.raises(ValueError, match="config.json must give vocab_size"):
        check_hf_config({k: v for k, v in QWEN3.items() if k != "vocab_size"})
    with pytest.raises(ValueError, match="--hf-checkpoint must be a directory with a config.json"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="must hold a valid config.json"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    assert load_hf_config(tmp_path) == QWEN3


def test_padded_vocab_and_dtype():
    assert padded_vocab_size(99, 128, 1) == 128
    assert padded_vocab_size(128, 128, 2) == 256
    assert padded_vocab_size(151936, 128, 1) == 151936
    with pytest.raises(ValueError, match="parameters must be float32 or bfloat16, got float16"):
        params_dtype(make_config(params_dtype="float16"))


def test_family_finds_rows_and_ignores():
    family = family_for(QWEN3)
    _, names = family.find("decoder.layers.12.mlp.linear_fc1.weight")
    assert names == ("model.layers.12.mlp.gate_proj.weight", "model.layers.12.mlp.up_proj.weight")
    assert family.ignores("model.layers.3.self_attn.rotary_emb.inv_freq")
    assert not family.ignores("model.layers.3.mlp.gate_proj.weight")
    with pytest.raises(KeyError, match="decoder.layers.0.mlp.router.weight has no row in the qwen3 table"):
        family.find("decoder.layers.0.mlp.router.weight")
