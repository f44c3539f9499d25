"""A digest of the weights under the adapters. With the digest, the code notices a run that resumes over other
weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from slime.megatron_backend.lora.install import products


def note_base(parts: Sequence[Any]) -> None:
    """Stores the digest of the base in the adapters. Collective over all ranks. `parts` are the parts of a model with
    adapters whose base is loaded. In float16, no digest is stored, because float16 rounds small values."""
    if any(p.dtype == torch.float16 for p in parts[0].parameters()):
        return
    digest = base_digest(parts)
    for inner in parts:
        inner.adapters.base = digest


@torch.no_grad()
def base_digest(parts: Sequence[nn.Module]) -> str:
    """Returns the digest over all products that can have an adapter, except those of experts. It has 16 hex digits and
    is equal in each layout of ranks and in bfloat16 and float32. Collective over all ranks."""
    mine = {
        path: _total(weights[0], split=row.layout.axis is not None)
        for inner in parts
        for path, row, _, weights in products(inner)
        if not row.is_expert
    }
    of_ranks: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    whole = {path: total for totals in of_ranks for path, total in totals.items()}
    return hashlib.sha256(json.dumps(sorted(whole.items())).encode()).hexdigest()[:16]


def _total(weight: Tensor, *, split: bool) -> int:
    """Returns the sum of the values' bits in bfloat16, which does not depend on an order. `split` means that
    tensor-parallel ranks have parts of the weight."""
    total = weight.data.to(torch.bfloat16).view(torch.int16).sum(dtype=torch.int64)
    if split and parallel_state.get_tensor_model_parallel_world_size() > 1:
        dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
    return int(total)
