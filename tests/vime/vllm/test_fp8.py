"""Tests `--vllm-quantization`: rules, the engine's flags, its bytes and the remark. Engines: e2e/test_engine_fp8.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from architectures import ARCHITECTURES

from slime.plan.card_phases import engine_weights
from slime.plan.model_shape import Shape
from vime.backends import backend_for, parse_config
from vime.pool.engine_flags import engine_dtype
from vime.vllm import fp8
from vime.vllm.server_flags import engine_settings

DENSE = {"model_type": "qwen3", "hidden_act": "silu", **ARCHITECTURES["qwen3-4b"].config_fields()}
EXPERTS = {"model_type": "qwen3_moe", "hidden_act": "silu", **ARCHITECTURES["qwen3-30b-a3b"].config_fields()}
FLAGS = """
--hf-checkpoint {dir} --prompt-data {dir}/p.jsonl --num-rollout 1 --device cuda --actor-num-gpus-per-node 1
--rollout-num-gpus 2 --num-gpus-per-node 3 --rollout-batch-size 32 --n-samples-per-prompt 8
--rollout-max-response-len 8192 --use-dynamic-batch-size --max-tokens-per-gpu 9216
"""


def flags(directory: Path, model: dict = DENSE, *more: str) -> list[str]:
    (directory / "config.json").write_text(json.dumps(model))
    (directory / "p.jsonl").write_text('{"input": "1+1=", "label": "2"}\n' * 64)
    return [*FLAGS.format(dir=directory).split(), *more]


@pytest.mark.parametrize("value", fp8.VALUES)
def test_an_engine_gets_vllms_name(tmp_path: Path, value: str) -> None:
    config = parse_config(flags(tmp_path, DENSE, "--vllm-quantization", value, "--vllm-max-num-seqs", "8"))
    argv = ("--quantization", "fp8_per_block", "--max-num-seqs", "8")
    assert engine_settings(config)["vllm_argv"] == argv
    assert engine_dtype(config) == f"bfloat16+{value}"
    assert fp8.in_blocks(["--served-model-name", "fp8"]) == ["--served-model-name", "fp8"]


def test_slimes_flag_is_the_same(tmp_path: Path) -> None:
    config = parse_config(flags(tmp_path, DENSE, "--sglang-quantization", "fp8"))
    assert engine_settings(config)["vllm_argv"] == ("--quantization", "fp8_per_block")


def test_the_remark_names_the_correction(tmp_path: Path) -> None:
    def said(*more: str) -> str:
        config = parse_config(flags(tmp_path, DENSE, *more))
        return " ".join(note for note in config.notes if "fp8" in note)

    assert "--use-tis" in said("--vllm-quantization", "fp8") and "vime audit" in said(
        "--vllm-quantization", "fp8"
    )
    assert "; --use-tis" not in said("--vllm-quantization", "fp8", "--use-tis")
    assert said() == ""


@pytest.mark.parametrize("model", [DENSE, EXPERTS])
def test_the_plan_counts_fp8(tmp_path: Path, model: dict) -> None:
    """A layer has one byte per weight and a scale per 16384 weights; embedding and head stay in bfloat16."""
    shape = Shape.of(model)
    ends = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    two = ("--rollout-num-gpus-per-engine", "2", "--vllm-quantization", "fp8")
    found = engine_weights(parse_config(flags(tmp_path, model, *two)), shape)
    assert found.bytes == pytest.approx(((shape.params - ends) * (1 + 4 / 16384) + ends * 2) / 2)
    plain = engine_weights(parse_config(flags(tmp_path, model, *two[:2])), shape)
    assert plain.bytes == shape.params and "x 2 B / 2 GPUs" in plain.arithmetic
    replicas = engine_weights(
        parse_config(flags(tmp_path, model, *two, "--vllm-data-parallel-size", "2")), shape
    )
    experts = shape.count_params(shape.kinds, 0).experts
    rest = (shape.params - ends - experts) * fp8.WEIGHT_BYTES + ends * 2
    assert replicas.bytes == pytest.approx(rest + experts * fp8.WEIGHT_BYTES / 2)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--vllm-quantization awq", "--vllm-quantization must be one of fp8, fp8_per_block, got awq"),
        (
            "--vllm-quantization fp8 --vllm-dtype float32",
            "--vllm-dtype must be bfloat16 or float16 with --vllm-quantization fp8, got float32",
        ),
        ("--vllm-quantization fp8 --rlk-consistency strict", "--rlk-consistency must be off or audit with"),
    ],
)
def test_what_is_refused(tmp_path: Path, more: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_config(flags(tmp_path, DENSE, *more.split()))


def test_experts_are_not_compared_and_need_a_gpu(tmp_path: Path) -> None:
    more = ("--vllm-quantization", "fp8")
    with pytest.raises(ValueError, match="--check-weight-update-equal must be left out with --vllm-quanti"):
        parse_config(flags(tmp_path, EXPERTS, *more, "--check-weight-update-equal"))
    config = parse_config([*flags(tmp_path, EXPERTS, *more), "--device", "cpu", "--vllm-dtype", "bfloat16"])
    with pytest.raises(ValueError, match="--vllm-quantization must be left out with --device cpu"):
        backend_for(config).require_reachable(config)


BLOCKS = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}


def test_a_checkpoint_in_fp8_decides_the_scheme(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="--vllm-quantization must be left out for a checkpoint in fp8 in blocks of"
    ):
        parse_config(flags(tmp_path, DENSE | BLOCKS, "--vllm-quantization", "fp8"))


@pytest.mark.parametrize(
    ("model", "gpus", "more", "note"),
    [
        (EXPERTS, 2, (), ""),
        (EXPERTS, 4, (), "the experts of 768 columns over 4 GPUs, because 768 / 4 is no multiple of"),
        (EXPERTS, 4, ("--vllm-enable-expert-parallel",), ""),
        (DENSE, 4, (), ""),
        (DENSE, 8, (), "the MLP of 9728 columns over 8 GPUs"),
    ],
)  # fmt: skip
def test_a_split_inside_a_block_is_noted(
    tmp_path: Path, model: dict, gpus: int, more: tuple[str, ...], note: str
) -> None:
    """vLLM raises an error when its servers load such a checkpoint."""
    sizes = (
        "--rollout-num-gpus",
        str(gpus),
        "--rollout-num-gpus-per-engine",
        str(gpus),
        "--num-gpus-per-node",
        "8",
    )
    config = parse_config(flags(tmp_path, model | BLOCKS, *sizes, *more))
    found = [text for text in config.notes if "vLLM will not start an engine" in text]
    assert len(found) == bool(note)
    assert not note or (
        note in found[0] and found[0].endswith("split each layer over at most 2 of them") is (gpus == 4)
    )
    assert not [
        text for text in parse_config(flags(tmp_path, model, *sizes, *more)).notes if "vLLM will not" in text
    ]
