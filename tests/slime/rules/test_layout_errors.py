"""Tests layouts that do not divide a family's parts: heads, latent heads, windows, experts. Each error shows the
division."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from config_cases import HF_CONFIG, good_argv

from slime.models import read_decoder
from slime.models.decoder import choose_exchange
from slime.rules.parser import parse_args

ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}
GROUPS = {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
DEEPSEEK = {"model_type": "deepseek_v3", "num_key_value_heads": 4, **LATENT, **ROUTED, **GROUPS}
MINIMAX = {"model_type": "minimax_m2", "num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 16}
NEXT = {"model_type": "qwen3_next", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
NEXT |= {"norm_topk_prob": True, "linear_num_key_heads": 3, "linear_num_value_heads": 6}
GEMMA = {"model_type": "gemma2", "query_pre_attn_scalar": 24, "sliding_window": 6}


@pytest.mark.parametrize(
    ("model", "flags", "message"),
    [
        ({}, "--tensor-model-parallel-size 3", "the 4 num_attention_heads, got 3: 4 / 3 = 1.333; use fewer"),
        (
            DEEPSEEK,
            "--tensor-model-parallel-size 8",
            "the 4 num_attention_heads, got 8: 4 / 8 = 0.500; use fewer",
        ),
        (
            MINIMAX,
            "--tensor-model-parallel-size 4",
            "the 2 num_key_value_heads that share a norm, got 4: 2 / 4 = 0",
        ),
        (
            NEXT,
            "--tensor-model-parallel-size 4",
            "2 num_key_value_heads of attention with an output gate, got 4: 2 /",
        ),
        (
            NEXT,
            "--tensor-model-parallel-size 2",
            "the 3 linear_num_key_heads, got 2 x 1: 3 / 2 = 1.500; use fewer",
        ),
        (
            NEXT,
            "--context-parallel-size 2",
            "the 3 linear_num_key_heads, got 1 x 2: 3 / 2 = 1.500; use fewer",
        ),
        (
            {},
            "--context-parallel-size 3 --cp-comm-type a2a",
            "divide the 4 query heads of a tensor-parallel rank, and divide or be a multiple of its "
            "2 heads of keys and values, with --cp-comm-type a2a, got 3; use --cp-comm-type all_gather or other",
        ),
        (
            DEEPSEEK,
            "--expert-model-parallel-size 3",
            "must divide the 8 experts of a layer, got 3: 8 / 3 = 2.667;",
        ),
        (
            DEEPSEEK | {"moe_intermediate_size": 12},
            "--expert-tensor-parallel-size 2",
            "a multiple of 4 in float32 on each of 2 ranks that share an expert, got 12: 12 / 8 = 1.500; share it",
        ),
        (
            GEMMA,
            "--pipeline-model-parallel-size 3",
            "deal the model's layers out equally, got 3 stages for 4 layers; change",
        ),
    ],
)
def test_the_division_is_shown(tmp_path: Path, model: dict[str, object], flags: str, message: str) -> None:
    argv = good_argv(tmp_path)
    (tmp_path / "model" / "config.json").write_text(json.dumps(HF_CONFIG | model))
    with pytest.raises(ValueError) as error:
        parse_args([*argv, *flags.split()])
    assert message in str(error.value)


def test_a_ring_is_taken_as_the_default(tmp_path: Path) -> None:
    """Three ranks gather keys and values of 4 heads without a flag, and two ranks exchange heads."""
    argv = [*good_argv(tmp_path), "--context-parallel-size", "2", "--cp-comm-type", "p2p"]
    config = parse_args(argv)
    assert config.megatron.cp_comm_type is None
    assert (
        "--cp-comm-type p2p is taken as the default: no ring is here, and the result is the same"
        in config.notes
    )
    decoder = read_decoder(HF_CONFIG)
    ways = {(tp, cp): choose_exchange(None, decoder, tp, cp) for tp in (1, 2) for cp in (2, 3, 4)}
    gathered = {layout for layout, way in ways.items() if way == "all_gather"}
    assert gathered == {(1, 3), (2, 3), (2, 4)}  # a tensor-parallel rank of two has 2 query heads


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (DEEPSEEK | {"n_group": 3}, "n_group in config.json must divide the 8 experts, got 3: 8 / 3 = 2.667"),
        (
            DEEPSEEK | {"n_group": 8, "topk_group": 1},
            r"topk_group in config.json must lie in \[1, 8\] and leave 2 experts to choose, got 1: 1 x 1 = 1",
        ),
        (DEEPSEEK | {"n_group": 4, "topk_group": 5}, r"topk_group in config.json must lie in \[1, 4\]"),
        (DEEPSEEK | {"num_experts_per_tok": 9}, r"num_experts_per_tok in config.json must lie in \[1, 8\]"),
        (GEMMA | {"sliding_window": 0}, "sliding_window in config.json must be at least 1 or null, got 0"),
        (
            GEMMA | {"layer_types": ["full_attention"] * 3},
            "layer_types in config.json must name .* for each of the 4 layers",
        ),
        (GEMMA | {"layer_types": ["chunked_attention"] * 4}, "layer_types .* got .'chunked_attention'"),
    ],
)
def test_files_whose_groups_or_windows_do_not_fit_are_errors(model: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_decoder(HF_CONFIG | model)
