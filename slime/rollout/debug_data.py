"""Samples of a rollout saved for replay (`--save-debug-rollout-data`, `--load-debug-rollout-data`), and what each rank
made of them (`--save-debug-train-data`).

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
    """Write all samples to the path `template`, with {rollout_id} replaced ("eval_3" for evaluation 3).

    `facts`: how the samples were drawn, as plain values (slime.rollout.facts). An audit of the file needs them.
    """
    path = _path(
        template, f"eval_{rollout_id}" if evaluation else str(rollout_id), "--save-debug-rollout-data"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = [sample.to_dict() for group in groups for sample in group]
    torch.save({"rollout_id": rollout_id, "samples": samples, "facts": facts}, path)
    return path


def save_debug_train_data(template: str, rollout_id: int, rank: int, data: Mapping[str, object]) -> Path:
    """Write the columns of a trainer rank to the path `template`, with {rollout_id} and {rank} replaced, as slime does:
    `{"rollout_id", "rank", "rollout_data": {column: one entry per sample}}`. Tensors are those of the host."""
    path = Path(template.format(rollout_id=rollout_id, rank=rank))
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {name: _on_host(value) for name, value in data.items()}
    torch.save({"rollout_id": rollout_id, "rank": rank, "rollout_data": columns}, path)
    return path


def _on_host(value: object) -> object:
    """`value` with its tensors on the host, and its arrays as tensors: a file that loads without code."""
    if isinstance(value, list | tuple):
        return [_on_host(item) for item in value]
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def load_debug_rollout_data(
    template: str, rollout_id: int, *, evaluation: bool = False, subsample: float | None = None
) -> list[SampleGroup]:
    """The groups that `save_debug_rollout_data` wrote, or the first `subsample` of them, a fraction in (0, 1]."""
    return load_with_facts(template, rollout_id, evaluation=evaluation, subsample=subsample)[0]


def load_with_facts(
    template: str, rollout_id: int, *, evaluation: bool = False, subsample: float | None = None
) -> tuple[list[SampleGroup], dict[str, object] | None]:
    """The groups of a file, and how they were drawn (None if the file does not record it).

    Consecutive samples with the same `group_index` form a group. ValueError if the file is missing or holds
    more than plain values and tensors.
    """
    flag = "--load-debug-rollout-data"
    path = _path(template, f"eval_{rollout_id}" if evaluation else str(rollout_id), flag)
    if not path.is_file():
        raise ValueError(
            f"{flag} must name a saved rollout, got no file {path}; check {{rollout_id}} in the template"
        )
    try:
        record: dict[str, Any] = torch.load(path, weights_only=True)  # ok: runs no code
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
