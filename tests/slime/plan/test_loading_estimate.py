"""Compares the bytes that a rank reads at the start, and its host memory, with numbers by hand."""

from __future__ import annotations

from architectures import ARCHITECTURES
from memory_cases import QWEN3_4B, config

from slime.plan.loading_estimate import loading

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


def test_quantised_files_have_no_estimate_of_bytes():
    """The tensors of quantised files have full size only after they are dequantised, so the bytes read are unknown."""
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    hf = {"model_type": "deepseek_v3", **ARCHITECTURES["deepseek-v3"].config_fields(), **fp8}
    found = planned(hf, actor_num_gpus_per_node=8, tensor_model_parallel_size=8, sequence_parallel=True)
    assert list(found) == ["host memory"]
    assert found["host memory"].bytes == 129280 * 7168 * 2 + 64 * 2**20
