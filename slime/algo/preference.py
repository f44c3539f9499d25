"""Losses of preference pairs: a prompt's chosen and rejected response, next to each other in a micro-batch.

Pure functions of tensors. The micro-batch has R response tokens of 2 B samples: chosen, rejected, chosen, rejected.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from slime.algo.importance import weighted
from slime.algo.token_columns import Losses, TokenColumns
from slime.config.sections.algorithm import AlgorithmConfig
from slime.records.errors import FlagError


def dpo_loss(algorithm: AlgorithmConfig, t: TokenColumns) -> Losses:
    """Returns the mean of `-(1 - eps) * logsigmoid(z) - eps * logsigmoid(-z)` over pairs: direct preference
    optimization (2305.18290), with label smoothing eps.

    z is `beta * ((log_probs - ref_log_probs) * mask).sum()` of the chosen sample minus the same of the rejected sample.
    Metrics have TRL's names: rewards/chosen and rewards/rejected are the two terms of z.
    """
    chosen, rejected = sum_pairs(t, weighted(t.log_probs - t["ref_log_probs"], t.mask))
    chosen, rejected = algorithm.dpo_beta * chosen, algorithm.dpo_beta * rejected
    smoothing = algorithm.dpo_label_smoothing
    loss, sums = preference_loss(chosen, rejected, t.normaliser, label_smoothing=smoothing)
    return loss, sums, {}


def reward_loss(t: TokenColumns) -> Losses:
    """Returns the mean of `-logsigmoid(score of chosen - score of rejected)` over pairs: Bradley-Terry (2203.02155,
    section 3.5).

    `t.log_probs` are values per response token. The score of a sample is the value of its last token.
    """
    last = torch.tensor(t.response_lengths, device=t.log_probs.device).cumsum(0) - 1
    scores = t.log_probs[last]
    require_pairs(t["preference"], t.sample_of_row, len(last))
    loss, sums = preference_loss(scores[0::2], scores[1::2], t.normaliser, label_smoothing=0.0)
    return loss, sums, {}


def preference_loss(
    chosen: Tensor, rejected: Tensor, pairs: float, *, label_smoothing: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns `(-(1 - eps) * logsigmoid(z) - eps * logsigmoid(-z)).sum() / pairs` for `z = chosen - rejected`, [B]
    each, and metrics to add. `pairs` is the number of pairs in the whole optimizer step."""
    z = chosen - rejected
    loss = -((1 - label_smoothing) * logsigmoid(z) + label_smoothing * logsigmoid(-z)).sum() / pairs
    means = {
        "loss": loss * pairs,
        "rewards/chosen": chosen.sum(),
        "rewards/rejected": rejected.sum(),
        "rewards/margins": z.sum(),
        "rewards/accuracies": (z > 0).float().sum(),
    }
    return loss, {name: value.detach() / pairs for name, value in means.items()}


def sum_pairs(t: TokenColumns, per_token: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each chosen and each rejected sample's sum over the tokens, [B] and [B]. Differentiable."""
    count = len(t.response_lengths)
    sums = per_token.new_zeros(count).index_add(0, t.sample_of_row, per_token)
    chosen, rejected = sums[0::2], sums[1::2]
    require_pairs(t["preference"], t.sample_of_row, count)
    return chosen, rejected


def require_pairs(preference: Tensor, sample_of_row: Tensor, count: int) -> None:
    """Raises ValueError unless chosen and rejected samples alternate. `preference` [R] is 1 for the tokens of a chosen
    sample, -1 for those of a rejected sample."""
    signs = preference.new_zeros(count).index_copy(0, sample_of_row, preference)
    wanted = torch.ones_like(signs)
    wanted[1::2] = -1
    if count % 2 or not torch.equal(signs, wanted):
        raise FlagError(
            "a micro-batch of pairs",
            "have chosen and rejected samples in turn",
            signs.tolist(),
            "use --rollout-function-path slime.rollout.sft_rollout.generate_pairs",
        )
