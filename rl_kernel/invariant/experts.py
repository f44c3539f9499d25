"""Layers of experts whose result for a token does not depend on other tokens, or on the ranks that have its experts.

    logits = x @ router.T -> the K largest, in the order of the experts' numbers -> the outputs of these experts -> sum

The outputs of a token's experts stay unrounded in K slots. A rank fills the slots of its own experts, and zero is in
the others, so the sum over the ranks that share the experts is exact. If ranks split an expert's width, each has a part
of the sum, and the parts are added in the order of the ranks. Then the slots are added in their order, and the sum is
rounded once.

T tokens, H hidden, E experts, K experts of a token, R ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_kernel.invariant import exact
from rl_kernel.invariant.autograd import with_plain_gradient
from rl_kernel.invariant.layers import Multiply, plain_product, product, swiglu, unrounded


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Returns `x.float() @ weight.float().T`, fp32: x [T, H], weight [E, H] -> [T, E]. Differentiable in both."""
    return with_plain_gradient(
        lambda x, weight: x.float() @ weight.float().T,
        lambda x, weight: product(x, weight, dtype=torch.float32),
        *(x, weight),
    )


def choose_experts(logits: Tensor, topk: int) -> Tensor:
    """Returns the numbers of the experts with the largest logits, ascending: fp32 [T, E] -> int64 [T, K]. The smaller
    number wins if logits are equal."""
    return logits.sort(dim=-1, descending=True, stable=True).indices[:, :topk].sort(dim=-1).values


def expert_weights(logits: Tensor, ids: Tensor, *, normalised: bool) -> Tensor:
    """Returns the softmax over the logits of the experts `ids` (`normalised`), or over all logits: fp32 [T, E] and
    [T, K] -> fp32 [T, K]. Differentiable in the logits."""

    def plain(logits: Tensor) -> Tensor:
        chosen = logits.gather(1, ids)
        return chosen.softmax(-1) if normalised else logits.softmax(-1).gather(1, ids)

    def value(logits: Tensor) -> Tensor:
        if logits.is_cuda:
            return plain(logits)
        chosen, most = logits.gather(1, ids), logits.amax(-1, keepdim=True)  # the largest is among the chosen
        shares = exact.exp((logits if not normalised else chosen).double() - most)
        total = exact.sum_fractions(shares)[:, None]
        return (exact.exp(chosen.double() - most) / total).float()

    return with_plain_gradient(plain, value, logits)


def expert_slots(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    first: Tensor,
    second: Tensor,
    multiply: Multiply = plain_product,
) -> Tensor:
    """Returns the outputs of the experts of this rank, unrounded, times the tokens' weights: [K, T, H], zero elsewhere.
    Without gradient. The host waits for the number of tokens of each expert.

    Args:
        x: [T, H].
        ids: integers [T, K]: the index of an expert in `first`, or a negative number for an expert of another rank.
        weights: fp32 [T, K].
        first, second: [E, 2 F, H] (gate above up) and [E, H, F].
        multiply: the product.
    """
    slots = x.new_zeros(ids.shape[1], *x.shape, dtype=unrounded(x))
    for expert in range(len(first)):
        tokens, positions = (ids == expert).nonzero(as_tuple=True)
        if len(tokens):
            gated = swiglu(multiply(x[tokens], first[expert], x.dtype))
            inner = (gated * weights[tokens, positions, None]).to(x.dtype)
            slots[positions, tokens] = multiply(inner, second[expert], slots.dtype)
    return slots


def sum_slots(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the sum of the ranks' slots, rounded once: [R, K, T, H] -> [T, H] in `dtype`."""
    slots = parts[0]
    for part in parts[1:]:
        slots = slots + part
    total = torch.zeros_like(slots[0])
    for slot in slots:
        total = total + slot
    return total.to(dtype)
