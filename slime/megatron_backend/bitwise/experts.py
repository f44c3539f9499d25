"""The layers of experts of --rlk-bitwise, with the operators of `rl_kernel.invariant.experts` in Megatron's modules.

The router chooses, and the dispatcher computes the experts' second product, unrounded, with its sum over ranks and
experts.
Without --rlk-bitwise, `slime.megatron_backend.model.moe` computes the same formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    sigmoid = module.score_function == "sigmoid"
    ids, weights = invariant.route(
        logits,
        module.topk,
        normalised=sigmoid or not module.config.moe_router_pre_softmax,
        sigmoid=sigmoid,
        bias=module.expert_bias,
        scale=module.config.moe_router_topk_scaling_factor or 1.0,
    )
    module.router_replay.ids = ids
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)
    return torch.zeros_like(logits).scatter(1, ids, weights), chosen


def use_experts(module: GatedExperts) -> None:
    """Sets the products of `GatedExperts`. The second product is a part of `_ExpertSum`."""
    module.__dict__["product"] = partial(_multiply, module)


def use_activation(module: GatedExperts) -> None:
    module.gated = invariant.swiglu


def _multiply(module: GatedExperts, index: int, x: Tensor, ends: Tensor, weights: list[Tensor]) -> Tensor:
    if index == 1:
        module.__dict__["second"] = ends, weights
        return x
    product: Tensor = _ExpertProduct.apply(module.fp8_powers, x, ends, *weights)
    return product


def _products(
    powers: bool | None, x: Tensor, ends: Tensor, weights: Sequence[Tensor], dtype: torch.dtype
) -> Tensor:
    """Returns the products of the experts' rows in `dtype`, in fp8 unless `powers` is None."""
    multiply = invariant.plain_product if powers is None else partial(fp8.multiply, power_of_two=powers)
    return invariant.expert_products(x, ends, weights, dtype, multiply)


def _gradients(
    powers: bool | None, saved: Sequence[Tensor], needed: Sequence[bool], upstream: Tensor
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of `GroupedProduct` or `Fp8Product` for x, ends and the weights, which `saved` has."""
    if powers is None:
        return plain_gradients(saved, needed, upstream)
    x, ends, *weights = saved
    return fp8_gradients(x, ends, weights, needed, upstream, powers)


class _ExpertProduct(torch.autograd.Function):
    """`apply(powers, x, ends, *weights)` computes `GroupedProduct`, or `Fp8Product` unless `powers` is None, by
    expert. The gradients are those of these functions."""

    @staticmethod
    def forward(ctx: Context, powers: bool | None, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends, *weights)
        ctx.powers = powers
        return _products(powers, x, ends, weights, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_gradients(ctx.powers, ctx.saved_tensors, ctx.needs_input_grad[1:], upstream)


def use_sums(module: ExpertLayer) -> None:
    """Sets the sums of the experts' outputs."""
    module.token_dispatcher.__dict__.update(combine_preprocess=partial(_sum, module), token_combine=_pass_on)


def _pass_on(hidden: Tensor) -> Tensor:
    return hidden


def _sum(module: ExpertLayer, hidden: Tensor) -> Tensor:
    """Replaces the second product and both steps of the dispatcher after the experts: [C, F] -> [T, H] of this rank's
    tokens."""
    ends, weights = module.experts.__dict__.pop("second")
    dispatcher, dtype = module.token_dispatcher, module.config.params_dtype
    combined: Tensor = _ExpertSum.apply(
        *(module.experts.fp8_powers, dispatcher.tp_ep_group, dtype, dispatcher.rows, hidden, ends, *weights)
    )
    return combined


class _ExpertSum(torch.autograd.Function):
    """`apply(powers, group, dtype, rows, x, ends, *weights)` computes the second product of `_ExpertProduct` and sums
    its unrounded results over the experts of each token, and over the ranks: x [C, F], rows [R T, K] -> [T, H] in
    `dtype`. Forward and backward are collective. Both steps are one function, because autograd would make the gradient
    of the unrounded results in their dtype."""

    @staticmethod
    def forward(
        ctx: Context,
        powers: bool | None,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        rows: Tensor,
        x: Tensor,
        ends: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(rows, x, ends, *weights)
        ctx.powers, ctx.group = powers, group
        outputs = _products(powers, x, ends, weights, invariant.unrounded(x))
        if group.size() == 1:
            return invariant.sum_rows(outputs, rows, dtype)
        slots = invariant.fill_slots(outputs, rows)
        return invariant.sum_slots(invariant.own_rows(slots, group), dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, *saved = ctx.saved_tensors
        if ctx.group.size() > 1:
            upstream = gather_stack(upstream, ctx.group).flatten(0, 1)
        of_outputs = invariant.spread_rows(upstream.to(saved[0].dtype), rows, len(saved[0]))
        gradients = _gradients(ctx.powers, saved, ctx.needs_input_grad[4:], of_outputs)
        return None, None, None, None, *gradients


def find_difference(module: Router | GatedExperts | ExpertLayer) -> str | None:
    """Returns a part of a layer of experts that no operator computes, or None."""
    parts: dict[str, bool] = {}
    if isinstance(module, Router):
        parts = {
            "scores of another kind": module.score_function not in ("softmax", "sigmoid"),
            "groups of experts": module.config.moe_router_num_groups is not None,
            "router biases": module.bias is not None
            or (module.expert_bias is not None and module.score_function != "sigmoid"),
        }
    elif isinstance(module, GatedExperts):
        parts = {
            "experts with biases": module.local_experts[0].linear_fc2.bias is not None,
            "another activation": module.gated is not swiglu,
            "rounded weights": any(module.rounding),
            "adapters": any(module.adapted),
            "fp8 on a GPU": module.fp8_powers is not None
            and module.local_experts[0].linear_fc2.weight.is_cuda,
        }
    else:
        parts = {
            "a shared expert that overlaps": module.config.moe_shared_expert_overlap,
            "more ranks with experts than experts of a token": not isinstance(
                module.token_dispatcher, GatheringDispatcher
            ),
        }
    return next((name for name, there in parts.items() if there), None)
