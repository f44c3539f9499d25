"""argv -> Config: every token finds its one owner, or the run ends with an error that names the nearest flag.

Owners, in order: the sections of this folder; `unsupported`; prefix owners handed in by the caller
(`--vllm-`, `--router-`); Megatron (MODEL_ARGS, historical names, core fields). Refuses positional
arguments and unknown flags.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from slime.config.fields import nearest, spelled
from slime.config.megatron_flags import HISTORICAL, MANAGED, MODEL_ARGS, core_flags
from slime.config.resolve import resolve
from slime.config.schema import Config, own_flags
from slime.config.unsupported import NO_EFFECT, UNSUPPORTED, check_unsupported
from slime.config.validate import validate


@dataclass(frozen=True)
class FlagGroup:
    """One flag as typed, its name (no dashes in front, underscores inside) and the strings after it."""

    typed: str
    name: str
    values: list[str]


class FlagOwner(Protocol):
    """A parser of another project that owns all flags with a prefix, such as "vllm_"."""

    prefix: str

    def parse(self, groups: list[FlagGroup]) -> dict[str, Any]:
        """Check the flags; return the fields of the configuration they fill. ValueError for a bad one."""
        ...


Translator = Callable[[list[FlagGroup]], tuple[list[FlagGroup], list[str]]]
"""Rewrites foreign spellings into flags that have an owner; returns the groups and remarks for the user."""


def split_argv(argv: Sequence[str]) -> list[FlagGroup]:
    """`--flag value ...` and `--flag=value` as groups; a token before the first flag is an error."""
    groups: list[FlagGroup] = []
    for token in argv:
        if token.startswith("--") and len(token) > 2:
            typed, equals, value = token.partition("=")
            groups.append(FlagGroup(typed, typed[2:].replace("-", "_"), [value] if equals else []))
        elif groups:
            groups[-1].values.append(token)
        else:
            raise ValueError(
                f"arguments must start with a flag, got {token!r}; every option is spelled --name value"
            )
    return groups


@dataclass
class _Given:
    """What the user gave, while it is being collected."""

    values: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    model_args: dict[str, Any] = field(default_factory=dict)
    foreign: dict[str, list[FlagGroup]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def parse_args(
    argv: Sequence[str], owners: Sequence[FlagOwner] = (), translate: Translator | None = None
) -> Config:
    """The resolved and validated configuration of a command line.

    `owners` take the flags with their prefix; `translate` first rewrites spellings of other engines. A YAML
    file named by --custom-config-path overrides any flag. Raises ValueError naming the flag as typed.
    """
    groups = split_argv(argv)
    groups += _custom_config(groups)
    given = _Given()
    if translate is not None:
        groups, given.notes = translate(groups)
    for group in groups:
        _assign(group, given, owners)
    for owner in owners:
        if owner.prefix in given.foreign:
            given.values.update(owner.parse(given.foreign[owner.prefix]))
    given.values.update(overrides=given.overrides, model_args=given.model_args)
    config = resolve(given.values, given.notes)
    validate(config)
    return config


def _custom_config(groups: list[FlagGroup]) -> list[FlagGroup]:
    """The entries of the --custom-config-path file as groups, in its order."""
    paths = [g.values for g in groups if g.name == "custom_config_path"]
    if not paths:
        return []
    import yaml

    path = Path(paths[-1][0]) if paths[-1] else Path()
    if not path.is_file():
        raise ValueError(f"--custom-config-path must name a YAML file, got {path}; check the path")
    try:
        content = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"--custom-config-path must be valid YAML, got {path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"--custom-config-path must hold one mapping of flag: value, got {type(content).__name__}"
        )
    return [yaml_group(str(key), value) for key, value in content.items() if value is not None]


def yaml_group(key: str, value: Any) -> FlagGroup:
    """A YAML entry as the tokens that mean the same; `false` is spelled `--no-...`."""
    name = key.removeprefix("--").replace("-", "_")
    if isinstance(value, bool):
        name = name if value else f"no_{name}"
        return FlagGroup(spelled(name), name, [])
    if isinstance(value, dict):
        return FlagGroup(spelled(name), name, [json.dumps(value)])
    return FlagGroup(
        spelled(name), name, [str(v) for v in value] if isinstance(value, list) else [str(value)]
    )


def _assign(group: FlagGroup, given: _Given, owners: Sequence[FlagOwner]) -> None:
    """Give one group to its owner."""
    name, own = group.name, own_flags()
    positive = name.removeprefix("no_")
    if name in own:
        spec = own[name]
        value = spec.parse(group.values, group.typed)
        given.values[name] = given.values.get(name, []) + value if spec.append else value
    elif name != positive and positive in own and own[positive].kind is bool:
        given.values[positive] = not own[positive].parse(group.values, group.typed)
    elif name in UNSUPPORTED:
        check_unsupported(name, group.values, group.typed)
    elif name in NO_EFFECT:
        NO_EFFECT[name].parse(group.values, group.typed)
        given.notes.append(f"{group.typed} has no effect: {NO_EFFECT[name].help}")
    elif owner := next((o for o in owners if name.startswith(o.prefix)), None):
        given.foreign.setdefault(owner.prefix, []).append(group)
    else:
        _assign_megatron(group, given, owners)


def _assign_megatron(group: FlagGroup, given: _Given, owners: Sequence[FlagOwner]) -> None:
    """Megatron is the last owner, as its generated flags cost an import."""
    name = group.name
    if name in MODEL_ARGS:
        given.model_args[name] = MODEL_ARGS[name].parse(group.values, group.typed)
        return
    if name in HISTORICAL:
        entry = HISTORICAL[name]
        given.overrides[entry.field] = entry.parse(group.values, group.typed)
        return
    positive = name.removeprefix("no_")
    core = core_flags()
    if name in core:
        given.overrides[core[name].field] = core[name].parse(group.values, group.typed)
    elif name != positive and positive in core and core[positive].spec.kind is bool:
        given.overrides[core[positive].field] = not core[positive].parse(group.values, group.typed)
    elif name in MANAGED:
        raise ValueError(
            f"{group.typed} must be left out, got {' '.join(group.values) or name}; it is {MANAGED[name]}"
        )
    else:
        prefixes = [o.prefix + "..." for o in owners]
        known = [*own_flags(), *UNSUPPORTED, *NO_EFFECT, *MODEL_ARGS, *HISTORICAL, *core, *prefixes]
        raise ValueError(f"{group.typed} is not a known flag{nearest(name, known)}")
