"""On-policy distillation: the reverse KL to a teacher as a penalty in the advantages, or a divergence in the loss. Pure
functions of tensors.

On samples of the policy, `mean(log_probs - teacher_log_probs)` estimates KL(policy || teacher) without bias (MiniLLM,
2306.08543; GKD, 2306.13649). A divergence in the loss has one class for each of the teacher's top-k ids, and one class
for all other ids with the remaining probability. By the data-processing inequality, it is at most the divergence over
the vocabulary. It is at least 0, and 0 if the policy has the teacher's probabilities for these ids.

Sample i has R_i response tokens, a micro-batch has R response tokens, and a token has K ids.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slime.algo.token_columns import TokenColumns
from slime.config.sections.distillation import DistillationConfig
from slime.types import TrainData

LEAST_TAIL = 1e-6
"""Least total probability of the other ids. Below this value, float32 has no digits for 1 - sum(p)."""
NOWHERE = -1e4
"""Log-prob of policy and teacher at an index without an id. It is finite, and its probability is 0."""


def with_tail(log_probs: Tensor, known: Tensor) -> Tensor:
    """Returns the log-probs [R, K] where `known`, with a last column `log(1 - p.sum(1))`: [R, K + 1]. The probability
    of the last column is at least LEAST_TAIL."""
    log_probs = torch.where(known, log_probs, NOWHERE)
    tail = (1 - log_probs.exp().sum(1)).clamp(min=LEAST_TAIL)
    return torch.cat([log_probs, tail.log()[:, None]], 1)


def forward_kl(teacher: Tensor, policy: Tensor) -> Tensor:
    """Returns `(teacher.exp() * (teacher - policy)).sum(1)`, [R], from log-probs of the same classes."""
    return (teacher.exp() * (teacher - policy)).sum(1)


def jensen_shannon(teacher: Tensor, policy: Tensor, beta: float) -> Tensor:
    """Returns `beta * KL(teacher || m) + (1 - beta) * KL(policy || m)`, `m = beta * teacher + (1 - beta) * policy`,
    [R], from log-probs. This is the generalised Jensen-Shannon divergence of GKD (2306.13649)."""
    middle = torch.logaddexp(teacher + math.log(beta), policy + math.log1p(-beta))
    return beta * forward_kl(teacher, middle) + (1 - beta) * forward_kl(policy, middle)


def distillation_term(flags: DistillationConfig, t: TokenColumns) -> Tensor | None:
    """Returns each token's divergence by --opd-loss-type, [R] nats. Returns None if the reverse KL is in the
    advantages."""
    if not flags.use_opd or flags.opd_loss_type == "reverse_kl":
        return None
    assert t.of_ids is not None, "every head computes them for a loss that reads ids"
    known = t["teacher_top_ids"] >= 0
    teacher, policy = with_tail(t["teacher_top_log_probs"].float(), known), with_tail(t.of_ids, known)
    if flags.opd_loss_type == "jsd":
        return jensen_shannon(teacher, policy, flags.opd_jsd_beta)
    return forward_kl(teacher, policy)


def distillation_penalties(flags: DistillationConfig, data: TrainData) -> list[Tensor] | None:
    """Returns `opd_kl_coef * (old_log_probs - teacher_log_probs)` per sample, [R_i] fp32. Returns None without
    --use-opd, and with another --opd-loss-type than reverse_kl.

    Sets the column `opd_reverse_kl`, which is the difference without the weight. Raises ValueError for a log-prob of
    the teacher that is not finite at a trained token. At any other token, the difference is then 0.
    """
    if not flags.use_opd or flags.opd_loss_type != "reverse_kl":
        return None
    lengths = [len(x) for x in data["old_log_probs"]]
    teacher, trained = torch.cat(data["teacher_log_probs"]).float(), torch.cat(data["loss_masks"]) != 0
    if not (finite := teacher.isfinite() | ~trained).all():
        raise ValueError(
            f"teacher_log_probs must be finite, got {teacher[~finite][0].item()} for {int((~finite).sum())} tokens; "
            "check the weights or the server of the teacher"
        )
    reverse_kl = torch.cat(data["old_log_probs"]).float() - teacher
    reverse_kl = torch.where(trained | reverse_kl.isfinite(), reverse_kl, 0.0)
    data["opd_reverse_kl"] = list(reverse_kl.split(lengths))
    return list((flags.opd_kl_coef * reverse_kl).split(lengths))


def subtract_penalties(flags: DistillationConfig, data: TrainData) -> None:
    """Subtracts the penalties from advantages that a hook has made."""
    if (penalties := distillation_penalties(flags, data)) is not None:
        pairs = zip(data["advantages"], penalties, strict=True)
        data["advantages"] = [advantages - penalty for advantages, penalty in pairs]
