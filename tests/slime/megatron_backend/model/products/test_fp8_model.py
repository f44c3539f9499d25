"""Tests --fp8-recipe blockwise: logits and gradients of a Megatron model against transformers, whose linear layers are
the reference of rl_kernel.fp8."""

from __future__ import annotations

from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from megatron_cases import hf_gradients, loaded, packed_logits, sequences, sum_loss, tiny_checkpoint, trained
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from rl_kernel import fp8
from slime.megatron_backend.checkpoint.weights import export_hf
from slime.megatron_backend.model.gpt import unwrap

pytestmark = pytest.mark.usefixtures("single_rank")

BLOCKS: dict[str, Any] = {"overrides": {"fp8": "e4m3", "fp8_recipe": "blockwise"}}
SHAPES = {
    "qwen3": {"hidden_size": 128, "intermediate_size": 256, "head_dim": 128},
    "qwen3_moe": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "head_dim": 128,
        "moe_intermediate_size": 128,
    },
}
"""Heads have 128 dimensions, so that the blocks of a merged projection are those of its parts."""


class Fp8Linear(nn.Linear):
    """A linear layer of transformers that computes in fp8."""

    def forward(self, x: Tensor) -> Tensor:
        out = fp8.linear(x, self.weight)
        return out if self.bias is None else out + self.bias


def compute_experts(self: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Replaces the forward of transformers' experts. The router's weight multiplies before the second product."""
    total = torch.zeros_like(x)
    for expert in range(self.num_experts):
        tokens, place = torch.where(ids == expert)
        gate, up = fp8.linear(x[tokens], self.gate_up_proj[expert]).chunk(2, -1)
        gated = silu(gate) * up * weights[tokens, place, None]
        total = total.index_add(0, tokens, fp8.linear(gated, self.down_proj[expert]))
    return total


def round_layers(model: nn.Module) -> None:
    """Makes the linear layers and the experts in the decoder layers of transformers compute in fp8."""
    for name, module in model.named_modules():
        if isinstance(module, Qwen3MoeExperts):
            module.forward = MethodType(compute_experts, module)
        if type(module) is nn.Linear and ".layers." in f".{name}":
            module.__class__ = Fp8Linear


def relative(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


def one_sequence() -> list[Tensor]:
    """Returns one sequence, because the groups of 128 rows of a packed row have tokens of several sequences."""
    return [torch.cat(sequences(1))]


@pytest.mark.parametrize("kind", SHAPES)
def test_logits_and_gradients_are_those_of_transformers_in_fp8(tmp_path: Path, kind: str):
    hf, batch = tiny_checkpoint(tmp_path / "model", kind, **SHAPES[kind]), one_sequence()
    plain = packed_logits(loaded(tmp_path / "model"), batch)
    model = loaded(tmp_path / "model", **BLOCKS)
    round_layers(hf)
    found = packed_logits(model, batch)
    want = torch.cat([hf(tokens[None]).logits[0] for tokens in batch])
    assert relative(found, want) < 1e-4 < 1e-3 < relative(plain, want) < 0.1
    for logits in (found, want):
        sum_loss(logits, batch).backward()
    theirs = trained(hf_gradients(hf, tmp_path / "gradients"), tmp_path / "model")
    core = unwrap(model)
    with torch.no_grad():
        for parameter in core.parameters():
            parameter.copy_(parameter.main_grad)
    ours = dict(export_hf(model))
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert relative(gradient, theirs[name]) < 1e-3, name
