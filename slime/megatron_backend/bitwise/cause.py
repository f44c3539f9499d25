"""Finds the operator on this rank that makes trainer and engine bits differ."""

from __future__ import annotations

import torch

import rl_kernel.invariant as invariant
from slime.config import Config
from slime.megatron_backend.model.model_config import params_dtype


def why_bits_differ(config: Config, device: torch.device) -> str:
    """Returns the trainer's operators that break their guarantee here, or the remaining causes if none does."""
    if names := invariant.broken(device, params_dtype(config)):
        return f"in the trainer, results of {', '.join(names)} depend on the other rows of a call"
    return (
        "the operators of both sides keep their promise on test rows (the engine tests its own at each update), so "
        "look at what is between them: weights, positions, the cache of keys and values, or another kind of device"
    )
