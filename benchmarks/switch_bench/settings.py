"""Reads the YAML file of a benchmark: its model, data, flags and switch. This module defines the keys of the file.

    name: tiny-cpu                      file names and titles
    claim: baseline against rl_kernel   the title of the comparison in the report (default: the name)
    model: {arch: qwen3-tiny}           random weights of scripts/make_model.py, with `layers: N` of reduced depth;
                                        or {path: DIR}, a Hugging Face directory
    data: arithmetic                    a prompt file, or the sums that come with a random model
    flags: {colocate: true, lr: 1e-3}   flags of `vime train`, or a list of such flags as a user types them
    switch: {field: rlk_fast, baseline: off, rl_kernel: auto}     the field that differs between the two sides, and
                                        its two values (this is the default)
    steps: 12                           steps per run, with the warm-up
    warm_up: 2                          first steps that the report leaves out (default 1)
    repeats: 3                          runs per side (default 1)
    presets: {smoke: {steps: 3}}        other values, by the name of the preset. A preset replaces single entries of
                                        `flags` and `switch` (but not `field`), and whole values of the other keys

The reader takes only `true` and `false` as booleans. `off` is a string, as on a command line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from slime.config.config_file import YAML_ERRORS, YamlLoader, split_argv, yaml_group
from slime.config.fields import spelled
from slime.config.near_names import nearest
from slime.rules.flags import own_flags
from switch_bench.record import SIDES, Switch
from vime.switch import SAME

ARITHMETIC = "arithmetic"
PRESET_KEYS = ("claim", "model", "data", "flags", "switch", "steps", "warm_up", "repeats")
KEYS = ("name", *PRESET_KEYS, "presets")
NEEDED = ("name", "model", "data", "steps")
MODEL_KEYS = ("arch", "layers", "path")
DEFAULT_SWITCH = Switch("rlk_fast", "off", "auto")

DEBUG = (
    *("debug_rollout_only", "debug_train_only", "save_debug_rollout_data", "load_debug_rollout_data"),
    *("load_debug_rollout_data_subsample", "save_debug_train_data", "dump_details", "start_rollout_id"),
)
TAKEN = {
    "hf_checkpoint": "`model` of the file or --model says it",
    "prompt_data": "`data` of the file or --data says it",
    "num_rollout": "`steps` of the file or --steps says it",
    "num_epoch": "`steps` of the file or --steps says it",
    "train_iters": "`steps` of the file or --steps says it",
    "train_samples": "`steps` of the file or --steps says it",
    "run_dir": "every run has a directory of its own below --out",
    "custom_config_path": "what stands there would win over the switch; give its entries as flags",
    "load": "every run starts from the model, and the next one would start from this one",
    "save": "every run starts from the model, and the next one would start from this one",
    "save_hf": "all runs would write to one directory",
    **dict.fromkeys(DEBUG, "`vime bench module` says what is saved and loaded"),
}
"""Flags that a benchmark gives itself, and why nobody else may."""


@dataclass(frozen=True)
class Model:
    """A Hugging Face directory (`path`), or an architecture of scripts/make_model.py with all layers or `layers`."""

    path: str | None = None
    arch: str | None = None
    layers: int | None = None


@dataclass(frozen=True)
class Benchmark:
    """A benchmark's file with its preset and the command line. `flags` are tokens of `vime train`; later tokens win."""

    file: Path
    name: str
    claim: str
    model: Model
    data: str
    steps: int
    flags: tuple[str, ...] = ()
    switch: Switch = DEFAULT_SWITCH
    warm_up: int = 1
    repeats: int = 1
    preset: str | None = None
    notes: tuple[str, ...] = ()

    def with_line(self, *, flags: Sequence[str] = (), notes: Sequence[str] = (), **given: Any) -> Benchmark:
        """Returns the benchmark with the command line's flags, notes, `steps`, `repeats`, `model` and `data`, if they
        are not None. ValueError for values that the command line must not set."""
        said = {name: value for name, value in given.items() if value is not None}
        here = [f"{name} {Path(said[name]).absolute().name}" for name in ("model", "data") if name in said]
        if here:  # A title about layers or random weights does not fit another model.
            of_file = "model" not in said or self.model.path is not None
            title = self.claim if of_file else f"{self.name} {self.preset}"
            said["claim"] = f"{title}; here with {' and '.join(here)}"
        if "model" in said:
            said["model"] = Model(path=said["model"])
        merged = replace(self, flags=(*self.flags, *flags), notes=tuple(notes), **said)
        _check(merged, "the command line")
        return merged


def read_settings(path: Path, preset: str | None = None) -> Benchmark:
    """Reads the benchmark that a file describes. A ValueError names file and key."""
    content = _mapping(_load(path), str(path), KEYS)
    for key in NEEDED:
        if key not in content:
            raise ValueError(f"{path} must say `{key}`, got {', '.join(content) or 'nothing'}")
    presets = _mapping(content.pop("presets", {}), f"{path}: presets")
    presets = {name: _mapping(of, f"{path}: preset {name}", PRESET_KEYS) for name, of in presets.items()}
    chosen = {} if preset is None else _chosen(presets, preset, path)
    values = {**content, **chosen}
    values["flags"] = tuple(_flags(content.get("flags", {}), chosen.get("flags", {}), path))
    values["model"] = _model(values["model"], path)
    values["switch"] = _switch(content.get("switch", {}), chosen.get("switch", {}), path)
    values.setdefault("claim", values["name"])
    found = Benchmark(file=path, preset=preset, **values)
    _check(found, str(path))
    return found


def _chosen(presets: Mapping[str, dict[str, object]], preset: str, path: Path) -> dict[str, object]:
    if preset not in presets:
        near = nearest(preset, presets, prefix="")
        raise ValueError(
            f"--preset must be one of {', '.join(presets) or 'none'} for {path}, got {preset}{near}"
        )
    if presets[preset].keys() & {"model", "data", "switch"} and "claim" not in presets[preset]:
        raise ValueError(
            f"{path}: preset {preset} must say `claim`, got none; with a model, data or switch of its own it shows "
            "something else than the file"
        )
    return presets[preset]


def tokens(name: str, value: object) -> list[str]:
    """Returns a flag of `vime train` and its value as typed: ("colocate", True) -> ["--colocate"]."""
    group = yaml_group(name, value)
    return [group.typed, *group.values]


def _load(path: Path) -> object:
    if not path.is_file():
        raise ValueError(
            f"BENCHMARK must be a YAML file, got {path}; docs/benchmarks.md names those that come with it"
        )
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=YamlLoader)
    except YAML_ERRORS as error:
        raise ValueError(f"{path} must be valid YAML, got: {error}") from error


def _mapping(value: object, what: str, keys: Sequence[str] | None = None) -> dict[str, Any]:
    """Returns `value` as a mapping whose keys are in `keys` (None allows any key)."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} must be a mapping, got {value!r}")
    if keys is not None:
        for key in value:
            if key not in keys:
                near = nearest(str(key), keys, prefix="")
                raise ValueError(f"{what} must have keys of {', '.join(keys)}, got {key}{near}")
    return dict(value)


def _flags(of_file: object, of_preset: object, path: Path) -> list[str]:
    """Returns the tokens of the file's and the preset's flags. Each is a mapping or a list of typed flags. If both are
    mappings, the preset's entries replace the file's. Otherwise the preset's tokens follow, and the later flag wins."""
    if isinstance(of_file, Mapping) and isinstance(of_preset, Mapping):
        both = (*of_file.items(), *of_preset.items())
        of_file, of_preset = {str(name).replace("_", "-"): value for name, value in both}, []
    found: list[str] = []
    for value in (of_file, of_preset):
        if isinstance(value, list):
            found += (token for item in value for token in shlex.split(str(item)))
        else:
            entries = _mapping(value, f"{path}: flags")
            found += (token for name, given in entries.items() for token in tokens(str(name), given))
    return found


def _model(value: object, path: Path) -> Model:
    model = Model(**_mapping(value, f"{path}: model", MODEL_KEYS))
    if (model.path is None) == (model.arch is None):
        raise ValueError(f"{path}: model must say `arch` or `path`, one of them, got {value}")
    if model.layers is not None:
        if model.arch is None:
            raise ValueError(
                f"{path}: model.layers must go with `arch`, got `path`; weights that exist have their depth"
            )
        _count(model.layers, "model.layers", str(path), least=1)
    return model


def _switch(of_file: object, of_preset: object, path: Path) -> Switch:
    given = _mapping(of_file, f"{path}: switch", ("field", *SIDES))
    if given and set(given) != {"field", *SIDES}:
        raise ValueError(f"{path}: switch must say field, {' and '.join(SIDES)}, got {', '.join(given)}")
    changed = {**given, **_mapping(of_preset, f"{path}: a preset's switch", SIDES)}
    switch = replace(DEFAULT_SWITCH, **changed)
    if switch.field not in own_flags():
        near = nearest(str(switch.field), own_flags(), prefix="")
        raise ValueError(
            f"{path}: switch.field must be a field of the configuration, got {switch.field}{near}"
        )
    if switch.baseline == switch.rl_kernel:
        raise ValueError(f"{path}: switch must differ between the sides, got {switch.baseline} for both")
    return switch


def _check(benchmark: Benchmark, where: str) -> None:
    """Checks rules that hold for the file and the command line."""
    if not re.fullmatch(r"[\w.-]+", str(benchmark.name)):
        raise ValueError(
            f"{where}: name must be of letters, digits, '.', '-' and '_', got {benchmark.name!r}"
        )
    _count(benchmark.steps, "steps", where, least=1)
    _count(benchmark.repeats, "repeats", where, least=1)
    _count(benchmark.warm_up, "warm_up", where, least=0)
    if benchmark.warm_up >= benchmark.steps:
        raise ValueError(
            f"{where}: steps must be more than the warm-up, got {benchmark.steps} and warm_up {benchmark.warm_up}; "
            "the warm-up counts among them"
        )
    field = benchmark.switch.field
    of_switch = (field, *(name for name, field_name in SAME.items() if field_name == field))
    taken = {**TAKEN, **dict.fromkeys(of_switch, "it is what the sides differ in")}
    for name in (group.positive for group in split_argv(benchmark.flags)):
        if name in taken:
            raise ValueError(f"{where}: {spelled(name)} must be left out of the flags, got it; {taken[name]}")


def _count(value: object, what: str, where: str, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{where}: {what} must be a whole number, {least} or more, got {value!r}")
