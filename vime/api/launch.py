"""Starts a run from Python, with the flags of `vime train` as a file, a dict or a configuration."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from slime.config.config_file import CONFIG, split_argv, with_config_files, yaml_group
from slime.config.schema import Config
from slime.config.sections.logging import new_run_dir
from slime.records.errors import FlagError
from vime.api import functions
from vime.api.live import LiveRun

if TYPE_CHECKING:
    from vime.types import AnyReward, Callback, Filter, Generate

PathLike: TypeAlias = str | os.PathLike[str]
ConfigLike: TypeAlias = PathLike | Sequence[PathLike] | Mapping[str, object] | Config
_KEYWORDS = {
    "reward": "custom_rm_path",
    "generate": "custom_generate_function_path",
    "filter": "dynamic_sampling_filter_path",
}
"""Maps a keyword of `train` to its flag."""


def train(
    config: ConfigLike = (),
    *,
    reward: AnyReward | str | Sequence[AnyReward | str] | None = None,
    generate: Generate | str | None = None,
    filter: Filter | str | None = None,
    callbacks: Sequence[Callback] = (),
    wait: bool = True,
    **flags: object,
) -> LiveRun:
    """Trains with the flags of `config`, and returns the run.

    Args:
        config: flags of `vime train`: a YAML file, several files of which a later one has priority, a dict, or a
            configuration. In a dict, a flag of a function may have the function itself.
        reward: the reward as a function or as `FILE.py:FUNCTION`. Several rewards are added, with the weights
            `rm_weights`. A function may have the form of TRL or verl.
        generate: the function that makes a sample's response (--custom-generate-function-path).
        filter: the function that selects groups (--dynamic-sampling-filter-path).
        callbacks: functions that are called as f(run, metrics) in this process after each rollout.
        wait: True prints the progress and returns after the end of the run. An interrupt stops the run. False returns
            when the run has passed its checks; `run.wait()` waits for its end, and `run.stop()` ends it. The run ends
            with this process in both cases.
        flags: more flags, which have priority over `config`.

    Raises ValueError for a flag, a file or a function that the caller must correct, with the text of the command line,
    and RuntimeError for a run that failed.

    Example::

        run = vime.train("examples/tiny.yaml", reward=my_function, num_rollout=4, hf_checkpoint="runs/tiny/data/base")
        print(run.metrics[-1]["rollout/raw_reward"])
    """
    values = dict(flags) | _keywords(reward=reward, generate=generate, filter=filter)
    words, own = _parts(config)
    values = {name: value for name, value in {**own, **_named(values)}.items() if value is not None}
    in_files = {group.name: group.values for group in with_config_files(split_argv(words))}
    if isinstance(reward, list | tuple) and "custom_rm_path" in (in_files | values):
        raise FlagError(
            "reward",
            "be one function with --custom-rm-path",
            f"{len(reward)} rewards",
            "leave that flag out of the configuration",
        )
    run_dir = _run_dir(in_files, values)
    folder = run_dir / functions.FOLDER
    values.pop("run_dir", None)
    groups = [yaml_group(name, _plain(value)) for name, value in _copied(folder, values).items()]
    words += [token for group in groups for token in group.tokens]
    run = LiveRun([*words, "--run-dir", str(run_dir)], run_dir, callbacks)
    try:
        return run.follow() if wait else run.begin()
    except ValueError:
        functions.remove(folder)
        with contextlib.suppress(OSError):  # a folder with other files stays
            run_dir.rmdir()
        raise


def _keywords(**keywords: object) -> dict[str, object]:
    """Returns the flags of the keywords. Several rewards are names of --rm-type."""
    flags = {_KEYWORDS[name]: value for name, value in keywords.items() if value is not None}
    if isinstance(flags.get("custom_rm_path"), list | tuple):
        flags["rm_type"] = flags.pop("custom_rm_path")
    return flags


def _parts(config: ConfigLike) -> tuple[list[str], dict[str, object]]:
    """Returns the words for a configuration of files or sections, and the flags of a dict by name."""
    if isinstance(config, Config):
        from vime.commands.config import all_flags  # imports the engines' parsers

        return [token for group in all_flags(config) for token in group.tokens], {}
    if isinstance(config, Mapping):
        return [], _named(config)
    if isinstance(config, str | os.PathLike):
        config = [config]
    if not isinstance(config, list | tuple) or not all(isinstance(one, str | os.PathLike) for one in config):
        raise FlagError(
            "config",
            "be a YAML file, a list of files, a dict or a Config",
            f"a {type(config).__name__}",
            "write the flags of vime train as one of these",
        )
    return [f"--{CONFIG}", *map(os.fspath, config)] if config else [], {}


def _named(flags: Mapping[str, object]) -> dict[str, object]:
    """Returns the flags with the names of fields: no leading dashes, and underscores inside."""
    return {str(name).removeprefix("--").replace("-", "_"): value for name, value in flags.items()}


def _plain(value: object) -> object:
    """Returns a value of a flag as YAML has it: paths as texts, and sequences as lists."""
    if isinstance(value, list | tuple):
        return [os.fspath(one) if isinstance(one, os.PathLike) else one for one in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _copied(folder: Path, values: Mapping[str, object]) -> dict[str, object]:
    """Writes the functions among the values to the folder. Returns the values with the paths of the functions."""
    found = dict[tuple[str, int | None], functions.Function]()
    for name, value in values.items():
        for place, one in enumerate(value) if isinstance(value, list | tuple) else [(None, value)]:
            if callable(one):
                found[name, place] = one
    if not found:
        return dict(values)
    replaced = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    for (name, place), path in functions.write(folder, found).items():
        before = replaced[name]
        if isinstance(before, list):
            replaced[name] = [path if i == place else one for i, one in enumerate(before)]
        else:
            replaced[name] = path
    return replaced


def _run_dir(in_files: Mapping[str, Sequence[str]], values: Mapping[str, object]) -> Path:
    """Returns the run directory: the one of the flags, else a new one. `in_files` has the flags of the files."""
    texts = {name: words[0] for name, words in in_files.items() if words}
    texts |= {name: str(value) for name, value in values.items() if name in ("run_dir", "hf_checkpoint")}
    return Path(texts.get("run_dir") or new_run_dir(texts.get("hf_checkpoint")))
