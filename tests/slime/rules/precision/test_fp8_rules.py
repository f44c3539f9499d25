"""Tests the rules and notes of --fp8-recipe blockwise."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from architectures import ARCHITECTURES
from config_cases import good_argv, write_model

from slime.config.schema import Config
from slime.rules import parse_args
from slime.rules.precision.fp8 import require_fp8_cards

BLOCKS = "--fp8-format e4m3 --fp8-recipe blockwise"
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}


def parsed(folder: Path, flags: str, **changes: Any) -> Config:
    words = good_argv(folder)
    write_model(folder / "model", **{**SIZES, **changes})
    return parse_args([*words, *flags.split()])


def test_the_trainers_own_layers_compute_in_fp8(tmp_path: Path) -> None:
    config = parsed(tmp_path, f"{BLOCKS} --transformer-impl transformer_engine --force-fp8-ue8m0-scale")
    assert config.megatron.has_fp8_blocks and config.megatron.force_fp8_ue8m0_scale
    assert "transformer_impl" not in config.megatron.overrides
    found = [note.partition(":")[0] for note in config.notes if "blockwise" in note]
    assert found == ["--transformer-impl transformer_engine", "--fp8-recipe blockwise"]
    assert [config.megatron.computes_in_fp8(layer, 4) for layer in range(4)] == [True] * 4


@pytest.mark.parametrize(
    ("scale_fmt", "flag", "said"),
    [("ue8m0", "", "give the flag"), (None, "--force-fp8-ue8m0-scale", "leave the flag out"), (None, "", "")],
)
def test_other_scales_than_those_of_the_engines_are_noted(
    tmp_path: Path, scale_fmt: str | None, flag: str, said: str
) -> None:
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "scale_fmt": scale_fmt}
    config = parsed(tmp_path, f"{BLOCKS} {flag}", quantization_config=scheme)
    found = [note for note in config.notes if note.startswith("--force-fp8-ue8m0-scale")]
    assert len(found) == bool(said)
    assert not said or f"; {said} for the same rounding on both sides" in found[0]


def test_first_and_last_layers_may_stay_in_16_bits(tmp_path: Path) -> None:
    flags = f"{BLOCKS} --first-last-layers-bf16 --num-layers-at-start-in-bf16 2"
    megatron = parsed(tmp_path, flags).megatron
    assert [megatron.computes_in_fp8(layer, 5) for layer in range(5)] == [False, False, True, True, False]


@pytest.mark.parametrize(
    ("flags", "changes", "message"),
    [
        ("--fp8-recipe blockwise", {}, "--fp8-format must be e4m3 with --fp8-recipe blockwise, got none"),
        (
            "--fp8-format hybrid --fp8-recipe blockwise",
            {},
            "--fp8-format must be e4m3 with --fp8-recipe blockwise, got hybrid; gradients have scales per 128 values",
        ),
        (
            "--force-fp8-ue8m0-scale",
            {},
            "--force-fp8-ue8m0-scale must come with --fp8-recipe blockwise, got it alone; leave it out",
        ),
        (
            f"{BLOCKS} --fp8-param-gather",
            {},
            "--fp8-param-gather must be left out with --fp8-recipe blockwise, got it; leave it out: the weights are "
            "kept and gathered in --params-dtype",
        ),
        (
            "--rlk-fp8-products deepgemm",
            {},
            "--rlk-fp8-products must be torch in this run, got deepgemm; leave it out: it computes the products of "
            "--fp8-format e4m3 --fp8-recipe blockwise",
        ),
        (
            f"{BLOCKS} --rlk-fp8-products deepgemm --rlk-bitwise --rlk-consistency strict --fp32",
            {},
            "--rlk-fp8-products must be torch in this run, got deepgemm; leave it out: with --rlk-bitwise, the",
        ),
        (
            f"{BLOCKS} --fp8-margin 2",
            {},
            "--fp8-margin must be left out with --fp8-recipe blockwise, got 2; leave it out: the recipe has no such",
        ),
        (
            f"{BLOCKS} --gpu a100 --device cuda",
            {},
            "--fp8-recipe must be left out on GPUs without fp8, got blockwise with --gpu a100",
        ),
        (
            BLOCKS,
            {"hidden_size": 576},
            "hidden_size of --hf-checkpoint must be a multiple of 128 on each trainer rank with --fp8-recipe "
            "blockwise, got 576; leave --fp8-format and --fp8-recipe out",
        ),
        (
            f"{BLOCKS} --tensor-model-parallel-size 2 --actor-num-gpus-per-node 2",
            {"intermediate_size": 384},
            "intermediate_size of --hf-checkpoint must be a multiple of 128 on each trainer rank with --fp8-recipe "
            "blockwise, got 384 / 2 = 192; leave --fp8-format and --fp8-recipe out, or use "
            "--tensor-model-parallel-size 1",
        ),
        (
            f"{BLOCKS} --rlk-bitwise --rlk-consistency strict --fp32",
            {"head_dim": 64},
            "head_dim of --hf-checkpoint must be a multiple of 128 with --fp8-recipe blockwise and --rlk-bitwise, got",
        ),
        (
            f"{BLOCKS} --rlk-bitwise --rlk-consistency strict --fp32 --first-last-layers-bf16",
            {},
            "--first-last-layers-bf16 must be left out with --fp8-recipe blockwise and --rlk-bitwise, got it",
        ),
    ],
)
def test_what_does_not_fit_fp8_is_an_error(
    tmp_path: Path, flags: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as error:
        parsed(tmp_path, flags, **changes)
    (found,) = [line for line in str(error.value).splitlines() if "fp8" in line]
    assert message in found


def test_a_run_on_a_card_without_fp8_does_not_start(tmp_path: Path) -> None:
    """`vime train` reads the compute capabilities from the driver. `--gpu` is not needed."""
    fp8 = parsed(tmp_path, f"{BLOCKS} --device cuda")
    wanted = (
        "--fp8-recipe must be left out on GPUs without fp8, got blockwise with a GPU of compute capability 8.0; fp8 "
        "needs compute capability 8.9, as L40S and H100 have"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(wanted)}$"):
        require_fp8_cards(fp8, [(9, 0), (8, 0)])
    for cards in ([], [(8, 9)], [(9, 0), (10, 0), (12, 0)]):
        require_fp8_cards(fp8, cards)
    require_fp8_cards(parsed(tmp_path / "plain", "--device cuda"), [(8, 0)])


def test_a_teacher_whose_sizes_do_not_fit_is_an_error(tmp_path: Path) -> None:
    write_model(tmp_path / "teacher", **{**SIZES, "hidden_size": 192})
    teacher = f"--use-opd --opd-type megatron --opd-teacher-load {tmp_path / 'teacher'}"
    with pytest.raises(ValueError, match=r"hidden_size of .*teacher must be a multiple of 128 .* got 192"):
        parsed(tmp_path, f"{BLOCKS} {teacher}")


@pytest.mark.parametrize("name", ["qwen3-4b", "qwen3-30b-a3b", "deepseek-v3", "qwen2.5-0.5b", "glm-4.5-355b"])
def test_published_sizes_are_whole_blocks(tmp_path: Path, name: str) -> None:
    architecture = ARCHITECTURES[name]
    hf = {"model_type": architecture.family, **architecture.config_fields()}
    words = [*good_argv(tmp_path), *BLOCKS.split(), "--debug-train-only"]
    write_model(tmp_path / "model", **hf)
    assert parse_args(words).megatron.has_fp8_blocks
