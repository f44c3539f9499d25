"""Defines one record for each model that a run's engines serve: the policy, and frozen models such as teachers and
judges.

Placement, `vime plan` and the engine pools loop over these records, so no other code depends on the number of models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.config.fields import spelled
from slime.config.schema import Config
from slime.records.errors import FlagError

POLICY = "policy"
DEFAULT = "default"
"""The source of samples that name no source. Its teacher scores these samples."""
FLAG = "--frozen-model"
_NAMED = re.compile(r"([\w.-]+)=(.+)")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_TEACHER = "teacher"


@dataclass(frozen=True)
class Spelling:
    """Spells the flags of a served model for messages.

    Example:
        >>> teacher = Spelling({"--rollout-num-gpus": "--opd-teacher-num-gpus"}, "--opd-teacher-engine-args ")
        >>> teacher.of("--rollout-num-gpus"), teacher.of("--lr"), teacher.engine_flag("max-model-len")
        ('--opd-teacher-num-gpus', '--lr', '--opd-teacher-engine-args max-model-len')
    """

    names: Mapping[str, str] = field(default_factory=dict)
    """Maps a flag of the policy to the flag or the entry for the same setting of this model."""
    engine: str | None = None
    """The text before a flag of the engine's program. None: the backend's prefix, as for the policy."""

    def of(self, flag: str) -> str:
        """Returns this model's spelling of a policy flag."""
        return self.names.get(flag, flag)

    def engine_flag(self, name: str, prefix: str = "--") -> str:
        """Returns the spelling of the flag `name` of the engine's program. For the policy, `prefix` precedes the
        name."""
        return f"{prefix if self.engine is None else self.engine}{name}"


@dataclass(frozen=True)
class ServedModel:
    """One model of a run, served by engines behind one router."""

    name: str
    checkpoint: str
    """A Hugging Face directory."""
    backend: str
    """A value of --rollout-backend."""
    devices: int
    """Number of GPUs, or of device slots on a CPU, that the run reserves for the model's engines."""
    devices_per_engine: int
    frozen: bool = False
    """True if the model keeps the weights of its checkpoint. Otherwise the trainer's weights replace them."""
    args: tuple[str, ...] = ()
    """Further flags of the engines, such as "max-model-len=8192". Empty for the policy, whose flags are in the engine
    section of the configuration."""
    top_tokens: int = 0
    """Largest number of log-probs that a request may ask for at one position."""
    temperature: float = 1.0
    """The model's logits are divided by this temperature."""
    file: str = ""
    """The file or flag that describes the model, for messages. Empty for a model with dedicated flags."""

    @property
    def spelling(self) -> Spelling:
        if not self.frozen:
            return Spelling()
        if not self.file:
            return _OF_TEACHERS
        of = f"of {self.name} in {self.file}"
        names = {
            "--rollout-num-gpus-per-engine": f"num_gpus_per_engine {of}",
            "--rollout-num-gpus": f"num_gpus {of}",
            "--hf-checkpoint": f"model_path {of}",
        }
        return Spelling(names, f"overrides {of}: ")


_OF_TEACHERS = Spelling(
    {
        "--rollout-num-gpus-per-engine": "--opd-teacher-num-gpus-per-engine",
        "--rollout-num-gpus": "--opd-teacher-num-gpus",
        "--hf-checkpoint": "--opd-teacher-model",
        "--rollout-backend": "--opd-type",
    },
    "--opd-teacher-engine-args ",
)


def served_models(c: Config) -> tuple[ServedModel, ...]:
    """Returns the served models of a run, the policy first; () if only the trainer runs. Raises ValueError for invalid
    entries of --frozen-model, and for names that are not unique."""
    if not c.num_engines:
        return ()
    external, size = bool(c.rollout.rollout_external_engine_addrs), c.cluster.rollout_num_gpus_per_engine
    policy = ServedModel(
        POLICY,
        c.rollout.hf_checkpoint,
        c.engine.rollout_backend,
        0 if external else c.cluster.rollout_num_gpus,
        size,
        top_tokens=count_policy_top_tokens(c),
    )
    return (policy, *_teachers(c).values(), *listed(c))


def count_policy_top_tokens(c: Config) -> int:
    """Returns the largest number of token ids per position that a request to the policy's engines may ask for."""
    return max(c.off_policy.listed_ids, c.algorithm.centred_ids)


def teachers(c: Config) -> dict[str, ServedModel]:
    """Returns {source: teacher} for the teachers that the run's engines serve. They come from --opd-teacher-model,
    which may name frozen models, and from frozen models with the names teacher and teacher-SOURCE."""
    if not c.distillation.use_opd:
        return {}
    frozen = {model.name: model for model in listed(c)}
    named = {source: frozen[name] for source, name in named_teachers(c).items()}
    of_names = {
        source: model for name, model in frozen.items() if (source := parse_source_name(name)) is not None
    }
    return _teachers(c) | of_names | named


def named_teachers(c: Config) -> dict[str, str]:
    """Returns {source: name} for the values of --opd-teacher-model that are names of frozen models."""
    if not c.distillation.use_opd:
        return {}
    frozen = {entry.get("name") for entry in c.engine.frozen_model}
    models = by_name("opd_teacher_model", c.distillation.opd_teacher_model)
    return {source: value for source, value in models.items() if value in frozen}


def teacher_directories(c: Config) -> dict[str, str]:
    """Returns {source: directory} for the other values of --opd-teacher-model."""
    names = named_teachers(c)
    models = by_name("opd_teacher_model", c.distillation.opd_teacher_model)
    return {source: value for source, value in models.items() if source not in names}


def _teachers(c: Config) -> dict[str, ServedModel]:
    """Returns {source: teacher} for the directories of --opd-teacher-model."""
    flags = c.distillation
    size = flags.opd_teacher_num_gpus_per_engine
    return {
        source: ServedModel(
            f"{_TEACHER}-{source}",
            checkpoint,
            flags.opd_type or "",
            flags.opd_teacher_num_gpus or size,
            size,
            frozen=True,
            args=tuple(flags.opd_teacher_engine_args or ()),
            top_tokens=flags.opd_top_k,
            temperature=c.rollout.rollout_temperature,
        )
        for source, checkpoint in teacher_directories(c).items()
    }


def listed(c: Config) -> list[ServedModel]:
    """Returns the frozen models of --frozen-model, in the order of the flag."""
    found: list[ServedModel] = []
    taken = {POLICY, c.engine.policy_name, *(model.name for model in _teachers(c).values())}
    for entry in c.engine.frozen_model:
        model = _frozen(c, entry)
        if model.name in taken:
            raise FlagError(
                f"name of a model in {model.file}",
                "be given once",
                f"{model.name} again or as a name of the policy's",
                "choose another name",
            )
        taken.add(model.name)
        found.append(model)
    return found


_ENTRIES: dict[str, type] = {
    "name": str,
    "model_path": str,
    "num_gpus": int,
    "num_gpus_per_engine": int,
    "args": list,
    "file": str,
}


def _frozen(c: Config, entry: Mapping[str, Any]) -> ServedModel:
    """Returns the record for one entry of --frozen-model. Raises ValueError for an invalid entry."""
    file = entry.get("file", FLAG)
    for key, value in entry.items():
        if key not in _ENTRIES or not isinstance(value, _ENTRIES[key]):
            kinds = ", ".join(f"{name} ({kind.__name__})" for name, kind in _ENTRIES.items())
            raise FlagError(file, f"have the entries {kinds}", f"{key}: {value}", "correct it")
    name, path = entry.get("name", ""), entry.get("model_path", "")
    if not _NAME.fullmatch(name) or not path:
        raise FlagError(
            file,
            "have a name of letters, digits, dots and dashes and a model_path for each frozen model",
            f"{name!r} and {path!r}",
            "add them",
        )
    size = entry.get("num_gpus_per_engine", 1)
    teaches = c.distillation.use_opd and (
        parse_source_name(name) is not None or name in named_teachers(c).values()
    )
    return ServedModel(
        name,
        path,
        c.engine.rollout_backend,
        entry.get("num_gpus", size),
        size,
        frozen=True,
        args=tuple(map(str, entry.get("args", ()))),
        top_tokens=c.distillation.opd_top_k if teaches else 0,
        temperature=c.rollout.rollout_temperature if teaches else 1.0,
        file=file,
    )


def parse_source_name(name: str) -> str | None:
    """Returns the source whose teacher has this name, or None if the name is not a teacher's."""
    if name == _TEACHER:
        return DEFAULT
    return name.removeprefix(f"{_TEACHER}-") if name.startswith(f"{_TEACHER}-") else None


def frozen_devices(c: Config) -> int:
    """Returns the number of devices of the frozen models. No other process uses these devices."""
    return sum(model.devices for model in served_models(c) if model.frozen)


def by_name(field: str, values: Sequence[str] | None) -> dict[str, str]:
    """Returns values by name: ["math=A", "B"] -> {"math": "A", DEFAULT: "B"}. Raises ValueError for a repeated name."""
    found: dict[str, str] = {}
    for typed in values or ():
        match = _NAMED.fullmatch(typed)
        name, value = (match[1], match[2]) if match else (DEFAULT, typed)
        if name in found:
            raise FlagError(
                spelled(field),
                "have one value for each source",
                f"{found[name]} and {value} for {name}",
                "write SOURCE=VALUE, and at most one value without SOURCE=",
            )
        found[name] = value
    return found
