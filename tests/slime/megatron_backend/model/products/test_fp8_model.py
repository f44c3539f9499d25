"""Tests --fp8-recipe blockwise: logits and gradients of a Megatron model against transformers, whose linear layers are
the reference of rl_kernel.fp8."""

from __future__ import annotations

from dataclasses import replace
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
from slime.megatron_backend.model.moe.experts import GatedExperts
from slime.megatron_backend.model.products.fp8 import Fp8Forward
from slime.megatron_backend.model.products.linear import LAYERS

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


@pytest.mark.parametrize("kind", SHAPES)
def test_a_backward_may_add_to_megatrons_buffers(tmp_path: Path, kind: str):
    """Two micro-batches add up, and Megatron's hook drops the undefined gradients that autograd gets."""
    tiny_checkpoint(tmp_path / "model", kind, **SHAPES[kind])
    batch, models = one_sequence(), [loaded(tmp_path / "model", **BLOCKS) for _ in range(2)]
    adding = []
    for module in unwrap(models[1]).modules():
        if isinstance(getattr(module, "_forward_impl", None), Fp8Forward):
            module._forward_impl = replace(module._forward_impl, adds=True)
            adding.append(module.weight)
        if isinstance(module, GatedExperts):
            module.fp8_adds = True
            adding += module.parameters()
    adding = [weight for weight in adding if weight is not None]
    assert adding and not any(weight.grad_added_to_main_grad for weight in adding)
    for model in models:
        for _ in range(2):
            sum_loss(packed_logits(model, batch), batch).backward()
        with torch.no_grad():
            packed_logits(model, batch)
    assert all(weight.grad_added_to_main_grad for weight in adding)
    for plain, added in zip(*(unwrap(model).parameters() for model in models), strict=True):
        assert relative(added.main_grad, plain.main_grad) < 1e-5 and added.grad is None


def test_deepgemm_needs_a_hopper_gpu(tmp_path: Path):
    tiny_checkpoint(tmp_path / "model", "qwen3", **SHAPES["qwen3"])
    with pytest.raises(
        ValueError,
        match=r"--rlk-fp8-products must be torch on cpu, got deepgemm, but DeepGEMM's products run on GPUs",
    ):
        loaded(tmp_path / "model", **BLOCKS, rlk_fp8_products="deepgemm")


LATENT: dict[str, Any] = {
    **{"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "q_lora_rank": 128},
    **{"kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64},
}


def test_latent_attention_computes_in_fp8(tmp_path: Path):
    """The projection to latent keys and values has 160 outputs: its last block has 32 rows."""
    tiny_checkpoint(tmp_path / "model", "deepseek_v3", **LATENT)
    batch, plain = one_sequence(), loaded(tmp_path / "model")
    model = loaded(tmp_path / "model", **BLOCKS)
    found, want = packed_logits(model, batch), packed_logits(plain, batch)
    assert 1e-3 < relative(found, want) < 0.2
    for logits in (found, want):
        sum_loss(logits, batch).backward()
    for ours, theirs in zip(unwrap(model).parameters(), unwrap(plain).parameters(), strict=True):
        assert relative(ours.main_grad, theirs.main_grad) < 0.5 or theirs.main_grad.norm() < 1e-3


@pytest.mark.parametrize(
    ("kind", "shape", "plain"),
    [
        ("deepseek_v3", LATENT, {"output_layer"}),
        ("qwen3_next", SHAPES["qwen3_moe"], {"output_layer", "in_proj", "out_proj"}),
    ],
)
def test_parts_that_keep_the_dtype_of_the_weights(
    tmp_path: Path, kind: str, shape: dict[str, Any], plain: set[str]
):
    """The head and gated delta nets. Experts compute together, so their own layers are not called."""
    tiny_checkpoint(tmp_path / "model", kind, **shape)
    core = unwrap(loaded(tmp_path / "model", **BLOCKS))
    kept, experts = set(), []
    for name, module in core.named_modules():
        if isinstance(module, GatedExperts):
            experts.append(module.fp8_powers)
            continue
        called = isinstance(module, LAYERS) and ".local_experts." not in name
        if called and not isinstance(module._forward_impl, Fp8Forward):
            kept.add(name.rpartition(".")[2])
    assert kept == plain and experts and set(experts) == {False}


def test_the_first_and_last_layers_may_keep_the_dtype_of_the_weights(tmp_path: Path):
    shape = {**SHAPES["qwen3"], "num_hidden_layers": 3}
    tiny_checkpoint(tmp_path / "model", "qwen3", **shape)
    overrides = {**BLOCKS["overrides"], "first_last_layers_bf16": True}
    layers = unwrap(loaded(tmp_path / "model", overrides=overrides)).decoder.layers
    found = [isinstance(layer.mlp.linear_fc1._forward_impl, Fp8Forward) for layer in layers]
    assert found == [False, True, False]
