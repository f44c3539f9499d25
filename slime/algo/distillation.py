"""On-policy distillation: the reverse KL to a teacher as a penalty in the advantages. Pure functions of tensors.

Of samples of the policy, `mean(log_probs - teacher_log_probs)` estimates KL(policy || teacher) without bias (MiniLLM,
2306.08543; GKD, 2306.13649). R_i response tokens of sample i.
"""

from __future__ import annotations

from argparse import Namespace

import torch
from torch import Tensor

from slime.config.schema import section_of
from slime.config.sections.distillation import DistillationConfig
from slime.types import TrainData


def distillation_penalties(args: Namespace, data: TrainData) -> list[Tensor] | None:
    """`opd_kl_coef * (old_log_probs - teacher_log_probs)` of each sample, [R_i] fp32; None without --use-opd.

    Sets the column `opd_reverse_kl`, the difference without its weight. ValueError for a log-prob of the teacher that
    is not finite.
    """
    flags = section_of(DistillationConfig, args)
    if not flags.use_opd:
        return None
    lengths = [len(x) for x in data["old_log_probs"]]
    teacher = torch.cat(data["teacher_log_probs"]).float()
    if not (finite := teacher.isfinite()).all():
        raise ValueError(
            f"teacher_log_probs must be finite, got {teacher[~finite][0].item()} for {int((~finite).sum())} tokens; "
            "check the weights or the server of the teacher"
        )
    reverse_kl = torch.cat(data["old_log_probs"]).float() - teacher
    data["opd_reverse_kl"] = list(reverse_kl.split(lengths))
    return list((flags.opd_kl_coef * reverse_kl).split(lengths))


def subtract_penalties(args: Namespace, data: TrainData) -> None:
    """The penalties, in advantages that a hook made."""
    if (penalties := distillation_penalties(args, data)) is not None:
        pairs = zip(data["advantages"], penalties, strict=True)
        data["advantages"] = [advantages - penalty for advantages, penalty in pairs]
