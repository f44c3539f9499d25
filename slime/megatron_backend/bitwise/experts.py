"""The layers of experts of --rlk-bitwise, with the operators of `rl_kernel.invariant.experts` in Megatron's modules.

The router chooses, the experts leave their second product unrounded, and the dispatcher sums over ranks and experts.
Without --rlk-bitwise, `slime.megatron_backend.model.moe` computes the same formulas.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

import rl_kernel.invariant as invariant
from rl_kernel import fp8
from rl_kernel.collectives import gather_stack
from slime.megatron_backend.model.activations import swiglu
from slime.megatron_backend.model.moe.expert_dispatch import GatheringDispatcher
from slime.megatron_backend.model.moe.experts import ExpertLayer, GatedExperts, Router
from slime.megatron_backend.model.moe.grouped_product import fp8_gradients, plain_gradients

Context = Any
"""Torch's record of a call. This module sets its attributes, which have no types."""


def use_router(module: Router) -> None:
    """Sets the operators of a `Router`."""
    module.__dict__.update(gating=partial(_gate, module), routing=partial(_route, module))


def _gate(module: Router, input: Tensor) -> Tensor:
    logits = invariant.router_logits(input.flatten(0, -2), module.weight)
    unflattened: Tensor = logits.unflatten(0, input.shape[:-1])
    return unflattened


def _route(module: Router, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Replaces Megatron's routing: logits [S, B, E] -> weights and the choice, both [T, E]."""
    logits = logits.flatten(0, -2)
    ids = invariant.choose_experts(logits.detach(), module.topk)
    module.router_replay.ids = ids
    weights = invariant.expert_weights(logits, ids, normalised=not module.config.moe_router_pre_softmax)
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)
    return torch.zeros_like(logits).scatter(1, ids, weights), chosen


def use_experts(module: GatedExperts) -> None:
    """Sets the products of `GatedExperts`. Their outputs stay unrounded until `_Combine`."""
    module.__dict__["product"] = partial(_multiply, module)


def use_activation(module: GatedExperts) -> None:
    module.gated = invariant.swiglu


def _multiply(module: GatedExperts, index: int, x: Tensor, ends: Tensor, weights: list[Tensor]) -> Tensor:
    product: Tensor = _ExpertProduct.apply(module.fp8_powers, index == 1, x, ends, *weights)
    return product


class _ExpertProduct(torch.autograd.Function):
    """`apply(powers, wide, x, ends, *weights)` computes `GroupedProduct`, or `Fp8Product` unless `powers` is None, by
    expert. `wide` leaves the result unrounded. The gradients are those of these functions."""

    @staticmethod
    def forward(
        ctx: Context, powers: bool | None, wide: bool, x: Tensor, ends: Tensor, *weights: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, ends, *weights)
        ctx.powers = powers
        multiply = invariant.plain_product if powers is None else partial(fp8.multiply, power_of_two=powers)
        dtype = invariant.unrounded(x) if wide else x.dtype
        return invariant.expert_products(x, ends, weights, dtype, multiply)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, upstream: Tensor) -> tuple[Tensor | None, ...]:
        upstream = upstream.to(ctx.saved_tensors[0].dtype)
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        if ctx.powers is None:
            return None, None, *plain_gradients(saved, needed, upstream)
        x, ends, *weights = saved
        return None, None, *fp8_gradients(x, ends, weights, needed, upstream, ctx.powers)


def use_sums(module: ExpertLayer) -> None:
    """Sets the sums of the experts' outputs."""
    dispatcher = module.token_dispatcher
    combine = partial(_combine, dispatcher, dtype=module.config.params_dtype)
    dispatcher.__dict__.update(combine_preprocess=combine, token_combine=_pass_on)


def _pass_on(hidden: Tensor) -> Tensor:
    return hidden


def _combine(dispatcher: GatheringDispatcher, hidden: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Replaces both steps of the dispatcher after the experts: [C, H] -> [T, H] of this rank's tokens."""
    combined: Tensor = _Combine.apply(hidden, dispatcher.rows, dispatcher.tp_ep_group, dtype)
    return combined


class _Combine(torch.autograd.Function):
    """`apply(y, rows, group, dtype)` sums the unrounded outputs y [C, H] over the experts of each token, and over the
    ranks: rows [R T, K] -> [T, H]. Collective, forward and backward."""

    @staticmethod
    def forward(
        ctx: Context, y: Tensor, rows: Tensor, group: dist.ProcessGroup, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.group, ctx.count = group, len(y)
        if group.size() == 1:
            return invariant.sum_rows(y, rows, dtype)
        slots = invariant.fill_slots(y, rows).transpose(0, 1)
        return invariant.sum_slots(invariant.own_rows(slots, group).transpose(1, 2), dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        if ctx.group.size() > 1:
            upstream = gather_stack(upstream, ctx.group).flatten(0, 1)
        return invariant.spread_rows(upstream, rows, ctx.count), None, None, None


def find_difference(module: Router | GatedExperts | ExpertLayer) -> str | None:
    """Returns a part of a layer of experts that no operator computes, or None."""
    parts: dict[str, bool] = {}
    if isinstance(module, Router):
        parts = {
            "sigmoid scores": module.score_function != "softmax",
            "router biases": module.bias is not None or module.expert_bias is not None,
            "scaled weights": module.config.moe_router_topk_scaling_factor not in (None, 1.0),
        }
    elif isinstance(module, GatedExperts):
        parts = {
            "experts with biases": module.local_experts[0].linear_fc2.bias is not None,
            "another activation": module.gated is not swiglu,
            "rounded weights": any(module.rounding),
        }
    else:
        parts = {
            "a shared expert": module.use_shared_expert,
            "more ranks with experts than experts of a token": not isinstance(
                module.token_dispatcher, GatheringDispatcher
            ),
        }
    return next((name for name, there in parts.items() if there), None)
