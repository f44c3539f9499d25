"""Tests the inputs of layers on the host on one GPU: the same gradients, and less memory of the GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "slime"))  # the cases of the CPU tests
megatron_cases = pytest.importorskip("megatron_cases", reason="needs megatron-core")

pytestmark = pytest.mark.gpu

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TOKENS, HIDDEN, LAYERS = 16384, 256, 24


def gradients_and_peak(directory: Path, **flags: object) -> tuple[torch.Tensor, int]:
    """Returns the gradients of a backward over one sequence, and the most bytes that were allocated after the model."""
    from slime.megatron_backend.model.gpt import unwrap

    model = megatron_cases.loaded(directory, device="cuda", params_dtype="bfloat16", overrides=FULL, **flags)
    unwrap(model).train()
    tokens = torch.arange(TOKENS) % megatron_cases.VOCAB
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    megatron_cases.hidden_of(model, [tokens]).float().square().mean().backward()
    return model.buffers[0].grad_data.clone(), torch.cuda.max_memory_allocated() - before


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return (got.float() - wanted.float()).norm().item()


def test_inputs_of_layers_leave_the_gpu(tmp_path: Path) -> None:
    """The gradients differ by no more than those of two passes whose inputs stay on the GPU. torch's flash attention
    adds the gradients of queries in any order."""
    from slime.megatron_backend.parallel import destroy_parallel, init_parallel

    megatron_cases.tiny_checkpoint(
        tmp_path / "hf", hidden_size=HIDDEN, num_hidden_layers=LAYERS, head_dim=64, intermediate_size=512
    )
    config = megatron_cases.make_config(device="cuda")
    init_parallel(0, 1, config, init_method=f"file://{tmp_path}/store", local_rank=0)
    try:
        wanted, most = gradients_and_peak(tmp_path / "hf")
        again, _ = gradients_and_peak(tmp_path / "hf")
        got, peak = gradients_and_peak(tmp_path / "hf", cpu_offloading=True)
    finally:
        destroy_parallel()
    print(f"differences: {difference(got, wanted)}, without offloading {difference(again, wanted)}")
    assert difference(got, wanted) <= 2 * difference(again, wanted) and wanted.abs().max() > 0
    assert most - peak > 0.8 * (LAYERS - 1) * TOKENS * HIDDEN * 2
