"""The product of each token with the weight of its expert, of all experts of a layer at once.

Megatron holds one weight per expert; the product wants them as one tensor. They are stacked for each product and never
kept: the stack of a Qwen3-30B-A3B's first products is 0.75 GiB a layer.

Shapes: E experts, C rows (pairs of a token and one of its experts) sorted by expert, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm


def expert_ends(shares: Tensor, device: torch.device) -> Tensor:
    """Rows of each expert, [E] on any device -> where each expert's rows end, int32 [E] on `device`.

    The host waits for no device: numbers that lie on it go out from pinned memory.
    """
    ends = shares.cumsum(0, dtype=torch.int32)
    if device.type == "cuda" and not ends.is_cuda:
        ends = ends.pin_memory()
    return ends.to(device, non_blocking=True)


class GroupedProduct(torch.autograd.Function):
    """`apply(x, ends, *weights)`: grouped_mm(x, stack(weights).transpose(1, 2), offs=ends), [C, K] -> [C, N].

    Args:
        x: [C, K] in float32, bfloat16 or float16, K and N multiples of 16 bytes. C may be 0, and so may any share.
        ends: int32 [E], `expert_ends`: rows ends[e - 1] to ends[e] are multiplied with weight e.
        weights: E tensors [N, K] of x's dtype, contiguous.

    Backward computes d_x and, in x's dtype, the gradients of all weights: zeros where an expert has no rows. A weight
    with a `main_grad` (Megatron's buffer, float32 as a rule) has its own added there, and `grad_added_to_main_grad`
    set; rounded to x's dtype before, as Megatron without fused accumulation does. Autograd receives it in either case:
    with --overlap-grad-reduce Megatron's hook counts the gradients that arrive. Seeing the mark, it drops them.

    RuntimeError of torch for other dtypes or widths, and for a second derivative. Products are one kernel for
    bfloat16 on GPUs of compute capability 9 and 10 (torch 2.11); elsewhere grouped_mm itself goes expert by expert, on
    a GPU after waiting for `ends`: right, and slow.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends, *weights)
        return grouped_mm(x, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        upstream = upstream.contiguous()  # grouped_mm refuses one that was expanded
        of_x, _, *of_weights = ctx.needs_input_grad
        d_x = grouped_mm(upstream, torch.stack(weights), offs=ends) if of_x else None
        if not any(of_weights):
            return d_x, None, *(None for _ in weights)
        d_weights = grouped_mm(upstream.T, x, offs=ends).unbind()
        _add_to_main_grads(weights, d_weights)
        return d_x, None, *d_weights


def _add_to_main_grads(weights: list[Tensor], gradients: tuple[Tensor, ...]) -> None:
    """Add in Megatron's buffers what its hook would add for one weight at a time."""
    theirs = [(w, w.main_grad, g) for w, g in zip(weights, gradients, strict=True) if hasattr(w, "main_grad")]
    if not theirs:
        return
    torch._foreach_add_([total for _, total, _ in theirs], [gradient for _, _, gradient in theirs])
    for weight, _, _ in theirs:
        weight.grad_added_to_main_grad = True
