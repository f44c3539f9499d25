"""Log-probs whose value for a row does not depend on the other rows, on hosts in float32. N rows, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_kernel.invariant import exact
from rl_kernel.invariant.autograd import with_gradient_of


def log_softmax(logits: Tensor) -> Tensor:
    """`logits.log_softmax(-1)` in float32 nats: logits [N, V] -> [N, V]. -inf stays -inf. Differentiable.

    The sum is one of fractions of 2**-34, so that columns of -inf at any place change nothing.
    """

    def value(logits: Tensor) -> Tensor:
        wide = logits.double()
        shifted = wide - wide.amax(-1, keepdim=True)
        return (shifted - exact.log(exact.sum_of_fractions(exact.exp(shifted)))[:, None]).float()

    def plain(logits: Tensor) -> Tensor:
        return torch.log_softmax(logits.float(), -1)

    return with_gradient_of(plain, value, logits)
