"""Two ranks with --fp8-recipe blockwise train as one: tensor (and sequence) and expert parallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import make_config, sequences, tiny_checkpoint, train_step
from rank_processes import on_ranks

from slime.checkpoints.hf_config import read_hf_config
from slime.megatron_backend.checkpoint.weights import load_hf
from slime.megatron_backend.model.gpt import build_model
from slime.megatron_backend.model.optimizer import build_optimizer
from slime.megatron_backend.parallel import destroy_parallel, init_parallel

SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 128,
    "moe_intermediate_size": 128,
}
KINDS = {"qwen3": {}, "qwen3_moe": {"mlp_only_layers": [0]}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tensor_model_parallel_size": 2},
    "ep": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
}
OF_KIND = {"qwen3": ("tp", "ep"), "qwen3_moe": ("ep",)}
"""Experts with tensor parallelism need sequence parallelism."""
BLOCKS = {"fp8": "e4m3", "fp8_recipe": "blockwise"}


def first_step(folder: Path, sizes: dict[str, Any], group: Any, overrides: dict[str, Any]) -> list[float]:
    """Returns loss and gradient norm. Later steps differ more: Adam moves a weight by the sign of a gradient near
    zero."""
    config = make_config(lr=1e-3, hf_checkpoint=str(folder), overrides=overrides, **sizes)
    model = build_model(read_hf_config(folder), config)
    load_hf(model, folder)
    parts = (model, *build_optimizer(model, config, total_steps=10))
    # There are 32 tokens, because sequence parallelism needs a multiple of the ranks.
    return train_step(*parts, [*sequences(0), torch.tensor([1, 2, 3])], tp_group=group)


def work(rank: int, root: Path) -> None:
    found = {}
    for layout, sizes in LAYOUTS.items():
        store = f"file://{root}/store-{layout}"
        info = init_parallel(rank, 2, make_config(**sizes), init_method=store, local_rank=rank)
        for kind in (kind for kind, layouts in OF_KIND.items() if layout in layouts):
            found[kind, layout] = first_step(root / kind, sizes, info.tp_group, BLOCKS)
        destroy_parallel()
    torch.save(found, root / f"rank{rank}.pt")


def test_two_ranks_train_in_fp8_as_one(tmp_path: Path) -> None:
    for kind, more in KINDS.items():
        tiny_checkpoint(tmp_path / kind, kind, **SHAPE, **more)
    on_ranks(work, tmp_path, ranks=2)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    assert first == second
    info = init_parallel(0, 1, make_config(), init_method=f"file://{tmp_path}/store-one", local_rank=0)
    for kind, layouts in OF_KIND.items():
        one = first_step(tmp_path / kind, {}, info.tp_group, BLOCKS)
        plain = first_step(tmp_path / kind, {}, info.tp_group, {})
        for layout in layouts:
            assert first[kind, layout] == pytest.approx(one, rel=2e-5), (kind, layout)
            assert first[kind, layout] != pytest.approx(plain, rel=1e-4)
    destroy_parallel()
