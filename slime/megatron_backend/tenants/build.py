"""Builds the trainer of a service from the folder of its base."""

from __future__ import annotations

import tempfile
from pathlib import Path

from slime import operators
from slime.megatron_backend.checkpoint.weights import load_weights
from slime.megatron_backend.model.gpt import build_model
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.parallel import init_parallel
from slime.megatron_backend.step.heads import build_head
from slime.megatron_backend.tenants.trainer import Trainer
from slime.rules.resolve import resolve

MICRO_BATCH_TOKENS = 8192
"""Default number of tokens per micro-batch."""


def build_trainer(
    base: Path, most_rank: int, context: int, *, device: str = "auto", micro_batch: int = MICRO_BATCH_TOKENS
) -> Trainer:
    """Returns a trainer of adapters over the Hugging Face folder `base`, in this process and on one device.

    Weights are float32 on a CPU and bfloat16 on a GPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags: dict[str, object] = {
            **{"hf_checkpoint": str(base), "load": str(base), "weight_dir": folder, "run_dir": folder},
            **{"device": device, "actor_num_gpus_per_node": 1, "use_dynamic_batch_size": True},
            **{"max_tokens_per_gpu": micro_batch, "lora_rank": most_rank, "loss_type": "sft_loss"},
        }
        config = resolve(flags)
        info = init_parallel(0, 1, config, init_method=f"file://{folder}/store")
        operators.install(config)
        model = build_model(load_hf_config(config.rollout.hf_checkpoint), config, ddp=False, has_tower=False)
        load_weights(model, str(base))
        head = build_head(config, operators.LINEAR, model, info)
    return Trainer(config, model, head, info, most_rank=most_rank, context=context)
