"""Makes tiny models with adapters for the tests of adapters and their worker processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron_cases import make_config

from slime.megatron_backend.checkpoint.weights import load_hf
from slime.megatron_backend.lora.install import add_adapters, find_adapters
from slime.megatron_backend.model.gpt import build_model, unwrapped
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.model.optimizer import build_optimizer
from slime.models.lora import Lora

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}


def adapted(directory: Path, *, ddp: bool = True, **flags: Any) -> Any:
    """Returns the model of a checkpoint with new adapters."""
    config = make_config(**{"lora_rank": 4, "lr": 1e-2, **flags})
    adapt = partial(add_adapters, lora=Lora.of(config), seed=config.train.seed)
    model = build_model(load_hf_config(directory), config, ddp=ddp, adapt=adapt)
    load_hf(model, directory)
    return model


def trainer(directory: Path, **flags: Any) -> tuple[Any, ...]:
    """Returns model, optimizer and schedule."""
    model = adapted(directory, **flags)
    config = make_config(**{"lora_rank": 4, "lr": 1e-2, **flags})
    return model, *build_optimizer(model, config, total_steps=10)


@torch.no_grad()
def randomise(model: Any, seed: int = 3) -> None:
    """Sets random values in B, which is zero at first (for one rank)."""
    generator = torch.Generator().manual_seed(seed)
    for inner in unwrapped(model):
        for _, adapter in find_adapters(inner):
            for b in adapter.B:
                b.copy_(0.1 * torch.randn(b.shape, generator=generator))
