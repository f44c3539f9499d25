"""Weights with their adapters merged in: what an engine without adapters serves, and a Hugging Face directory holds."""

from __future__ import annotations

from torch import Tensor, nn

from slime.megatron_backend.lora.adapters import Read
from slime.megatron_backend.lora.install import adapters_of
from slime.megatron_backend.model.gpt import unwrapped


def merged(model: nn.Module, read: Read) -> Read:
    """`read` of a parameter with `scale * B @ A` of its adapters, summed in float32 and rounded to its dtype once."""
    owners = {
        id(weight): (adapter, e)
        for inner in unwrapped(model)
        for _, adapter in adapters_of(inner)
        for e, weight in enumerate(adapter.weights)
    }

    def values(parameter: Tensor) -> Tensor:
        base = read(parameter)
        if id(parameter) not in owners:
            return base
        adapter, expert = owners[id(parameter)]
        return (base.float() + adapter.delta(read, expert).to(base.device)).to(base.dtype)

    return values
