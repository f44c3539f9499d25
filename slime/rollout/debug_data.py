"""This module saves and loads a rollout's samples (`--save-debug-rollout-data`, `--load-debug-rollout-data`), and saves
each rank's train data (`--save-debug-train-data`).

Files hold plain values only. Loading a file runs no code.
"""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime.types import Sample, SampleGroup


def save_debug_rollout_data(
    template: str,
    rollout_id: int,
    groups: list[SampleGroup],
    *,
    evaluation: bool = False,
    facts: dict[str, object] | None = None,
) -> Path:
    """Writes all samples to the path `template`, with {rollout_id} replaced ("eval_3" for evaluation 3).

    `facts` describe the sampling in plain values (slime.rollout.facts). An audit of the file needs the facts.
    """
    path = _path(
        template, f"eval_{rollout_id}" if evaluation else str(rollout_id), "--save-debug-rollout-data"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = [sample.to_dict() for group in groups for sample in group]
    torch.save({"rollout_id": rollout_id, "samples": samples, "facts": facts}, path)
    return path


def save_debug_train_data(template: str, rollout_id: int, rank: int, data: Mapping[str, object]) -> Path:
    """Writes a trainer rank's columns to the path `template`, with {rollout_id} and {rank} replaced, in slime's format:
    `{"rollout_id", "rank", "rollout_data": {column: one entry per sample}}`. All tensors are on the host."""
    path = Path(template.format(rollout_id=rollout_id, rank=rank))
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {name: _on_host(value) for name, value in data.items()}
    torch.save({"rollout_id": rollout_id, "rank": rank, "rollout_data": columns}, path)
    return path


def _on_host(value: object) -> object:
    """Returns `value` with tensors on the host and arrays as tensors, so that loading the file runs no code."""
    if isinstance(value, list | tuple):
        return [_on_host(item) for item in value]
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def load_debug_rollout_data(
    template: str, rollout_id: int, *, evaluation: bool = False, subsample: float | None = None
) -> list[SampleGroup]:
    """Returns the groups that `save_debug_rollout_data` wrote, or their first share `subsample`, in (0, 1]."""
    return load_with_facts(template, rollout_id, evaluation=evaluation, subsample=subsample)[0]


def load_with_facts(
    template: str, rollout_id: int, *, evaluation: bool = False, subsample: float | None = None
) -> tuple[list[SampleGroup], dict[str, object] | None]:
    """Returns a file's groups and the facts about their sampling (None if the file does not record the facts).

    Consecutive samples with the same `group_index` form a group. Raises ValueError if the file is missing or holds more
    than plain values and tensors.
    """
    flag = "--load-debug-rollout-data"
    path = _path(template, f"eval_{rollout_id}" if evaluation else str(rollout_id), flag)
    if not path.is_file():
        raise ValueError(
            f"{flag} must name a saved rollout, got no file {path}; check {{rollout_id}} in the template"
        )
    try:
        record: dict[str, Any] = torch.load(path, weights_only=True)  # ok: `weights_only` runs no code
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"{flag} must hold plain values, got a file that does not load: {path} ({error})"
        ) from error
    samples = [Sample.from_dict(sample) for sample in record["samples"]]
    groups = [
        list(members) for _, members in itertools.groupby(samples, key=lambda sample: sample.group_index)
    ]
    facts = record.get("facts")
    if subsample is None:
        return groups, facts
    if not 0 < subsample <= 1:
        raise ValueError(
            f"{flag}-subsample must lie in (0, 1], got {subsample}; it is a fraction of the groups"
        )
    return groups[: math.ceil(subsample * len(groups))], facts


def _path(template: str, name: str, flag: str) -> Path:
    try:
        return Path(template.format(rollout_id=name))
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"{flag} must hold no braces but {{rollout_id}}, got {template}; rename the path"
        ) from error
