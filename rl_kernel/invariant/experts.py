"""Layers of experts whose result for a token does not depend on other tokens, or on the ranks that have its experts.

    logits = x @ router.T -> the K largest, in the order of the experts' numbers -> the outputs of these experts -> sum

The outputs of a token's experts stay unrounded in K slots. A rank fills the slots of its experts, and the other slots
are zero, so the sum over the ranks that share the experts is exact. If ranks split an expert's width, each has a part
of the sum, and the parts are added in the order of the ranks. Then the slots are added in their order, and the sum is
rounded once.

On a GPU, one kernel computes a product for all experts, and the host waits for nothing.

T tokens, H hidden, E experts, K experts of a token, R ranks, C pairs of a token and an expert, sorted by expert.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_kernel.invariant import exact
from rl_kernel.invariant.autograd import with_plain_gradient
from rl_kernel.invariant.layers import Multiply, plain_product, product, swiglu, unrounded
from rl_kernel.ops.expert_rows.reference import expert_rows


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
    if logits.is_cuda:
        from rl_kernel.invariant import kernels

        return kernels.choose_experts(logits, topk)
    return logits.sort(dim=-1, descending=True, stable=True).indices[:, :topk].sort(dim=-1).values


def expert_weights(logits: Tensor, ids: Tensor, *, normalised: bool) -> Tensor:
    """Returns the softmax over the logits of the experts `ids` (`normalised`), or over all logits: fp32 [T, E] and
    [T, K] -> fp32 [T, K]. Differentiable in the logits. E is at most 1,024 on a GPU, because torch computes the softmax
    of a longer row in an order that depends on the row's address."""

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


def route(
    logits: Tensor,
    topk: int,
    *,
    normalised: bool,
    sigmoid: bool = False,
    bias: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Returns the experts of each token, int64 [T, K] ascending, and their weights, fp32 [T, K].

        softmax: the K largest logits, and `expert_weights`
        sigmoid: s = logits.sigmoid(), the K largest s + bias, and s[ids] / (s[ids].sum(-1) + 1e-20)

    Without `normalised`, or with K = 1, the weights of the second kind are s[ids]. `scale` multiplies the weights. They
    are differentiable in the logits.

    Args:
        logits: fp32 [T, E].
        topk: K.
        normalised: whether the weights of a token's experts have the sum 1.
        sigmoid: whether scores are sigmoids.
        bias: fp32 [E], added to sigmoid scores for the choice only.
        scale: factor of the weights.
    """
    if sigmoid:
        ids, weights = _route_sigmoids(logits, topk, normalised, bias)
    else:
        ids = choose_experts(logits.detach(), topk)
        weights = expert_weights(logits, ids, normalised=normalised)
    return ids, weights if scale == 1 else weights * scale


def _route_sigmoids(
    logits: Tensor, topk: int, normalised: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    scores = with_plain_gradient(torch.sigmoid, _sigmoid, logits)
    known = scores.detach()
    ids = choose_experts(known if bias is None else known + bias, topk)
    chosen = scores.gather(1, ids)
    if not normalised or topk == 1:
        return ids, chosen
    total = chosen[:, :1]
    for slot in range(1, topk):  # torch.sum may add in another order for another number of tokens
        total = total + chosen[:, slot : slot + 1]
    return ids, chosen / (total + 1e-20)


def _sigmoid(x: Tensor) -> Tensor:
    return x.sigmoid() if x.is_cuda else (1 / (1 + exact.exp(-x.double()))).float()


def expert_products(
    x: Tensor,
    ends: Tensor,
    weights: Tensor | Sequence[Tensor],
    dtype: torch.dtype,
    multiply: Multiply = plain_product,
) -> Tensor:
    """Returns the products of the experts' rows with their weights, rounded to `dtype`. Without gradient.

    Args:
        x: [C, I], sorted by expert.
        ends: int32 [E], where each expert's rows end. On a GPU, rows from ends[-1] on have undefined results.
        weights: [E, N, I], or E tensors [N, I].
        dtype: the dtype of the result [C, N].
        multiply: the product. A GPU takes `plain_product` only.

    Raises NotImplementedError for another product on a GPU.
    """
    if not x.is_cuda:
        stops = ends.tolist()
        rows = zip([0, *stops[:-1]], stops, weights, strict=True)
        return torch.cat([multiply(x[first:last], weight, dtype) for first, last, weight in rows])
    if multiply is not plain_product:
        raise NotImplementedError(
            "multiply must be plain_product on a GPU, got another product; compute on a host"
        )
    from rl_kernel.invariant import kernels

    stacked = weights if isinstance(weights, Tensor) else torch.stack(list(weights))
    return kernels.expert_products(x, ends, stacked, dtype)


def expert_outputs(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    first: Tensor,
    second: Tensor,
    multiply: Multiply = plain_product,
) -> tuple[Tensor, Tensor]:
    """Returns the outputs of this rank's experts, unrounded, times the tokens' weights: [C, H], and each pair's
    row, int32 [T, K], negative for experts of other ranks. Without gradient.

    Args:
        x: [T, H].
        ids: integers [T, K]: the index of an expert in `first`, or a negative number for an expert of another rank.
        weights: fp32 [T, K].
        first, second: [E, 2 F, H] (gate above up) and [E, H, F].
        multiply: the product. A GPU takes `plain_product` only.
    """
    if x.is_cuda:
        from rl_kernel.invariant import kernels
        from rl_kernel.ops.expert_rows.kernels import spread

        rows, ends = kernels.expert_rows(ids, len(first))
        inputs, row_weights = spread(x, weights, rows, rows.numel())
    else:
        rows, counts = expert_rows(ids, 0, len(first))
        ends = counts.cumsum(0)
        token, slot = (rows >= 0).nonzero(as_tuple=True)
        order = rows[token, slot].long().argsort()
        inputs, row_weights = x[token[order]], weights[token[order], slot[order]]
    gated = swiglu(expert_products(inputs, ends, first, x.dtype, multiply), row_weights)
    return expert_products(gated, ends, second, unrounded(x), multiply), rows


def fill_slots(outputs: Tensor, rows: Tensor) -> Tensor:
    """Maps the outputs of `expert_outputs` [C, H] and the rows of the pairs [T, K] to [T, K, H], zero where a row is
    negative."""
    if not len(outputs):
        return outputs.new_zeros(*rows.shape, *outputs.shape[1:])
    return outputs[rows.long().clamp(min=0)].masked_fill_((rows < 0)[..., None], 0)


def sum_slots(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the sum of the ranks' slots, rounded once: [R, T, K, H] -> [T, H] in `dtype`."""
    slots = parts[0]
    for part in parts[1:]:
        slots = slots + part
    total = torch.zeros_like(slots[:, 0])
    for slot in slots.unbind(1):
        total += slot
    return total.to(dtype)


def sum_rows(outputs: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `sum_slots(fill_slots(outputs, rows)[None], dtype)`, in one kernel on a GPU."""
    if not outputs.is_cuda:
        return sum_slots(fill_slots(outputs, rows)[None], dtype)
    from rl_kernel.ops.expert_rows.kernels import gather_sum

    return gather_sum(outputs, None, rows, dtype)[0]


def spread_rows(sums: Tensor, rows: Tensor, count: int) -> Tensor:
    """Returns the gradient of `sum_rows`: sums [T, H] and the rows of the pairs [T, K] -> [C, H] with C = `count`. Each
    number below C occurs once in `rows`."""
    if sums.is_cuda:
        from rl_kernel.ops.expert_rows.kernels import spread

        return spread(sums, None, rows, count)[0]
    token, slot = (rows >= 0).nonzero(as_tuple=True)
    out = sums.new_zeros(count, sums.shape[1])
    out[rows[token, slot].long()] = sums[token]
    return out
