"""Weights with their adapters merged in, for an engine without adapters and for a Hugging Face directory."""

from __future__ import annotations

from torch import Tensor, nn

from slime.megatron_backend.lora.adapters import Read
from slime.megatron_backend.lora.install import find_adapters
from slime.megatron_backend.model.gpt import unwrapped


def merged(model: nn.Module, read: Read) -> Read:
    """Returns `read` that adds `scale * B @ A` of a parameter's adapters, sums in float32 and rounds to its dtype
    once."""
    owners = {
        id(weight): (adapter, e)
        for inner in unwrapped(model)
        for _, adapter in find_adapters(inner)
        for e, weight in enumerate(adapter.weights)
    }

    def values(parameter: Tensor) -> Tensor:
        base = read(parameter)
        if id(parameter) not in owners:
            return base
        adapter, expert = owners[id(parameter)]
        return (base.float() + adapter.delta(read, expert).to(base.device)).to(base.dtype)

    return values
