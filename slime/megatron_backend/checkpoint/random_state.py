"""The random generators of a rank, in the form of a checkpoint."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject


def rng_object(data: dict[str, Any] | None) -> ShardedObject:
    """Returns the record of this rank in a checkpoint."""
    return ShardedObject("rng", data, (dist.get_world_size(),), (dist.get_rank(),))


def rng_state() -> dict[str, Any]:
    """Returns the states of the generators of Python, numpy, torch and Megatron."""
    name, keys, *rest = cast("tuple[Any, ...]", np.random.get_state())
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
