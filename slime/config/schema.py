"""Defines the whole configuration: one frozen record of frozen sections. Each field can also be read by its flag
name."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import json
import operator
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from slime.config.fields import FlagSpec, Values, get_specs
from slime.config.secrets import mask_secrets
from slime.config.sections.algorithm import AlgorithmConfig
from slime.config.sections.checkpoint import CheckpointConfig
from slime.config.sections.cluster import ClusterConfig
from slime.config.sections.critic import CriticConfig
from slime.config.sections.data import DataConfig
from slime.config.sections.debug import DebugConfig
from slime.config.sections.distillation import DistillationConfig
from slime.config.sections.engine import EngineConfig
from slime.config.sections.evaluation import EvaluationConfig
from slime.config.sections.fault_tolerance import FaultToleranceConfig
from slime.config.sections.kernels import KernelsConfig
from slime.config.sections.logging import LoggingConfig
from slime.config.sections.lora import LoraConfig
from slime.config.sections.megatron import MegatronConfig
from slime.config.sections.off_policy import OffPolicyConfig
from slime.config.sections.reward import RewardConfig
from slime.config.sections.rollout import RolloutConfig
from slime.config.sections.sessions import SessionsConfig
from slime.config.sections.train import TrainConfig
from slime.config.sections.weight_update import WeightUpdateConfig
from slime.config.unsupported import NO_EFFECT, UNSUPPORTED
from slime.records.errors import FlagError

S = TypeVar("S")

SECTIONS: dict[str, type] = {
    "cluster": ClusterConfig,
    "train": TrainConfig,
    "lora": LoraConfig,
    "weight_update": WeightUpdateConfig,
    "rollout": RolloutConfig,
    "sessions": SessionsConfig,
    "engine": EngineConfig,
    "data": DataConfig,
    "evaluation": EvaluationConfig,
    "checkpoint": CheckpointConfig,
    "algorithm": AlgorithmConfig,
    "critic": CriticConfig,
    "distillation": DistillationConfig,
    "off_policy": OffPolicyConfig,
    "reward": RewardConfig,
    "fault_tolerance": FaultToleranceConfig,
    "logging": LoggingConfig,
    "debug": DebugConfig,
    "kernels": KernelsConfig,
    "megatron": MegatronConfig,
}

SECTION_OF = {f.name: section for section, cls in SECTIONS.items() for f in dataclasses.fields(cls)}
"""Maps a field name to the name of its section. A name belongs to one section only (tested)."""

NEGATED = {
    "rollout_global_dataset": "disable_rollout_global_dataset",
    "grpo_std_normalization": "disable_grpo_std_normalization",
    "rewards_normalization": "disable_rewards_normalization",
    "compute_advantages_and_returns": "disable_compute_advantages_and_returns",
    "wandb_random_suffix": "disable_wandb_random_suffix",
}
"""Maps a name in `args` that existing hooks read to the --disable-* flag with the opposite meaning."""


def declared_flags() -> dict[str, FlagSpec]:
    """Returns field name -> spec, for every flag that a section declares. `slime.rules.flags` adds the values of
    registries."""
    return {name: spec for cls in SECTIONS.values() for name, spec in get_specs(cls).items()}


@dataclass(frozen=True)
class Config:
    """A resolved and validated configuration.

    A field is read through its section: `config.rollout.rollout_batch_size`. Only the `args` of hooks are flat, see
    `namespace`.

    Example:
        config = Config.from_flat({"rollout_batch_size": 32, "lr": 1e-6})
        assert config.data.rollout_batch_size == 32
        longer = config.with_values(num_rollout=100)
    """

    cluster: ClusterConfig
    train: TrainConfig
    lora: LoraConfig
    weight_update: WeightUpdateConfig
    rollout: RolloutConfig
    sessions: SessionsConfig
    engine: EngineConfig
    data: DataConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    algorithm: AlgorithmConfig
    critic: CriticConfig
    distillation: DistillationConfig
    off_policy: OffPolicyConfig
    reward: RewardConfig
    fault_tolerance: FaultToleranceConfig
    logging: LoggingConfig
    debug: DebugConfig
    kernels: KernelsConfig
    megatron: MegatronConfig
    notes: tuple[str, ...] = field(default=())
    """Notes on values that were adjusted, with the reasons."""

    @classmethod
    def from_flat(cls, values: Values, notes: tuple[str, ...] = ()) -> Config:
        """Makes the sections from one flat mapping of field name to value. Missing fields get their defaults."""
        set_values: dict[str, Values] = {name: {} for name in SECTIONS}
        for name, value in values.items():
            set_values[SECTION_OF[name]][name] = value
        return cls(**{name: SECTIONS[name](**set_values[name]) for name in SECTIONS}, notes=notes)

    @classmethod
    def from_args(cls, args: object) -> Config:
        """Returns the configuration in the `args` of a hook, see `read_section`."""
        return cls(**{name: read_section(section, args) for name, section in SECTIONS.items()})

    def require_filled(self) -> Config:
        """Returns this configuration after a check that every flag without `| None` has a value (AssertionError)."""
        empty = [n for n, spec in declared_flags().items() if spec.filled and self.get_value(n) is None]
        assert not empty, (
            f"a resolved configuration must have values of all flags, got none of {empty}; report this as a bug"
        )
        return self

    if not TYPE_CHECKING:  # an unknown attribute stays an error of the type checker

        def __getattr__(self, name: str) -> NoReturn:
            """Raises AttributeError. For a flag the error names the section, because code that was written for `args`
            reads flags without a section."""
            section = SECTION_OF.get(name)
            if section is None:
                raise AttributeError(f"'Config' object has no attribute {name!r}", name=name, obj=self)
            raise AttributeError(
                f"a flag must be read through its section, got {name} of a Config; read {section}.{name}",
                name=name,
                obj=self,
            )

    def get_value(self, name: str) -> Any:
        """Returns the value of a field by its name alone, for code that iterates over flags."""
        return getattr(getattr(self, SECTION_OF[name]), name)

    @property
    def world_size(self) -> int:
        """Returns the number of trainer ranks."""
        return self.cluster.actor_num_nodes * self.cluster.actor_num_gpus_per_node

    @property
    def data_parallel_size(self) -> int:
        """Returns the number of groups of trainer ranks that get different samples."""
        m = self.megatron
        return self.world_size // (
            m.tensor_model_parallel_size * m.pipeline_model_parallel_size * m.context_parallel_size
        )

    @property
    def num_engines(self) -> int:
        """Returns the number of rollout engines, or 0 if only the trainer runs or --rollout-num-gpus is not known
        yet."""
        c = self.cluster
        return (c.rollout_num_gpus or 0) // c.rollout_num_gpus_per_engine * c.rollout_engines_per_gpu

    @property
    def nodes_per_engine(self) -> int:
        """Returns the number of nodes per engine, or 1 if an engine fits on one node."""
        return -(-self.cluster.rollout_num_gpus_per_engine // self.cluster.num_gpus_per_node)

    @property
    def engine_tensor_parallel(self) -> int:
        """Returns an engine's tensor-parallel size: its GPUs divided by its pipeline stages and data-parallel
        copies."""
        facts = self.engine.engine_facts
        other = facts.pipeline_parallel_size * facts.data_parallel_size
        return self.cluster.rollout_num_gpus_per_engine // other or 1

    @property
    def rollouts(self) -> int:
        """Returns the value of --num-rollout. With --num-epoch, it is set only after `with_values(num_rollout=...)`."""
        if self.data.num_rollout is None:
            raise FlagError("num_rollout", "be known to count the steps", "None", "read the data first")
        return self.data.num_rollout

    @property
    def rollouts_ahead(self) -> int:
        """Returns the number of rollouts that generation may run ahead of training. Rare weight updates make the number
        smaller, because the weights get older between two updates."""
        return self.rollout.max_staleness + 1 - self.weight_update.update_weights_interval

    @property
    def total_steps(self) -> int:
        """Returns the run's number of optimizer steps, with the errors of `rollouts`."""
        return self.rollouts * self.data.num_steps_per_rollout

    def with_values(self, **values: object) -> Config:
        """Returns a copy with replaced fields, for values that are known only after the data are read
        (`num_rollout`)."""
        flat = {name: self.get_value(name) for name in SECTION_OF}
        return Config.from_flat({**flat, **values}, self.notes)

    def namespace(self, **facts: object) -> argparse.Namespace:
        """Returns a flat, mutable copy for user hooks (their `args`), with run-time values added (the address of the
        router).

        It contains every field under its name; unsupported flags with their default; switches without effect as False
        (other flags without effect are absent, because they have no known value); the negated names of `NEGATED`;
        Megatron overrides under their core field names; the keys of --custom-config-path that are not flags; and the
        backend's values under the backend's names. `facts` have priority.
        """
        flat = {name: entry.default for name, entry in UNSUPPORTED.items()}
        flat.update({name: spec.default for name, spec in NO_EFFECT.items() if spec.default is not None})
        flat.update({name: copy.deepcopy(self.get_value(name)) for name in SECTION_OF})
        flat.update({positive: not flat[negative] for positive, negative in NEGATED.items()})
        flat.update(
            {
                k: v
                for k, v in {
                    **self.megatron.model_args,
                    **self.megatron.overrides,
                    **self.train.hook_settings,
                }.items()
                if k not in flat
            }
        )
        flat.update(copy.deepcopy(self.engine.hook_args))
        flat.update(world_size=self.world_size, data_parallel_size=self.data_parallel_size)
        return argparse.Namespace(**{**flat, **facts})

    def to_dict(self) -> dict[str, Values]:
        """Returns section name -> its fields as plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Values) -> Config:
        """Returns the configuration that `to_dict` has written. Raises ValueError for a key that is not a field."""
        try:
            sections = {name: SECTIONS[name](**data[name]) for name in SECTIONS}
            return cls(**sections, notes=tuple(data.get("notes", ())))
        except (KeyError, TypeError) as error:
            raise FlagError("saved configuration", "have the fields of this version", error) from error

    def save_json(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_dict` as JSON in one atomic step, without secrets (`mask_secrets`). (`config.save` is --save.)"""
        data = mask_secrets(self.to_dict())
        temporary = Path(f"{path}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)


def read_section(section: type[S], args: object) -> S:
    """Returns a section made from the `args` of a hook: each field that they have as an attribute, else its default.

    This function is the border with plug-ins: the `args` of a plug-in or of slime lack some of our flags. A run reads
    the same `args` for each sample. So the last section of a type that was made without defaults is returned again
    while its values are the same objects. A new section costs 37 us, and a comparison 1 us.
    """
    names = _NAMES[section]
    if type(args) in (argparse.Namespace, SimpleNamespace):
        values = list(map(vars(args).get, names, itertools.repeat(_ABSENT)))
    else:  # a plug-in's own class may compute its attributes
        values = [getattr(args, name, _ABSENT) for name in names]
    last = _LAST.get(section)
    if last is None or not all(map(operator.is_, last[0], values)):
        found = dict(zip(names, values, strict=True))
        set_values = {name: value for name, value in found.items() if value is not _ABSENT}
        made = section(**set_values)
        if len(set_values) < len(names):
            return made
        _LAST[section] = last = values, made
    same: S = last[1]
    return same


_ABSENT = object()
_NAMES: dict[type, tuple[str, ...]] = {
    section: tuple(field.name for field in dataclasses.fields(section)) for section in SECTIONS.values()
}
_LAST: dict[type, tuple[list[object], Any]] = {}
"""Values and section of the last call of `read_section` for each type."""
