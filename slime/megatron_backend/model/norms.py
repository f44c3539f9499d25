"""RMSNorm over the hidden size or a head, and over all heads of a projection that tensor-parallel ranks split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn.functional import rms_norm

Norm = Callable[[Tensor, Tensor, float], Tensor]
"""Maps (x, weight, eps) to the norm per row of x."""


def mark_whole(parameter: nn.Parameter, config: TransformerConfig) -> None:
    """Marks a parameter that each tensor-parallel rank has whole. With sequence parallelism, Megatron sums the gradient
    of a marked parameter over these ranks, because they have different parts of the tokens."""
    marked: Any = parameter  # the mark is Megatron's
    marked.sequence_parallel = config.sequence_parallel


class RMSNorm(nn.RMSNorm):
    """`x * rsqrt(mean(x ** 2) + eps) * weight` (Zhang and Sennrich 2019), or `* (1 + weight)` if the model's norms are
    centred at zero.

    With --layernorm-zero-centered-gamma, it is `(x * rsqrt(..) * (1 + weight)).to(x.dtype)`, computed in fp32.

    megatron-core's own wrapper of torch's norm does not accept sequence parallelism. Sequence parallelism only needs a
    mark on the norm's weight. With the mark, the gradient is summed over the tensor-parallel ranks, which have
    different parts of the tokens.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        mark_whole(self.weight, config)
        self.zero_centred = config.layernorm_zero_centered_gamma
        self.deferred = False  # True: the next product computes this norm, see `defer`
        self.compute: Norm | None = None  # another operator with the same formula; None for torch's

    def forward(self, x: Tensor) -> Tensor:
        return x if self.deferred else self.normalise(x)

    def normalise(self, x: Tensor) -> Tensor:
        if self.compute is not None:
            return self.compute(x, self.weight, float(self.eps or 0))
        if not self.zero_centred:
            return super().forward(x)
        normed: Tensor = CentredNorm.apply(x, self.weight, self.eps)
        return normed


class CentredNorm(torch.autograd.Function):
    """Computes `rms_norm(x.float(), (H,), 1 + weight.float(), eps).to(x.dtype)` for x [..., H] and weight [H]. The sum
    with 1 is not rounded to the model's dtype. Autograd keeps x and the weight, and no fp32 tensor."""

    @staticmethod
    def _compute(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x.float(), weight.shape, 1 + weight.float(), eps).to(x.dtype)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return CentredNorm._compute(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        with torch.enable_grad():
            again = CentredNorm._compute(x, weight, ctx.eps)
        of_x, of_weight = torch.autograd.grad(again, (x, weight), upstream)
        return of_x, of_weight, None


class ProjectionNorm(nn.Module):
    """RMSNorm over all heads of a projection together: x [P, 1, heads, D] as one vector of heads * D per token.

    A tensor-parallel rank has its part of the heads and of the weight. The sum of squares covers all ranks, in the
    forward and in the backward.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, *, heads: int) -> None:
        super().__init__()
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        assert heads % ranks == 0  # slime.rules.heads
        self.eps, self.width = eps, heads * hidden_size
        self.weight = nn.Parameter(torch.ones(self.width // ranks))
        weight: Any = self.weight  # the marks are Megatron's
        weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 0, 1

    def forward(self, x: Tensor) -> Tensor:
        squares = x.float().square().sum((-2, -1), keepdim=True)
        if self.width != self.weight.numel():
            # both collectives: each rank uses the sum, and each rank's part depends on every rank's use
            squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        normed = (x.float() * torch.rsqrt(squares / self.width + self.eps)).to(x.dtype)
        return normed * self.weight.view(x.shape[-2:])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        state = self.state_dict(prefix="", keep_vars=True)
        shards: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, {"weight": 0}, sharded_offsets
        )
        return shards
