"""Converts the file of `--vllm-config` or `--sglang-config`, which lists a run's models in slime's format, to flags.

    vllm:                            or sglang, if the overrides are flags of SGLang
      - name: actor
        server_groups: [{worker_type: regular, num_gpus: 4, overrides: {max-model-len: 8192}}]
      - name: judge
        model_path: Qwen/Qwen3-8B
        update_weights: false
        num_gpus_per_engine: 2
        server_groups: [{worker_type: regular, num_gpus: 2}]

The entry of the model that gets the trainer's weights becomes the flags of the policy's engines. Each other entry
becomes a --frozen-model. All engines of a model must be equal. Other layouts are errors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slime.config.config_file import YAML_ERRORS, FlagGroup, yaml_group
from slime.config.fields import spelled
from slime.records.errors import FlagError

FLAGS = ("sglang_config", "vllm_config")
KEYS = ("sglang", "vllm")
Spell = Callable[[list[FlagGroup]], list[FlagGroup]]
"""Converts flags of an engine to the spelling of the run's backend."""
_MODEL = {"name", "model_path", "update_weights", "num_gpus_per_engine", "server_groups", "engine_groups"}
_WORKERS = ("regular", "prefill", "decode")
_GROUP = {"worker_type", "num_gpus", "num_gpus_per_engine", "overrides"}
_SIZES = ("rollout_num_gpus", "rollout_num_gpus_per_engine")
_TYPES = {
    "encoder": "this version takes text only",
    "placeholder": "vime reserves no GPUs for others",
}


@dataclass(frozen=True)
class _Model:
    """An entry of the file's list of models."""

    name: str
    path: str | None
    updated: bool | None
    """The value of `update_weights` in the file, or None."""
    devices: int
    size: int | None
    """Number of devices per engine."""
    overrides: list[FlagGroup]
    prefill: int = 0
    """Number of devices of engines that only prefill. If it is above 0, the other engines only decode."""


def expand(groups: list[FlagGroup], spell: Spell) -> tuple[list[FlagGroup], list[str]]:
    """Returns `groups` with the flags from the file instead of the flag that names the file, and a note. Raises
    ValueError for settings that a run cannot have."""
    present = [group for group in groups if group.name in FLAGS]
    if not present:
        return groups, []
    file = present[-1]
    if len(file.values) != 1 or len({group.name for group in present}) > 1:
        got = " ".join(group.values[0] for group in present if group.values)
        raise FlagError(file.typed, "name one YAML file", got or "none", "give one path")
    path = file.values[0]
    own = {group.name: group.values for group in groups}
    models = _models(file.typed, Path(path))
    policy = _policy(path, models, own)
    total = [str(sum(model.devices for model in models))]
    # In slime, --rollout-num-gpus counts the devices of all models.
    if len(models) > 1 and own.get("rollout_num_gpus") == total:
        del own["rollout_num_gpus"]
    made = [group for group in _policys_flags(policy) if own.get(group.name) != group.values]
    for group in made:
        if group.name in _SIZES and group.name in own:
            raise FlagError(
                group.typed,
                f"equal the entries of {path}",
                f"{' '.join(own[group.name])} and {group.values[0]}",
                "change one of them",
            )
    made += [_frozen(path, model, spell) for model in models if model is not policy]
    became = " ".join(token for group in made for token in group.tokens) or "nothing more"
    replaced = {*FLAGS, *({group.name for group in made} & {"rollout_num_gpus"})}
    return [*(group for group in groups if group.name not in replaced), *made], [
        f"{file.typed} {path} becomes {became}"
    ]


def _policy(path: str, models: list[_Model], own: dict[str, list[str]]) -> _Model:
    """Returns the model that gets the trainer's weights. Its entry has update_weights: true, or leaves update_weights
    out and is the only entry, has no model_path, or has the path of --hf-checkpoint."""
    mine = own.get("hf_checkpoint", [])
    policys = [
        model
        for model in models
        if model.updated or (model.updated is None and (len(models) == 1 or model.path in (None, *mine)))
    ]
    if len(policys) != 1:
        names = ", ".join(model.name for model in policys)
        raise ValueError(
            f"{path} must have one model with update_weights: true, which gets the trainer's weights, got "
            f"{len(policys)}{f' ({names})' if names else ''}; set it for the policy, and to false for the others"
        )
    if (policy := policys[0]).path not in (None, *mine):
        raise FlagError(
            f"model_path of {policy.name} in {path}",
            "be that of --hf-checkpoint",
            policy.path,
            "leave it out",
        )
    return policy


def _policys_flags(policy: _Model) -> list[FlagGroup]:
    flags = [yaml_group("policy_name", policy.name), yaml_group("rollout_num_gpus", policy.devices)]
    flags += [] if policy.size is None else [yaml_group("rollout_num_gpus_per_engine", policy.size)]
    if policy.prefill:
        flags += [yaml_group("prefill_num_servers", policy.prefill // (policy.size or 1))]
    return flags + policy.overrides


def _frozen(path: str, model: _Model, spell: Spell) -> FlagGroup:
    """Returns the --frozen-model flag of a model."""
    if model.prefill:
        raise ValueError(
            f"the groups of {model.name} in {path} must be regular, got prefill and decode; only the policy's may be "
            "split"
        )
    args = []
    for group in spell(model.overrides):
        name = group.name.removeprefix("vllm_").removeprefix("sglang_").replace("_", "-")
        if not group.name.startswith(("vllm_", "sglang_")) or len(group.values) > 1:
            raise ValueError(
                f"overrides of {model.name} in {path} must be flags of its engines with one value, got "
                f"{' '.join(group.tokens)}; remove it"
            )
        args.append("=".join([name, *group.values]))
    if model.path is None:
        raise ValueError(
            f"model_path of {model.name} in {path} must be given, got none; its weights come from there"
        )
    entry = {
        "name": model.name,
        "model_path": model.path,
        "num_gpus": model.devices,
        "num_gpus_per_engine": model.size or 1,
        "args": args,
        "file": path,
    }
    return FlagGroup(spelled("frozen_model"), "frozen_model", [json.dumps(entry)])


def _models(flag: str, path: Path) -> list[_Model]:
    """Reads the file and returns its models. Raises ValueError for a file in another format."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FlagError(flag, "name a file", f"{path} ({error.strerror})", "check the path") from error
    except YAML_ERRORS as error:
        raise ValueError(f"{path} must be valid YAML, got: {error}") from error
    keys = [key for key in KEYS if isinstance(content, dict) and list(content) == [key]]
    models = content[keys[0]] if keys else None
    if not models or not isinstance(models, list) or not all(isinstance(model, dict) for model in models):
        raise ValueError(
            f"{path} must have a list of models under {' or '.join(KEYS)}, got {str(content)[:80]}; see "
            "docs/served-models.md"
        )
    found = [_model(path, keys[0], model) for model in models]
    if len(names := {model.name for model in found}) < len(found):
        raise ValueError(
            f"{path} must have one model of each name, got {len(found)} models with the names "
            f"{', '.join(sorted(names))}; rename one"
        )
    return found


def _model(path: Path, key: str, model: dict[str, Any]) -> _Model:
    """Returns the model of one entry. Raises ValueError for an invalid entry."""
    _known(model, _MODEL, f"a model of {path}")
    name = str(model.get("name", "default"))
    entries = model.get("server_groups") or model.get("engine_groups") or []
    if not entries:
        raise ValueError(
            f"server_groups of {name} in {path} must have a group, got none; give worker_type and num_gpus"
        )
    for entry in entries:
        _known(entry, _GROUP, f"a group of {name} in {path}")
        if (kind := entry.get("worker_type")) not in _WORKERS:
            raise ValueError(
                f"worker_type of {name} in {path} must be one of {', '.join(_WORKERS)}, got {kind} "
                f"({_TYPES.get(str(kind), 'unknown')}); keep the groups without it"
            )
    if (kinds := {entry["worker_type"] for entry in entries}) not in ({"regular"}, {"prefill", "decode"}):
        raise ValueError(
            f"the groups of {name} in {path} must be regular, or prefill and decode, got {', '.join(sorted(kinds))}; "
            "each answer needs both"
        )
    sizes = [entry.get("num_gpus_per_engine") or model.get("num_gpus_per_engine") for entry in entries]
    for what, number in [
        *(("num_gpus", entry.get("num_gpus")) for entry in entries),
        *(("num_gpus_per_engine", size) for size in sizes if size is not None),
    ]:
        if not isinstance(number, int) or number < 1:
            raise ValueError(
                f"{what} of {name} in {path} must be an integer above 0, got {number}; correct it"
            )
    overrides = [dict(entry.get("overrides") or {}) for entry in entries]
    if len(set(sizes)) > 1 or any(one != overrides[0] for one in overrides):
        raise ValueError(
            f"the groups of {name} in {path} must have the same num_gpus_per_engine and overrides, got {len(entries)} "
            "different ones; one update of the weights is cut for engines of one size, and the router sends every "
            "engine as many requests: all engines of a model are equal: keep one group"
        )
    inside = overrides[0].pop("model_path", None)
    return _Model(
        name,
        model.get("model_path") or inside,
        model.get("update_weights"),
        sum(entry["num_gpus"] for entry in entries),
        sizes[0],
        [group for name, value in overrides[0].items() for group in _override(key, name, value)],
        prefill=sum(entry["num_gpus"] for entry in entries if entry["worker_type"] == "prefill"),
    )


def _override(key: str, name: str, value: object) -> list[FlagGroup]:
    """Returns the engine's flag for an override. A false value has no flag in SGLang, whose switches are off by
    default. In vLLM, a false value becomes the flag that turns the switch off."""
    name = name.replace("-", "_")
    if value is None or (value is False and key == "sglang"):
        return []
    return [yaml_group(f"{key}_no_{name}", True) if value is False else yaml_group(f"{key}_{name}", value)]


def _known(entry: object, names: set[str], what: str) -> None:
    unknown = sorted(set(entry) - names) if isinstance(entry, dict) else [str(entry)]
    if unknown:
        raise ValueError(
            f"{what} must have no other entries than {sorted(names)}, got {', '.join(unknown)}; remove them"
        )
