"""Flags of the distillation section: a teacher whose log-probs of the sampled tokens the policy is drawn to."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import flag
from slime.config.ranges import COEFFICIENT, COUNT_OR_ZERO


@dataclass(frozen=True)
class DistillationConfig:
    """On-policy distillation: the reverse KL to a teacher on the policy's own samples, beside the reward."""

    use_opd: bool = flag(
        False,
        "on-policy distillation: subtract --opd-kl-coef * (log-prob - teacher's log-prob) from advantages",
    )
    opd_type: str | None = flag(
        None,
        "where the teacher runs: on the trainer's ranks (megatron), or behind the URL of --rm-url (sglang, vllm)",
        choices=("megatron", "sglang", "vllm"),
    )
    opd_kl_coef: float = flag(
        1.0, "weight of the reverse KL to the teacher in the advantages", range=COEFFICIENT
    )
    opd_teacher_load: str | None = flag(
        None,
        "weights of the teacher with --opd-type megatron: a Hugging Face directory, or a Megatron checkpoint of a "
        "model of the policy's shape",
    )
    opd_teacher_ckpt_step: int | None = flag(
        None, "iteration of --opd-teacher-load (default: the newest)", range=COUNT_OR_ZERO
    )
