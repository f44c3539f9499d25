"""Builds the trainer of a service from the folder of its base."""

from __future__ import annotations

import tempfile
from pathlib import Path

from torch import nn

from slime import operators
from slime.checkpoints.hf_config import read_hf_config
from slime.config import Config
from slime.megatron_backend.checkpoint.weights import load_weights
from slime.megatron_backend.model.gpt import build_model
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.parallel import ParallelInfo, init_parallel
from slime.megatron_backend.step.heads import build_head
from slime.megatron_backend.tenants.trainer import Trainer
from slime.memory.host import host_total
from slime.plan.memory_estimate import activation_memory, head_memory
from slime.plan.model_shape import Shape
from slime.rules.resolve import resolve
from slime.tracking.memory import device_memory

MICRO_BATCHES = (8192, 4096, 2048, 1024, 512)
"""Numbers of tokens among which `choose_micro_batch` chooses."""


def build_trainer(
    base: Path,
    most_rank: int,
    context: int,
    *,
    device: str = "auto",
    micro_batch: int | None = None,
    engine_share: float = 0.0,
) -> Trainer:
    """Returns a trainer of adapters over the Hugging Face folder `base`, in this process and on one device.

    Weights are float32 on a CPU and bfloat16 on a GPU. `engine_share` is the share of a GPU's memory that the sampler's
    engine has. `micro_batch` is the largest number of tokens of a micro-batch; None chooses it by memory.
    """
    # NCCL reads the rendezvous file at the first collective, so the folder stays until the trainer is closed
    folder = tempfile.TemporaryDirectory()
    flags: dict[str, object] = {
        **{"hf_checkpoint": str(base), "load": str(base), "weight_dir": folder.name, "run_dir": folder.name},
        **{"device": device, "actor_num_gpus_per_node": 1, "use_dynamic_batch_size": True},
        **{"max_tokens_per_gpu": MICRO_BATCHES[0], "lora_rank": most_rank, "loss_type": "sft_loss"},
    }
    config = resolve(flags)
    info = init_parallel(0, 1, config, init_method=f"file://{folder.name}/store")
    operators.install(config)
    model = build_model(load_hf_config(config.rollout.hf_checkpoint), config, ddp=False, has_tower=False)
    load_weights(model, str(base))
    if micro_batch is None:
        left = count_left_bytes(model, info, engine_share)
        micro_batch = choose_micro_batch(config, Shape.of(read_hf_config(base)), left)
    config = resolve({**flags, "max_tokens_per_gpu": micro_batch})
    head = build_head(config, operators.LINEAR, model, info)
    return Trainer(config, model, head, info, most_rank=most_rank, context=context, folder=folder)


def count_left_bytes(model: nn.Module, info: ParallelInfo, engine_share: float) -> float | None:
    """Returns the bytes that engine and base leave, or None if the device's memory is unknown.

    The value depends on sizes only, not on free memory. So a service that starts again gets the same micro-batches, and
    its results have the same bits.
    """
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    if info.device.type == "cuda":
        total = device_memory(info.device)
        return None if total is None else total * (1 - engine_share) - weights
    total = host_total()
    return None if total is None else total - 2 * weights  # the engine has a copy on the host, too


def choose_micro_batch(config: Config, shape: Shape, left: float | None) -> int:
    """Returns the largest size whose activations and head use half of `left`. The other half is for adapters, their
    gradients and moments, and the allocator's gaps."""
    if left is None:
        return MICRO_BATCHES[-1]
    for tokens in MICRO_BATCHES[:-1]:
        if (
            activation_memory(config, shape, tokens)[0].bytes + head_memory(config, shape, tokens)[0]
            <= left / 2
        ):
            return tokens
    return MICRO_BATCHES[-1]
