"""One advantage per response token from the rewards, and the sums that estimators share. Pure functions of tensors.

R_i response tokens of sample i. Each list has one tensor [R_i] per sample.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import rl_kernel
from slime.algo.estimators import ESTIMATORS, estimator_of


def compute_advantages(
    args: Any,
    rewards: list[float],
    loss_masks: list[Tensor],
    kl: list[Tensor],
    *,
    dp_group: ProcessGroup | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Advantages and returns, fp32, of --advantage-estimator.

    The estimator's record (`slime.algo.estimators`) computes the returns of a sample from its reward, mask and KL. The
    advantages are the returns. --normalize-advantages whitens the advantages over all trained tokens of `dp_group`.
    """
    make_returns = estimator_of(args).returns
    if make_returns is None:
        known = ", ".join(name for name, record in ESTIMATORS.items() if record.returns is not None)
        raise ValueError(f"--advantage-estimator must be one of {known}, got {args.advantage_estimator}")
    returns = [make_returns(args, *of_sample) for of_sample in zip(rewards, loss_masks, kl, strict=True)]
    if not args.normalize_advantages:
        return returns, returns
    sizes = [len(r) for r in returns]
    whitened = rl_kernel.masked_whiten(torch.cat(returns), torch.cat(loss_masks), group=dp_group)
    return list(torch.split(whitened, sizes)), returns
