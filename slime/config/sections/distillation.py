"""Flags of the distillation section: teachers whose log-probs of the sampled tokens the policy learns to match."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import flag
from slime.config.ranges import COEFFICIENT, COUNT, COUNT_OR_ZERO, UNIT


@dataclass(frozen=True)
class DistillationConfig:
    """On-policy distillation: the reverse KL to a teacher on the policy's own samples, in addition to the reward."""

    use_opd: bool = flag(
        False,
        "on-policy distillation: subtract --opd-kl-coef * (log-prob - teacher's log-prob) from advantages",
    )
    opd_type: str | None = flag(
        None,
        "where the teacher runs: on the trainer's ranks (megatron), on engines of the run (sglang, vllm with "
        "--opd-teacher-model), or on a server of one's own (sglang, vllm with --opd-teacher-url or --rm-url)",
        choices=("megatron", "sglang", "vllm"),
    )
    opd_kl_coef: float = flag(
        1.0, "weight of the reverse KL to the teacher in the advantages", range=COEFFICIENT
    )
    opd_top_k: int = flag(
        0,
        "number of the teacher's most probable tokens whose log-probs come with each response token",
        range=COUNT_OR_ZERO,
    )
    opd_loss_type: str = flag(
        "reverse_kl",
        "how the policy is drawn to the teacher: the reverse KL in the advantages, or a term of the loss over the "
        "teacher's --opd-top-k tokens",
        choices=("reverse_kl", "forward_kl", "jsd"),
    )
    opd_loss_coef: float = flag(
        1.0, "weight of --opd-loss-type forward_kl and jsd in the loss", range=COEFFICIENT
    )
    opd_jsd_beta: float = flag(
        0.5, "weight of the teacher in the mixture of --opd-loss-type jsd, between 0 and 1", range=UNIT
    )
    opd_teacher_load: str | None = flag(
        None,
        "weights of the teacher with --opd-type megatron: a Hugging Face directory, or a Megatron checkpoint of a "
        "model of the policy's shape",
    )
    opd_teacher_ckpt_step: int | None = flag(
        None, "iteration of --opd-teacher-load (default: the newest)", range=COUNT_OR_ZERO
    )
    opd_teacher_model: list[str] | None = flag(  # noqa: RUF009
        None,
        "teachers that engines of the run serve with --opd-type sglang or vllm: DIR, a Hugging Face directory, or the "
        "name of a --frozen-model; SOURCE=DIR for samples of one source; the source default is for all others",
    )
    opd_teacher_url: list[str] | None = flag(  # noqa: RUF009
        None, "the same for servers of one's own: URL or SOURCE=URL (default: --rm-url)"
    )
    opd_teacher_key: str = flag("data_source", "key of a sample's metadata that names its source")
    opd_teacher_num_gpus: int | None = flag(
        None,
        "number of GPUs of the engines of each --opd-teacher-model, apart from all other GPUs of the run (default: of "
        "one engine)",
        range=COUNT,
    )
    opd_teacher_num_gpus_per_engine: int = flag(1, "number of GPUs per engine of a teacher", range=COUNT)
    opd_teacher_engine_args: list[str] | None = flag(  # noqa: RUF009
        None, "flags of the teachers' engines as NAME=VALUE, such as max-model-len=8192"
    )
