"""Compares a live model from a quantised checkpoint with an update in the checkpoint's scheme, in the engine's own
format.

vLLM's kernels pack quantised weights in many orders. So vLLM's loader loads the update a second time, and each value
that the model computes with must keep its bits. The check compares a checksum per tensor, because a copy of the model
would need as much memory as the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor, nn

from vime.vllm.worker.live_weights import used_values

_PIECE = 1 << 22
"""Number of bytes that are summed at a time."""
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
"""Odd factor that spreads positions over 64 bits (the golden ratio)."""


def has_scales(update: Collection[str]) -> bool:
    """Returns True if the tensors of an update (HF names) are in the scheme of a quantised checkpoint."""
    return any(name.endswith((".weight_scale_inv", ".weight_scale")) for name in update)


def checksums(models: Iterable[nn.Module]) -> dict[str, int]:
    """Returns a checksum per tensor of the modules: parameters, buffers, packed copies and other tensors, except the
    key-value cache."""
    return {
        name: checksum(value)
        for model in models
        for path, module in model.named_modules()
        for name, value in _tensors(path, module)
    }


def _tensors(path: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters(recurse=False):
        for number, value in enumerate(used_values(module, name, parameter)):
            yield f"{path}.{name}{f' (copy {number})' if number else ''}", value
    for name, value in (*module.named_buffers(recurse=False), *vars(module).items()):
        if isinstance(value, Tensor) and name != "kv_cache":
            yield f"{path}.{name}", value


def checksum(tensor: Tensor) -> int:
    """Returns a sum modulo 2**64 over the bytes of a tensor, each times a number that follows from its position."""
    found = 0
    if tensor.is_meta:
        return found
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    for first in range(0, data.numel(), _PIECE):
        piece = data[first : first + _PIECE].to(torch.int64) + 1
        factors = torch.arange(first + 1, first + 1 + len(piece), device=piece.device) * _FACTOR
        found += int(((factors ^ (factors >> 29)) * piece).sum())
    return found % (1 << 64)
