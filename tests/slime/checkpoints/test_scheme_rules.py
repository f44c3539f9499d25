"""Tests the rules and notes of a run whose checkpoint is quantised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES
from config_cases import good_argv, write_model

from slime.checkpoints.hf_files import write_tensors
from slime.rules import parse_args

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
GROUP = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": GROUP, "targets": ["Linear"]}},
    "ignore": ["lm_head"],
}


def argv(folder: Path, said: dict, *flags: str, **changes: object) -> list[str]:
    words = good_argv(folder)
    write_model(folder / "model", quantization_config=said, **changes)
    return [*words, *flags]


@pytest.mark.parametrize(
    ("said", "title"),
    [(FP8, "fp8 in blocks of 128 x 128"), (INT4, "int4 in groups of 32")],
    ids=["fp8", "int4"],
)
def test_a_run_is_accepted_and_a_correction_recommended(tmp_path, said, title):
    def noted(*flags: str) -> list[str]:
        return [note for note in parse_args(argv(tmp_path, said, *flags)).notes if "keep the weights" in note]

    (note,) = noted()
    assert note.startswith(
        f"the engines keep the weights of --hf-checkpoint in {title}, and the trainer has them in "
    )
    assert "; --use-tis weights the loss by the ratio" in note
    (corrected,) = noted("--use-tis")
    assert "; --use-tis" not in corrected
    if said is INT4:
        (rounded,) = noted("--round-weights")
        assert rounded.endswith(
            "the trainer rounds them in the same way (--round-weights), so their log-probs differ only by the order of "
            "sums"
        )
    assert noted("--debug-train-only") == []


@pytest.mark.parametrize("scheme", [FP8, INT4], ids=["fp8", "int4"])
def test_a_start_from_rounded_weights_is_noted(tmp_path, scheme):
    def noted(*flags: str) -> list[str]:
        return [
            note
            for note in parse_args(argv(tmp_path, scheme, *flags)).notes
            if "the trainer starts from weights in" in note
        ]

    (note,) = noted()
    assert "--dither-weights spreads them over their intervals, and --ref-load DIR starts from" in note
    assert noted("--dither-weights") == []
    assert noted("--lora-rank", "8") == []
    (merged,) = noted("--lora-rank", "8", "--lora-merge")
    assert "weights; --ref-load DIR starts from the model's plain weights" in merged
    write_tensors({"head": torch.zeros(1)}, write_model(tmp_path / "plain") / "model.safetensors")
    assert noted("--ref-load", str(tmp_path / "plain")) == []


@pytest.mark.parametrize(
    ("said", "flags", "changes", "message"),
    [
        (
            INT4,
            "",
            {"intermediate_size": 400},
            r"model.layers.0.mlp.down_proj.weight must be a matrix whose rows are whole groups of 32, got shape \[128, "
            r"400\]; leave the module out",
        ),
        (
            INT4,
            "",
            {"hidden_size": 144},
            r"model.layers.0.mlp.gate_proj.weight must be a matrix whose rows are whole groups of 32, got shape \[384",
        ),
        (
            FP8,
            "--rlk-consistency strict",
            {},
            "--rlk-consistency must be off or audit for a checkpoint in fp8 in blocks of 128 x 128, got strict",
        ),
        (
            {"quant_method": "awq", "bits": 4},
            "",
            {},
            "quantization_config in config.json must be fp8 with a weight_block_size, or compressed-tensors .* awq;",
        ),
        (
            FP8,
            "--round-weights",
            {},
            "QAT_FLAG\\) must come with a checkpoint in INT4, got fp8 in blocks of 128 x 128 in",
        ),
        (
            INT4,
            "--tensor-model-parallel-size 2 --sequence-parallel",
            {"intermediate_size": 416, "vocab_size": 64},
            "--tensor-model-parallel-size must leave whole groups of 32 of int4 in groups of 32 on each trainer rank, "
            "got 416 columns / 2 = 208 in model.layers.0.mlp.down_proj; use 1",
        ),
        (
            {},
            "--dither-weights",
            {},
            "--dither-weights must come with first weights in FP8 or INT4, got plain weights in .*; leave it out",
        ),
        (FP8, "--dither-weights --lora-rank 8", {}, "--lora-rank must be left out with --dither-weights, got 8;"),
        ({}, "--round-weights", {}, "must come with a checkpoint in INT4, got plain weights"),
        (INT4, "--round-weights --lora-rank 8", {}, "--lora-rank must be left out with --round-weights, got 8;"),
        (
            INT4,
            "--round-weights --transformer-impl transformer_engine --device cuda --bf16",
            {},
            "--transformer-impl must be local with --round-weights, got transformer_engine",
        ),
        (
            INT4,
            "--round-weights --debug-train-only --tensor-model-parallel-size 2 --sequence-parallel",
            {"intermediate_size": 416, "vocab_size": 64},
            "--tensor-model-parallel-size must leave whole groups of 32 of int4 in groups of 32 on each trainer rank",
        ),
        ({}, "--save-hf-format bf16", {}, "--save-hf must be given with --save-hf-format, got only --save-hf-format"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_an_error_in_one_line(tmp_path, said, flags, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        parse_args(argv(tmp_path, said, *flags.split(), **changes))
    assert "\n" not in str(error.value)


def test_a_group_that_does_not_divide_may_be_left_out_of_the_scheme(tmp_path):
    left_out = {**INT4, "ignore": ["lm_head", "re:.*mlp.down_proj"]}
    assert parse_args(argv(tmp_path, left_out, intermediate_size=400)).rollout.hf_checkpoint


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "",
            "--hf-checkpoint must hold weights that an update of the engines can bring, got quant_method mxfp4 in",
        ),
        (
            "--debug-train-only --save {tmp} --save-hf {tmp} --save-hf-format checkpoint",
            "--save-hf-format must be bf16 for a checkpoint in mxfp4, got checkpoint; no code writes weights",
        ),
    ],
)
def test_gpt_oss_in_mxfp4_is_only_read(tmp_path, flags, message):
    words = argv(tmp_path, {}, *flags.format(tmp=tmp_path / "out").split())
    hf = {"model_type": "gpt_oss", **ARCHITECTURES["gpt-oss-20b"].config_fields()}
    hf["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(hf))
    with pytest.raises(ValueError, match=message):
        parse_args(words)
