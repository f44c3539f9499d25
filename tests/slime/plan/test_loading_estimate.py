"""Compares the bytes that a rank reads at the start, and its host memory, with numbers by hand."""

from __future__ import annotations

import json

import pytest
from architectures import ARCHITECTURES
from memory_cases import QWEN3_4B, config

from slime.plan.loading_estimate import loading
from slime.plan.model_shape import Shape

QWEN3_235B = {"model_type": "qwen3_moe", **ARCHITECTURES["qwen3-235b-a22b"].config_fields()}
GIB = 2**30


def planned(hf, **values):
    return {item.name: item for item in loading(config(**values), hf)}


def test_a_235b_under_expert_parallelism():
    """With TP 4, EP 8 and one rank per expert, each rank reads 57 of 438 GiB."""
    found = planned(
        QWEN3_235B,
        actor_num_gpus_per_node=8,
        actor_num_nodes=8,
        tensor_model_parallel_size=4,
        sequence_parallel=True,
        expert_model_parallel_size=8,
        expert_tensor_parallel_size=1,
    )
    attention = 2 * 4096 * 64 * 128 + 2 * 4096 * 4 * 128
    dense = 94 * attention + 2 * 151936 * 4096
    experts = 94 * 128 * 3 * 4096 * 1536
    assert found["weights read"].bytes == 2 * (dense / 4 + 94 * 128 * 4096)
    assert found["expert weights read"].bytes == 2 * experts / 8
    assert 56.5 < (found["weights read"].bytes + found["expert weights read"].bytes) / GIB < 57
    assert found["expert weights read"].arithmetic == "227 G x 2 B / EP 8 / ETP 1"
    assert found["host memory"].bytes == 151936 * 4096 / 4 * 2 + 64 * 2**20
    assert found["host memory"].arithmetic == (
        "weights go to the GPU; one tensor, 622 M / 4 x 2 B + 64.00 MiB of mapped files"
    )


def test_weights_stay_on_the_host_of_a_cpu_run():
    """The weights are in float32. A reference model is read too."""
    found = planned(QWEN3_4B, device="cpu", kl_loss_coef=0.01, use_kl_loss=True)
    assert found["weights read"].bytes == 2 * 2 * 4_022_272_000
    assert found["host memory"].bytes == 2 * 4 * 4_022_272_000 + 151936 * 2560 * 2 + 64 * 2**20


def test_float32_files_are_read_as_they_are():
    found = planned(QWEN3_4B | {"dtype": "float32"})
    assert found["weights read"].bytes == 4 * 4_022_272_000


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
            }
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|down)_proj.*"],
}
DEEPSEEK = {"model_type": "deepseek_v3", **ARCHITECTURES["deepseek-v3"].config_fields()}


def test_quantized_files_have_fewer_bytes_for_the_weights_that_the_scheme_quantizes():
    """The routed experts of DeepSeek-V3 are 58 x 256 x 3 x 7168 x 2048 parameters. Embedding, head and routers are in
    bfloat16."""
    ranks = {"actor_num_gpus_per_node": 8, "tensor_model_parallel_size": 8, "sequence_parallel": True}
    experts = 58 * 256 * 3 * 7168 * 2048
    fp8 = planned(DEEPSEEK | {"quantization_config": FP8}, **ranks)
    assert fp8["expert weights read"].bytes == experts * (1 + 4 / 128**2) / 8
    assert fp8["expert weights read"].arithmetic == "654 G x 1 B / EP 1 / ETP 8"
    int4 = planned(DEEPSEEK | {"quantization_config": INT4}, **ranks)
    assert int4["expert weights read"].bytes == experts * (0.5 + 2 / 32) / 8
    plain = planned(DEEPSEEK, **ranks)
    assert plain["expert weights read"].bytes == experts * 2 / 8
    assert int4["weights read"].bytes == plain["weights read"].bytes
    others = Shape.of(DEEPSEEK).params - experts
    small = others - 2 * 129280 * 7168 - 58 * 256 * 7168
    mean = 2 - (1 - 4 / 128**2) * small / others
    assert fp8["weights read"].bytes / plain["weights read"].bytes == pytest.approx(mean / 2, rel=1e-9)
    assert fp8["host memory"].bytes == 129280 * 7168 / 8 * 2 + 64 * 2**20


def test_the_bytes_are_those_of_the_reference_weights(tmp_path):
    """slime's scripts have a quantised --hf-checkpoint, and first weights in bfloat16 in --ref-load."""
    fp8 = DEEPSEEK | {"quantization_config": FP8}
    ranks = {"actor_num_gpus_per_node": 8, "expert_model_parallel_size": 8, "ref_load": str(tmp_path)}
    converted, plain = planned(fp8, **ranks), planned(DEEPSEEK, **ranks)
    assert converted["expert weights read"].bytes == plain["expert weights read"].bytes
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text(json.dumps(fp8))
    quantized = planned(DEEPSEEK, **ranks)
    assert quantized["expert weights read"].bytes < 0.51 * plain["expert weights read"].bytes


def test_files_that_are_read_whole_have_no_estimate_of_bytes():
    """gpt-oss has two tensors per layer for all experts, in MXFP4."""
    hf = {"model_type": "gpt_oss", **ARCHITECTURES["gpt-oss-20b"].config_fields()}
    assert "weights read" in planned(hf)
    quantized = planned(hf | {"quantization_config": {"quant_method": "mxfp4"}})
    assert list(quantized) == ["host memory"]
