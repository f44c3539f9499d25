"""Computes one advantage per response token for the samples of a rank. Pure functions of tensors.

Sample i has R_i response tokens. Each list has one entry per sample, and each tensor of a list is [R_i].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import rl_kernel
from slime.algo.estimators import Response, estimator_for
from slime.config.schema import Config


def compute_advantages(
    c: Config,
    responses: Sequence[Response],
    *,
    penalties: Sequence[Tensor] | None = None,
    dp_group: ProcessGroup | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the advantages and the returns of --advantage-estimator, fp32.

    The function in the estimator's record (`slime.algo.estimators`) computes both for one sample at a time. `penalties`
    are subtracted from the advantages, not from the returns. --normalize-advantages whitens the advantages over all
    trained tokens of `dp_group`.
    """
    estimate = estimator_for(c.algorithm).estimate
    found = [estimate(c, response) for response in responses]
    advantages, returns = [a for a, _ in found], [r for _, r in found]
    if penalties is not None:
        advantages = [a - penalty for a, penalty in zip(advantages, penalties, strict=True)]
    if not c.algorithm.normalize_advantages:
        return advantages, returns
    masks = torch.cat([response.mask for response in responses])
    whitened = rl_kernel.masked_whiten(torch.cat(advantages), masks, group=dp_group)
    return list(torch.split(whitened, [len(a) for a in advantages])), returns
