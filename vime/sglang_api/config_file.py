"""`--sglang-config FILE` of slime: one model in equal groups becomes flags, every other layout is an error.

vLLM engines of a run are equal, and all of them get the trainer's weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from slime.config.config_file import FlagGroup, yaml_group

FLAG = "sglang_config"
_MODEL = {"name", "model_path", "update_weights", "num_gpus_per_engine", "server_groups", "engine_groups"}
_GROUP = {"worker_type", "num_gpus", "num_gpus_per_engine", "overrides"}
_SIZES = ("rollout_num_gpus", "rollout_num_gpus_per_engine")
_TYPES = {
    "prefill": "separate prefill servers are not supported yet",
    "decode": "separate prefill servers are not supported yet",
    "encoder": "this version takes text only",
    "placeholder": "vime reserves no GPUs for others",
}


def expand(groups: list[FlagGroup]) -> tuple[list[FlagGroup], list[str]]:
    """`groups` with the flags that the file stands for, and a note. ValueError that names the entry that vLLM lacks."""
    given = [group for group in groups if group.name == FLAG]
    if not given:
        return groups, []
    file = given[-1]
    if len(file.values) != 1:
        raise ValueError(
            f"{file.typed} must name one YAML file, got {' '.join(file.values) or 'none'}; give one path"
        )
    own = {group.name: group.values for group in groups}
    made = [group for group in _flags(Path(file.values[0]), own) if own.get(group.name) != group.values]
    for group in made:
        if group.name in _SIZES and group.name in own:
            raise ValueError(
                f"{group.typed} must equal the entries of {file.values[0]}, got {' '.join(own[group.name])} and "
                f"{group.values[0]}; change one of them"
            )
    became = " ".join(token for group in made for token in group.tokens) or "nothing more"
    note = f"{file.typed} {file.values[0]} becomes {became}"
    return [*(group for group in groups if group.name != FLAG), *made], [note]


def _flags(path: Path, own: dict[str, list[str]]) -> list[FlagGroup]:
    """The flags of one file."""
    model = _model(path)
    if (served := model.get("model_path")) not in (None, *own.get("hf_checkpoint", [])):
        raise ValueError(f"model_path in {path} must be that of --hf-checkpoint, got {served}; leave it out")
    if model.get("update_weights") is False:
        raise ValueError(
            f"update_weights in {path} must be true, got false; engines get the trainer's weights"
        )
    entries = model.get("server_groups") or model.get("engine_groups") or []
    if not entries:
        raise ValueError(
            f"server_groups in {path} must have a group, got none; give worker_type and num_gpus"
        )
    total, sizes, overrides = 0, set(), []
    for entry in entries:
        _known(entry, _GROUP, f"a group of {path}")
        if (kind := entry.get("worker_type")) != "regular":
            raise ValueError(
                f"worker_type in {path} must be regular, got {kind} ({_TYPES.get(str(kind), 'unknown')}); keep one "
                "model in regular groups"
            )
        total += int(entry["num_gpus"])
        sizes.add(entry.get("num_gpus_per_engine") or model.get("num_gpus_per_engine"))
        overrides.append(entry.get("overrides") or {})
    if len(sizes) > 1 or any(one != overrides[0] for one in overrides):
        raise ValueError(
            f"the groups of {path} must have the same num_gpus_per_engine and overrides, got {len(entries)} different "
            "ones; all engines of a run are equal: keep one group"
        )
    (size,) = sizes
    flags = [yaml_group("rollout_num_gpus", total)]
    flags += [] if size is None else [yaml_group("rollout_num_gpus_per_engine", size)]
    given = {key.replace("-", "_"): value for key, value in overrides[0].items() if key != "model_path"}
    return flags + [yaml_group(f"sglang_{key}", value) for key, value in given.items()]


def _model(path: Path) -> dict[str, Any]:
    """The one model of the file."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"--sglang-config must name a file, got {path} ({error.strerror}); check the path"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be valid YAML, got: {error}") from error
    models = content.get("sglang") if isinstance(content, dict) else None
    if not isinstance(models, list) or not all(isinstance(model, dict) for model in models):
        raise ValueError(
            f"{path} must have a list of models under sglang, got {str(content)[:80]}; see slime's docs"
        )
    if len(models) != 1:
        names = ", ".join(str(model.get("name")) for model in models)
        raise ValueError(
            f"{path} must have one model, got {len(models)} ({names}); serve frozen models yourself, and name their "
            "addresses in your hooks"
        )
    _known(models[0], _MODEL, f"the model of {path}")
    return dict(models[0])


def _known(entry: dict[str, object], names: set[str], what: str) -> None:
    if unknown := sorted(set(entry) - names):
        raise ValueError(
            f"{what} must have no other entries than {sorted(names)}, got {', '.join(unknown)}; remove them"
        )
