"""The loss of a critic, and a measure for the prediction of returns by its values. Pure functions of tensors.

A micro-batch has R response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime.algo.importance import weighted
from slime.algo.token_columns import Losses


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, *, value_clip: float
) -> Losses:
    """Returns `(weights * torch.maximum((V - G) ** 2, (V_clipped - G) ** 2)).sum()`, with
    `V_clipped = V_old + (V - V_old).clamp(-value_clip, value_clip)`. All inputs are [R] fp32. The loss is
    differentiable in `values`.

    The clip is that of OpenAI's PPO2, and the loss has no factor 1/2, as in slime. `weights` holds each token's weight
    in a mean over the step (`TokenColumns.weights`). The metric value_clipfrac is the share of values outside the clip
    range.
    """
    values, old_values, returns = (torch.where(weights != 0, x, 0.0) for x in (values, old_values, returns))
    clipped = old_values + (values - old_values).clamp(-value_clip, value_clip)
    plain_error, clipped_error = (values - returns).square(), (clipped - returns).square()
    loss = weighted(torch.maximum(plain_error, clipped_error), weights).sum()
    outside = ((values - old_values).abs() > value_clip).float()
    return loss, {"value_loss": loss.detach(), "value_clipfrac": (weights * outside).sum()}, {}


def error_sums(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Returns five sums over the tokens with mask 1, [5] fp64: the count, then sum and sum of squares for the returns,
    then the same two for returns - values. The sums of different tokens can be added."""
    m = mask.double()
    g, e = (torch.where(m != 0, x.double(), 0.0) for x in (returns, returns - values))
    return torch.stack([m.sum(), (m * g).sum(), (m * g * g).sum(), (m * e).sum(), (m * e * e).sum()])


def explained_variance(sums: Tensor) -> float:
    """Returns `1 - (G - V).var() / G.var()` from `error_sums`: 1 if the values are the returns, 0 if the values are
    constant. Returns 0 if all returns are equal, too."""
    count, g, gg, e, ee = sums.tolist()
    if count == 0:
        return 0.0
    of_returns, of_errors = gg / count - (g / count) ** 2, ee / count - (e / count) ** 2
    return 1.0 - of_errors / of_returns if of_returns > 1e-12 else 0.0
