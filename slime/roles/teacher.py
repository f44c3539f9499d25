"""The teacher of on-policy distillation, on the trainer's ranks (--opd-type megatron)."""

from __future__ import annotations

from slime.checkpoints.checkpoint_dir import is_hf_directory
from slime.config import Config
from slime.config.problems import require_value
from slime.roles.record import Role, Source


def _start(c: Config) -> Source:
    flags = c.distillation
    return Source(require_value(flags.opd_teacher_load), flags.opd_teacher_ckpt_step, "--opd-teacher-load")


def _shape(c: Config) -> str:
    """Returns the directory with the teacher's config.json. A Megatron checkpoint contains no config.json, so its
    teacher must have the policy's shape."""
    own = require_value(c.distillation.opd_teacher_load)
    return own if is_hf_directory(own) else c.rollout.hf_checkpoint


def _served(c: Config) -> bool:
    return c.distillation.opd_type != "megatron"


TEACHER = Role(
    "teacher",
    "teacher_log_probs",
    "teacher_log_probs",
    _start,
    prefix="teacher_",
    shape=_shape,
    absent=_served,
)
