"""The models that the engines of a run serve, each as one record: the policy, and the frozen teachers.

Placement, `vime plan` and the engine pools loop over these records; no other code knows how many models there are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from slime.config.fields import spelled
from slime.config.schema import Config

POLICY = "policy"
DEFAULT = "default"
"""The name of the teacher of samples that name no other."""
_NAMED = re.compile(r"([\w.-]+)=(.+)")


@dataclass(frozen=True)
class ServedModel:
    """One model behind a router of its own."""

    name: str
    checkpoint: str
    """A Hugging Face directory."""
    backend: str
    """A value of --rollout-backend."""
    devices: int
    """GPUs of all its engines, or places on a CPU, that the run gives it."""
    devices_per_engine: int
    frozen: bool = False
    """It keeps the weights of its checkpoint. Otherwise the trainer's weights replace them."""
    args: tuple[str, ...] = ()
    """Flags of its engines, such as "max-model-len=8192", besides those that the run sets. Of the policy: none here, as
    the engine section has them."""
    top_tokens: int = 0
    """The most log-probs that a request may ask for at one place."""
    temperature: float = 1.0
    """Its logits are divided by it."""


def served_models(c: Config) -> tuple[ServedModel, ...]:
    """The models of a run, the policy first. None where only the trainer runs. ValueError for names that are not
    unique."""
    if not c.num_engines:
        return ()
    apart, size = bool(c.rollout.rollout_external_engine_addrs), c.cluster.rollout_num_gpus_per_engine
    policy = ServedModel(
        POLICY,
        c.rollout.hf_checkpoint,
        c.engine.rollout_backend,
        0 if apart else c.cluster.rollout_num_gpus,
        size,
        top_tokens=c.off_policy.replay_kept_tokens,
    )
    return (policy, *_teachers(c))


def _teachers(c: Config) -> tuple[ServedModel, ...]:
    flags = c.distillation
    size = flags.opd_teacher_num_gpus_per_engine
    return tuple(
        ServedModel(
            teacher(name),
            checkpoint,
            flags.opd_type or "",
            flags.opd_teacher_num_gpus or size,
            size,
            frozen=True,
            args=tuple(flags.opd_teacher_engine_args or ()),
            top_tokens=flags.opd_top_k,
            temperature=c.rollout.rollout_temperature,
        )
        for name, checkpoint in by_name("opd_teacher_model", flags.opd_teacher_model).items()
    )


def teacher(name: str) -> str:
    """The name of the served model of a teacher."""
    return f"teacher-{name}"


def frozen_devices(c: Config) -> int:
    """The devices of all models but the policy. They share them with nothing."""
    return sum(model.devices for model in served_models(c) if model.frozen)


def by_name(field: str, values: Sequence[str] | None) -> dict[str, str]:
    """["math=A", "B"] -> {"math": "A", DEFAULT: "B"}. ValueError for a name that is given twice."""
    found: dict[str, str] = {}
    for typed in values or ():
        match = _NAMED.fullmatch(typed)
        name, value = (match[1], match[2]) if match else (DEFAULT, typed)
        if name in found:
            raise ValueError(
                f"{spelled(field)} must have one value for each source, got {found[name]} and {value} for {name}; "
                "write SOURCE=VALUE, and at most one value without SOURCE="
            )
        found[name] = value
    return found
