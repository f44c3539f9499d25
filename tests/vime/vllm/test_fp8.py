"""Tests `--vllm-quantization`: rules, the engine's flags, its bytes and the remark. Engines: e2e/test_engine_fp8.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES
from safetensors.torch import save_file

from slime.plan.card_phases import engine_weights
from slime.plan.model_shape import Shape
from vime.backends import backend_for, parse_config
from vime.pool.engine_flags import engine_dtype
from vime.vllm import fp8
from vime.vllm.quantized.layers import engine_layers
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


ROWS = "leave whole blocks of 128 of fp8 in blocks of 128 x 128 on each GPU, got "
NARROW = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64, "hidden_size": 256}
LATENT = {"model_type": "deepseek_v3", **ARCHITECTURES["deepseek-v3"].config_fields()}
SPREAD = ("--vllm-enable-expert-parallel",)


@pytest.mark.parametrize(
    ("model", "gpus", "more", "message"),
    [
        (EXPERTS, 2, (), ""),
        (EXPERTS, 4, (), ""),  # 192 rows of an expert, in blocks of 64
        (EXPERTS, 4, SPREAD, ""),
        (EXPERTS | {"moe_intermediate_size": 48}, 4, (), f"{ROWS}48 rows / 4 = 12 in model.layers.0.mlp.experts.0"),
        (DENSE, 4, (), ""),
        (DENSE, 8, (), f"{ROWS}9728 rows / 8 = 1216 in model.layers.0.mlp.gate_proj; use 4"),
        (LATENT, 64, SPREAD, f"{ROWS}18432 rows / 64 = 288 in model.layers.0.mlp.gate_proj; use 16"),
        (LATENT, 16, SPREAD, ""),
        (DENSE | NARROW, 1, (), "--hf-checkpoint must have whole blocks of 128 in each matrix that vLLM loads"),
        (DENSE | NARROW, 4, (), f"{ROWS}256 rows / 4 = 64 in .*q_proj; use a checkpoint in bfloat16"),
    ],
)  # fmt: skip
def test_a_split_inside_a_block_is_an_error(
    tmp_path: Path, model: dict, gpus: int, more: tuple[str, ...], message: str
) -> None:
    """vLLM raises an error when its servers load such a checkpoint, or it loads wrong scales without an error."""
    gpus_flags = (f"--rollout-num-gpus={gpus}", f"--rollout-num-gpus-per-engine={gpus}")
    sizes = (*gpus_flags, f"--num-gpus-per-node={max(8, gpus + 1)}")

    def read(hf: dict) -> None:
        parse_config(flags(tmp_path, hf, *sizes, *more))

    read(model)  # plain weights
    if not message:
        read(model | BLOCKS)
        return
    with pytest.raises(ValueError, match=message) as error:
        read(model | BLOCKS)
    assert "\n" not in str(error.value)


def test_an_older_vllm_does_not_refine_the_blocks_of_experts(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("vime.vllm.versions._module_file", lambda module: Path(__file__))
    sizes = ("--rollout-num-gpus=4", "--rollout-num-gpus-per-engine=4", "--num-gpus-per-node=8")
    found = f"{ROWS}768 rows / 4 = 192 in .*gate_proj; use 2, or add --vllm-enable-expert-parallel"
    with pytest.raises(ValueError, match=found):
        parse_config(flags(tmp_path, EXPERTS | BLOCKS, *sizes))
    assert parse_config(flags(tmp_path, EXPERTS | BLOCKS, *sizes, *SPREAD))


NEXT = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("listed", "plain", "message"),
    [
        ([f"{NEXT}", "model.layers.1.mlp.gate_proj"], ("gate_proj", "up_proj"), ""),
        (["model.layers.1.mlp.gate_up_proj"], ("gate_proj", "up_proj"), ""),
        ([NEXT], ("up_proj",), "name all or none of model.layers.1.mlp.gate_proj, model.layers.1.mlp.up_proj, which"),
        (["re:.*mlp.down_proj"], ("down_proj",), "down_proj, which is plain in the files and quantised for vLLM; add"),
        (["mlp"], ("gate_proj", "up_proj"), "gate_proj, which is plain in the files and quantised for vLLM; add its"),
        (["model.layers.1.mlp.down_proj"], (), "down_proj, which is quantised in the files and plain for vLLM; remove"),
    ],
)  # fmt: skip
def test_a_list_of_modules_that_vllm_reads_otherwise_is_an_error(
    tmp_path: Path, listed: list[str], plain: tuple[str, ...], message: str
) -> None:
    hf = DENSE | {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 256}
    hf["quantization_config"] = BLOCKS["quantization_config"] | {"modules_to_not_convert": listed}
    argv, tensors = flags(tmp_path, hf), dict[str, torch.Tensor]()
    for layer in engine_layers(hf, 1):
        for module, rows in zip(layer.modules, layer.rows, strict=True):
            is_plain = "layers.1.mlp" in module and module.endswith(plain or ("nothing",))
            tensors[f"{module}.weight"] = torch.zeros(
                rows, layer.columns, dtype=torch.bfloat16 if is_plain else torch.float8_e4m3fn
            )
            if not is_plain:
                tensors[f"{module}.weight_scale_inv"] = torch.ones(-(-rows // 128), -(-layer.columns // 128))
    save_file(tensors, tmp_path / "model.safetensors")
    if not message:
        parse_config(argv)
        return
    with pytest.raises(ValueError, match=message) as error:
        parse_config(argv)
    assert "modules_to_not_convert in config.json of --hf-checkpoint must name" in str(error.value)
