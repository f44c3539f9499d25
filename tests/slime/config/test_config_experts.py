"""Tests flags of models with experts: the flags of slime's scripts, and errors with their reasons."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from config_cases import HF_CONFIG, good_argv, write_model

from slime.config.megatron_flags import layer_pattern
from slime.models import read_decoder
from slime.rules.model_args import check_model_args
from slime.rules.parser import parse_args

MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}
SLIME = (
    "--num-experts 8 --moe-ffn-hidden-size 96 --moe-router-topk 2 --moe-layer-freq [1,1,1,1] "
    "--moe-router-score-function softmax --moe-token-dispatcher-type alltoall --moe-grouped-gemm "
    "--moe-token-drop-policy probs --moe-router-dtype fp32 --moe-permute-fusion --moe-aux-loss-coeff 0 "
    "--moe-router-load-balancing-type none"
)
"""The MODEL_ARGS of slime's Qwen3-30B-A3B, with the numbers of this model; two ranks train it."""


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    flags = good_argv(tmp_path)
    write_model(tmp_path / "model", **MOE)
    return flags


def test_flags_of_the_script_are_taken_and_change_nothing_but_how(argv: list[str]) -> None:
    c = parse_args([*argv, *SLIME.split(), "--expert-model-parallel-size", "2"])
    assert c.megatron.overrides == {
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_dtype": "fp32",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_load_balancing_type": "none",
    }
    assert len(c.megatron.model_args) == 5 and c.megatron.expert_model_parallel_size == 2
    assert len([note for note in c.notes if "has no effect" in note and note.startswith("--moe-")]) == 3


GLM = {
    "model_type": "glm4_moe",
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "attention_bias": True,
    "use_qk_norm": False,
}
SLIME_GLM = (
    "--num-experts 8 --moe-ffn-hidden-size 96 --moe-shared-expert-intermediate-size 96 --moe-router-topk 2 "
    "--moe-layer-freq [0]*1+[1]*3 --moe-router-score-function sigmoid --moe-router-pre-softmax "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0 --moe-router-topk-scaling-factor 1.0 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-token-dispatcher-type alltoall --moe-grouped-gemm "
    "--moe-router-dtype fp32 --moe-permute-fusion --moe-aux-loss-coeff 0 --add-qkv-bias"
)
"""The expert flags of slime's script for GLM-4.5-Air, with the numbers of this model."""


def test_flags_of_the_script_of_glm_are_taken(argv: list[str], tmp_path: Path) -> None:
    write_model(tmp_path / "model", **GLM)
    c = parse_args([*argv, *SLIME_GLM.split()])
    assert c.megatron.overrides["moe_router_bias_update_rate"] == 0 and len(c.megatron.model_args) == 10
    for flags, message in (
        ("--moe-router-score-function softmax", "is softmax, config.json has sigmoid"),
        ("--moe-router-topk-scaling-factor 2.5", "is 2.5, config.json has 1.0"),
        ("--moe-layer-freq 1", "is [1, 1, 1, 1], config.json has [0, 1, 1, 1]"),
        ("--qk-layernorm", "is True, config.json has False"),
        ("--moe-router-num-groups 2", "is 2, config.json has 1"),
    ):
        with pytest.raises(ValueError) as error:
            parse_args([*argv, *flags.split()])
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-experts 16", "--num-experts is 16, config.json has 8"),
        ("--moe-ffn-hidden-size 128", "--moe-ffn-hidden-size is 128, config.json has 96"),
        ("--moe-router-topk 4", "--moe-router-topk is 4, config.json has 2"),
        ("--moe-layer-freq 2", "--moe-layer-freq is [1, 0, 1, 0], config.json has [1, 1, 1, 1]"),
        ("--moe-router-score-function sigmoid", "is sigmoid, config.json has softmax"),
        ("--moe-router-pre-softmax", "--moe-router-pre-softmax is True, config.json has False"),
        ("--moe-router-dtype fp64", "--moe-router-dtype must be fp32, got fp64"),
        ("--moe-router-load-balancing-type sinkhorn", "must be none or aux_loss or seq_aux_loss or global"),
        ("--moe-aux-loss-coeff 0.001", "--moe-aux-loss-coeff must be left out, got 0.001; the padding of"),
        ("--moe-expert-capacity-factor 1.5", "must be left out, got 1.5; a dropped token is not what the"),
        ("--moe-router-enable-expert-bias", "is True, config.json has False; correct or leave out"),
        ("--moe-shared-expert-intermediate-size 96", "-size is 96, config.json has None"),
        (
            "--moe-router-bias-update-rate 0.001",
            "must be left out, got 0.001; the engine's choice of experts",
        ),
        ("--moe-pad-expert-input-to-capacity", "got True; it was never run here with experts"),
        ("--tensor-model-parallel-size 2", "--sequence-parallel must be given for experts with"),
        ("--expert-model-parallel-size 3", "must divide the 8 experts of a layer, got 3"),
        (
            "--expert-model-parallel-size 4",
            "times ETP * PP must divide the number of trainer ranks, got 4 * 1 * 1 for 2",
        ),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2",
            "times ETP * PP must divide the number of trainer ranks, got 2 * 2 * 1 for 2",
        ),
        (
            "--expert-tensor-parallel-size 4",
            "times ETP * PP must divide the number of trainer ranks, got 1 * 4 * 1 for 2",
        ),
    ],
)
def test_refused_with_the_reason(argv: list[str], flags: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_args([*argv, *flags.split()])
    assert message in str(error.value)


def test_a_stage_without_experts_cannot_share_them(argv: list[str], tmp_path: Path) -> None:
    write_model(tmp_path / "model", **MOE, mlp_only_layers=[0, 1])
    argv[argv.index("--actor-num-gpus-per-node") + 1] = "4"
    argv += ["--pipeline-model-parallel-size", "2"]
    parse_args(argv)
    with pytest.raises(
        ValueError, match="^each pipeline stage must have a layer with experts .* on stage 0 of 2"
    ):
        parse_args([*argv, "--expert-model-parallel-size", "2"])


def test_experts_of_a_width_that_grouped_products_do_not_take(argv: list[str], tmp_path: Path) -> None:
    write_model(tmp_path / "model", **{**MOE, "moe_intermediate_size": 36})
    parse_args([*argv, "--fp32"])
    with pytest.raises(
        ValueError,
        match="must be a multiple of 8 in bfloat16 on each of 1 ranks .* got 36: 36 / 8 = 4.500; such",
    ):
        parse_args([*argv, "--bf16"])
    sequence = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    with pytest.raises(
        ValueError, match="of 4 in float32 on each of 2 ranks .* got 36: 36 / 8 = 4.500; share it among fewer"
    ):
        parse_args([*argv, "--fp32", *sequence])
    write_model(tmp_path / "model", **{**MOE, "hidden_size": 68})
    parse_args([*argv, "--fp32"])
    with pytest.raises(ValueError, match="hidden_size .* multiple of 8 in bfloat16 where .* got 68; such"):
        parse_args([*argv, "--bf16"])


def test_checkpoints_whose_experts_are_not_known(argv: list[str], tmp_path: Path) -> None:
    write_model(tmp_path / "model", **{**MOE, "model_type": "qwen3"})
    with pytest.raises(
        ValueError,
        match="^model_type in config.json must be that of a family with experts, got qwen3 with 8 experts",
    ):
        parse_args(argv)
    write_model(tmp_path / "model", model_type="qwen3_moe")
    with pytest.raises(
        ValueError, match="^config.json must give num_experts for model_type qwen3_moe, got none"
    ):
        parse_args(argv)
    assert read_decoder(HF_CONFIG).experts is None
    assert read_decoder(HF_CONFIG | MOE).experts.count == 8


def test_patterns_of_layers() -> None:
    assert [layer_pattern(text) for text in ("2", "[0, 1]", "[1]*3", "([0]*2 + [1, 0])")] == [
        2,
        [0, 1],
        [1, 1, 1],
        [0, 0, 1, 0],
    ]
    for text in ("", "[2]", "[1]*x", "__import__('os')"):
        with pytest.raises(ValueError, match="unknown pattern of layers"):
            layer_pattern(text)
    published = json.loads(json.dumps(HF_CONFIG | MOE | {"mlp_only_layers": [0]}))
    check_model_args({"moe_layer_freq": [0, 1, 1, 1]}, published)
    check_model_args({"moe_layer_freq": 1}, HF_CONFIG | MOE)
