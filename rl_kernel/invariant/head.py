"""Log-probs whose value for a row does not depend on the other rows. N rows, V vocabulary."""

from __future__ import annotations

from torch import Tensor

from rl_kernel.invariant import exact


def log_softmax(logits: Tensor) -> Tensor:
    """Returns `logits.log_softmax(-1)` in float32 nats: logits [N, V] -> [N, V]. -inf stays -inf. Without a gradient.

    On a host the sum adds fractions of 2**-34, so that additional columns of -inf change nothing. On a GPU it is a
    float32 sum in one fixed order of the columns.
    """
    if not logits.is_cuda:
        return _exactly(logits)
    from rl_kernel.invariant import kernels

    return kernels.log_softmax(logits.float())


def target_log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns `log_softmax(logits).gather(1, targets)`, with the same bits: logits [N, V], targets [N, K] -> [N, K].

    targets [N] -> [N]. Without a gradient. On a GPU, other tokens' log-probs are not computed.
    """
    ids = targets[:, None] if targets.dim() == 1 else targets
    if not logits.is_cuda:
        return _exactly(logits).gather(1, ids).view_as(targets)
    from rl_kernel.invariant import kernels

    logits = logits.float()
    top, log_sum = kernels.log_sums(logits)
    return ((logits.gather(1, ids) - top) - log_sum).view_as(targets)


def _exactly(logits: Tensor) -> Tensor:
    wide = logits.double()
    shifted = wide - wide.amax(-1, keepdim=True)
    return (shifted - exact.log(exact.sum_fractions(exact.exp(shifted)))[:, None]).float()
