"""Parses argv into a Config. Every flag has one owner; for a flag without owner, the run ends with an error that names
the nearest flag.

Owners, in order: the sections of slime.config; the rollout backend's own flags; `unsupported`; the prefix owners of the
backend; Megatron (MODEL_ARGS, historical names, core fields). Positional arguments and unknown flags are errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from slime.checkpoints.hub import local_checkpoint
from slime.config.config_file import CONFIG, FlagGroup, split_argv, with_config_files, yaml_group
from slime.config.core_table import core_flags
from slime.config.custom_config import custom_entries, settings_note
from slime.config.fields import Values, spelled
from slime.config.megatron_flags import HISTORICAL, MANAGED, MODEL_ARGS
from slime.config.near_names import nearest
from slime.config.peer_names import PeerSetting, check_peers, peer_settings
from slime.config.problems import Problems
from slime.config.schema import Config
from slime.config.sections.engine import DEFAULT_BACKEND
from slime.config.unsupported import NO_EFFECT, UNSUPPORTED, check_unsupported
from slime.records.errors import FlagError, UnknownFlag
from slime.roles.served import by_name, listed, named_teachers
from slime.rules.backend import BackendFlags, NoBackend
from slime.rules.flags import own_flags
from slime.rules.megatron import without_engine_layers
from slime.rules.resolve import resolve
from slime.rules.validate import Rule, checkpoint_notes, validate

NO_BACKENDS: Mapping[str, BackendFlags] = MappingProxyType({})
DECIDING = frozenset({"loss_type", "advantage_estimator", "opd_type", "rollout_backend", "device", "gpu"})
"""Flags that decide which other flags a run needs."""
Translator = Callable[[list[FlagGroup]], tuple[list[FlagGroup], list[str]]]
"""Rewrites other engines' flags into flags that have an owner. Returns the groups and notes for the user."""


@dataclass
class _UserValues:
    """The values that the user gave, during parsing."""

    values: Values = field(default_factory=dict)
    overrides: Values = field(default_factory=dict)
    model_args: Values = field(default_factory=dict)
    backend: Values = field(default_factory=dict)
    foreign: dict[str, list[FlagGroup]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)
    """Flags whose values are problems."""


def parse_args(
    argv: Sequence[str],
    backends: Mapping[str, BackendFlags] = NO_BACKENDS,
    translate: Translator | None = None,
    rules: Sequence[Rule] = (),
    *,
    download: bool = False,
) -> Config:
    """Returns the resolved and validated configuration of a command line.

    --rollout-backend selects one of `backends`, which gets its flags and adds its rules. `translate` adds flags from
    other sources. The command line overrides the files of --config, and the YAML file of --custom-config-path overrides
    every flag. `rules` are checked last. A model of the Hugging Face hub becomes its local directory, and `download`
    fetches it first. Raises one ValueError with every problem and the flags as typed.
    """
    problems = Problems()
    user_values, backend = _collect(argv, backends, translate, problems)
    if user_values.wrong & DECIDING:  # otherwise the rules would report the needs of another choice
        problems.report()
    config = problems.check(resolve, user_values.values, user_values.notes)
    if config is not None:
        local = problems.check(_local_models, config, download)
        config = without_engine_layers(local or config)
        validate(config, problems, backend.rules, rules)
    problems.report()
    assert isinstance(config, Config), "without a problem there is a configuration"
    return replace(config.require_filled(), notes=(*config.notes, *checkpoint_notes(config)))


def _local_models(config: Config, download: bool) -> Config:
    names = {
        "hf_checkpoint": config.rollout.hf_checkpoint,
        "ref_load": config.checkpoint.ref_load,
        "opd_teacher_load": config.distillation.opd_teacher_load,
    }
    local: dict[str, str | list[str] | list[Values]] = {
        field: local_checkpoint(name, spelled(field), download=download)
        for field, name in names.items()
        if name is not None
    }
    if (models := config.distillation.opd_teacher_model) is not None:
        frozen = named_teachers(config)
        local["opd_teacher_model"] = [
            f"{source}={frozen.get(source) or local_checkpoint(name, '--opd-teacher-model', download=download)}"
            for source, name in by_name("opd_teacher_model", models).items()
        ]
    local["frozen_model"] = [
        entry
        | {
            "model_path": local_checkpoint(
                model.checkpoint, model.spelling.of("--hf-checkpoint"), download=download
            )
        }
        for entry, model in zip(config.engine.frozen_model, listed(config), strict=True)
    ]
    return config.with_values(**local)


def check_flags(
    argv: Sequence[str],
    backends: Mapping[str, BackendFlags] = NO_BACKENDS,
    translate: Translator | None = None,
) -> None:
    """Checks each flag's name, type and choices. Raises one ValueError with every problem."""
    problems = Problems()
    _collect(argv, backends, translate, problems)
    problems.report()


def _collect(
    argv: Sequence[str],
    backends: Mapping[str, BackendFlags],
    translate: Translator | None,
    problems: Problems,
) -> tuple[_UserValues, BackendFlags]:
    """Returns every flag's value, parsed by its owner, and the backend. Adds the problems to `problems`."""
    user_values = _UserValues()
    typed = split_argv(argv)
    user_values.notes += _repeated(typed)
    groups = problems.check(with_config_files, typed)
    if groups is None:
        groups = [group for group in typed if group.name != CONFIG]
    custom = problems.check(custom_entries, groups) or {}
    named = [yaml_group(key, value) for key, value in custom.items() if key == "rollout_backend"]
    backend = _picked([*groups, *named], backends, user_values, problems)
    split = problems.check(_flags_and_settings, custom, backend)
    if split is not None:
        groups += split[0]
        user_values.values["hook_settings"] = split[1]
        if split[1]:
            user_values.notes.append(settings_note(split[1], sorted(_fixed(backend))))
    groups = _translated(groups, backend, user_values, problems)
    if translate is not None and (translated := problems.check(translate, groups)) is not None:
        groups, notes = translated
        user_values.notes += notes
    peers: list[PeerSetting] = []
    for group in groups:
        found = problems.check(_assign, group, user_values, backend, origin=group.origin)
        if found is None:
            user_values.wrong.add(group.name)
        peers += found or []
    problems.check(check_peers, peers)
    filled: Values = {}
    for owner in backend.owners:
        if owner.prefix in user_values.foreign:
            filled.update(problems.check(owner.parse, user_values.foreign[owner.prefix]) or {})
    user_values.values.update(backend.fields(user_values.backend, filled))
    user_values.values.update(overrides=user_values.overrides, model_args=user_values.model_args)
    problems.next_stage()
    return user_values, backend


def _repeated(typed: list[FlagGroup]) -> list[str]:
    """Returns a note for each flag that the command line gives again with other values. The last use counts."""
    seen: dict[str, FlagGroup] = {}
    notes = []
    for group in typed:
        before = seen.get(group.positive)
        collects = group.name == CONFIG or (group.name in own_flags() and own_flags()[group.name].append)
        if before is not None and not collects and (before.name, before.values) != (group.name, group.values):
            notes.append(f"{' '.join(group.tokens)} replaces the earlier {' '.join(before.tokens)}")
        seen[group.positive] = group
    return notes


def _picked(
    groups: list[FlagGroup],
    backends: Mapping[str, BackendFlags],
    user_values: _UserValues,
    problems: Problems,
) -> BackendFlags:
    """Returns the backend that the last --rollout-backend names, or the default one."""
    if not backends:
        return NoBackend()
    typed = [group.values[0] for group in groups if group.name == "rollout_backend" and group.values]
    name = typed[-1] if typed else DEFAULT_BACKEND
    if name not in backends:
        user_values.wrong.add("rollout_backend")
        problems.add(FlagError("--rollout-backend", f"be one of {', '.join(backends)}", name))
        name = DEFAULT_BACKEND
    return backends[name]


def _translated(
    groups: list[FlagGroup], backend: BackendFlags, user_values: _UserValues, problems: Problems
) -> list[FlagGroup]:
    """Returns all groups in the backend's spelling. Each group that cannot be translated is a separate problem."""
    whole = problems.check(backend.translate, groups)
    if whole is not None:
        groups, notes = whole
        user_values.notes += notes
        return groups
    return [group for group in groups if not group.name.startswith(backend.foreign)]


def _flags_and_settings(entries: Values, backend: BackendFlags) -> tuple[list[FlagGroup], Values]:
    """Returns the entries of --custom-config-path that are flags, as groups, and the other entries, which hooks find in
    `args`."""
    prefixes = (*(owner.prefix for owner in backend.owners), backend.foreign)
    flags, settings = list[FlagGroup](), Values()
    for key, value in entries.items():
        fixed = _fixed(backend)
        known = key in fixed or key.removeprefix("no_") in fixed or key.startswith(prefixes)
        if not known and key not in (core := core_flags()) and key.removeprefix("no_") not in core:
            settings[key] = value
        elif value is not None:
            flags.append(yaml_group(key, value))
    return flags, settings


def _fixed(backend: BackendFlags) -> set[str]:
    """Returns every flag's name, except flags of prefix owners and Megatron's core fields."""
    of_backend = {*backend.specs, *backend.unsupported, *backend.no_effect}
    return {*own_flags(), *UNSUPPORTED, *NO_EFFECT, *MODEL_ARGS, *HISTORICAL, *MANAGED, *of_backend}


def _known(backend: BackendFlags) -> list[str]:
    """Returns the names that an unknown name may have been meant for."""
    return [*(_fixed(backend) - set(MANAGED)), *core_flags(), *(o.prefix + "..." for o in backend.owners)]


def _assign(group: FlagGroup, user_values: _UserValues, backend: BackendFlags) -> list[PeerSetting]:
    """Gives one group to its owner. Returns other trainers' settings in the group, which have no owner."""
    name, own = group.name, own_flags()
    positive = name.removeprefix("no_")
    if name in own:
        spec = own[name]
        value = spec.parse(group.values, group.typed)
        user_values.values[name] = user_values.values.get(name, []) + value if spec.append else value
    elif name != positive and positive in own and own[positive].kind is bool:
        user_values.values[positive] = not own[positive].parse(group.values, group.typed)
    elif name in backend.specs:
        user_values.backend[name] = backend.specs[name].parse(group.values, group.typed)
    elif (unsupported := UNSUPPORTED.get(name) or backend.unsupported.get(name)) is not None:
        note = check_unsupported(name, unsupported, group.values, group.typed)
        user_values.notes += [note] if note else []
    elif (without := NO_EFFECT.get(name) or backend.no_effect.get(name)) is not None:
        without.parse(group.values, group.typed)
        user_values.notes.append(f"{group.typed} has no effect: {without.help}")
    elif peers := peer_settings(group.typed, name, group.values, backend.peer_names, group.origin):
        return peers
    elif owner := next((o for o in backend.owners if name.startswith(o.prefix)), None):
        user_values.foreign.setdefault(owner.prefix, []).append(group)
    else:
        _assign_megatron(group, user_values, backend)
    return []


def _assign_megatron(group: FlagGroup, user_values: _UserValues, backend: BackendFlags) -> None:
    """Assigns a group to Megatron. Megatron is the last owner, because its generated flags need a slow import."""
    name = group.name
    if name in MODEL_ARGS:
        user_values.model_args[name] = MODEL_ARGS[name].parse(group.values, group.typed)
        return
    if name in HISTORICAL:
        entry = HISTORICAL[name]
        user_values.overrides[entry.field] = entry.parse(group.values, group.typed)
        return
    positive = name.removeprefix("no_")
    core = core_flags()
    if name in core:
        user_values.overrides[core[name].field] = core[name].parse(group.values, group.typed)
    elif name != positive and positive in core and core[positive].spec.kind is bool:
        user_values.overrides[core[positive].field] = not core[positive].parse(group.values, group.typed)
    elif name in MANAGED:
        raise FlagError(group.typed, "be left out", " ".join(group.values) or name, f"it is {MANAGED[name]}")
    else:
        raise UnknownFlag(group.typed, "a known flag", advice=nearest(name, _known(backend)))
