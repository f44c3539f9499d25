"""Reads settings of verl: a YAML file, a launch script of the shell, and overrides of Hydra. Owns verl's rules."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from slime.config.config_file import YAML_ERRORS, YamlLoader
from slime.config.peer_names import parse_override
from slime.config.peer_rows import VERL
from slime.records.errors import FlagError
from vime.importing.settings import Entry, Imported, Setting, converted

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
DEFAULTS: Mapping[str, object] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.shuffle": True,
    f"{_ACTOR}.optim.lr": 1e-6,
    f"{_ACTOR}.optim.weight_decay": 0.01,
    f"{_ACTOR}.optim.lr_scheduler_type": "constant",
    f"{_ACTOR}.grad_clip": 1.0,
    f"{_ACTOR}.clip_ratio": 0.2,
    f"{_ACTOR}.clip_ratio_c": 3.0,
    f"{_ACTOR}.loss_agg_mode": "token-mean",
    f"{_ROLLOUT}.temperature": 1.0,
    f"{_ROLLOUT}.tensor_model_parallel_size": 2,
    "algorithm.adv_estimator": "gae",
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
}
"""Defaults of verl 0.9 that change the training."""
_NEWER = {
    "reward.custom_reward_function.": "custom_reward_function.",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward.reward_model.model_path": "reward_model.model.path",
    "reward.reward_model.": "reward_model.",
    "reward_model.reward_kwargs.overlong_buffer_cfg.": "reward_model.overlong_buffer.",
}
"""Newer names of verl -> the names of the tables."""
_SOURCES = {
    "openai/gsm8k": "gsm8k",
    **dict.fromkeys(
        ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), "math"
    ),
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning"), "dapo"),
}
"""Data sources of verl's own rewards -> the reward of the same task here."""
_OWN = {
    "custom_reward_function.path",
    "custom_reward_function.name",
    f"{_ACTOR}.ppo_mini_batch_size",
    "algorithm.use_kl_in_reward",
    "algorithm.kl_ctrl.kl_coef",
    "data.prompt_key",
    "trainer.total_epochs",
    "trainer.total_training_steps",
}
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")
_ENTRY = "verl.trainer.main_ppo"


def read_settings(path: Path, overrides: Sequence[str]) -> list[Setting]:
    """Returns the settings of a YAML file or of a shell script, and of overrides, of which the last one counts."""
    is_script = path.suffix == ".sh"
    found = list(_overrides(_words_of_script(path), path.name) if is_script else _read_yaml(path))
    found += _overrides(overrides, "command line")
    values = {one.name: one.value for one in found}
    return [Setting(one.name, _resolved(one.value, values), one.origin) for one in found]


def _read_yaml(path: Path) -> Iterator[Setting]:
    try:
        loader = YamlLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
    except YAML_ERRORS as error:
        raise FlagError(str(path), "be valid YAML", error, "correct the file") from error
    if not isinstance(node, yaml.MappingNode):
        raise FlagError(
            str(path), "be a mapping of verl's sections", "another value", "give the trainer's file"
        )
    todo = [("", node)]
    while todo:
        prefix, mapping = todo.pop(0)
        for key_node, value_node in mapping.value:
            name = f"{prefix}{loader.construct_object(key_node, True)}"
            if isinstance(value_node, yaml.MappingNode) and value_node.value:
                todo.append((f"{name}.", value_node))
            elif name not in ("defaults", "hydra") and not name.endswith("._target_"):
                where = f"{path.name}, line {key_node.start_mark.line + 1}"
                yield Setting(_known_name(name), loader.construct_object(value_node, True), where)


def _known_name(name: str) -> str:
    for newer, known in _NEWER.items():
        if name.startswith(newer):
            return known + name[len(newer) :]
    return name


def _words_of_script(path: Path) -> list[str]:
    """Returns the words of the command that starts verl, with the values of the script's variables."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    variables = dict[str, str]()
    for line in text.splitlines():
        if match := re.fullmatch(r"\s*(?:export\s+)?(\w+)=([^\s;]*|'[^']*'|\"[^\"]*\")\s*", line):
            variables[match[1]] = _substituted(match[2].strip("'\""), variables)
        elif _ENTRY in line:
            words = shlex.split(_substituted(line, variables), comments=True)
            return [word for word in words if "=" in word]
    raise FlagError(str(path), f"call {_ENTRY}", "no such call", "give the script that starts the trainer")


def _substituted(text: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return variables.get(name, os.environ.get(name, match[2] or match[0]))

    return _VARIABLE.sub(value, text)


def _overrides(words: Sequence[str], origin: str) -> Iterator[Setting]:
    for word in words:
        name, equals, text = word.lstrip("+~").partition("=")
        if not equals and parse_override(word) is None:
            raise FlagError("an override", "be spelled name=value", repr(word), "spell it as Hydra does")
        try:
            value = yaml.load(text, Loader=YamlLoader)
        except YAML_ERRORS:
            value = text
        yield Setting(_known_name(name), value, origin)


def _resolved(value: object, values: Mapping[str, object]) -> object:
    """Returns a value with the references to other settings replaced."""
    for _ in range(8):
        if not isinstance(value, str) or not (found := _REFERENCE.search(value)) or found[1] not in values:
            break
        other = values[found[1]]
        value = other if found[0] == value else value.replace(found[0], str(other))
    return value


def import_settings(path: Path, found: Sequence[Setting], out: Path) -> Imported:
    """Returns the import of verl's settings. `out` is the YAML file."""
    made = Imported(VERL, path.name)
    settings = {one.name: one for one in found}
    _data(made, settings)
    _rewards(made, settings, out)
    _batches(made, settings)
    _kl(made, settings)
    rest = [*settings.values()]
    rest += [Setting(n, v, "default of verl", True) for n, v in DEFAULTS.items() if n not in settings]
    rest = [one for one in rest if one.name not in _OWN and not one.name.startswith(_KWARGS)]
    made.add("verl's trainer and engines share their GPUs", colocate=True)
    unread = [one for one in rest if isinstance(one.value, str) and "${" in one.value]
    for one in unread:
        reason = "a reference to another file or to the environment; write the flag yourself"
        made.entries.append(Entry(f"{one.shown} ({one.origin}): {reason}", absent=reason, setting=one))
    made.entries += converted(VERL, [one for one in rest if one not in unread])
    return made


_KWARGS = "custom_reward_function.reward_kwargs."


def _value(settings: Mapping[str, Setting], name: str, default: object = None) -> object:
    found = settings[name].value if name in settings else None
    return default if found is None else found


def _data(made: Imported, settings: Mapping[str, Setting]) -> None:
    made.add(
        "verl's parquet: chat messages in `prompt`, and the ground truth in `reward_model`",
        **{
            "input-key": _value(settings, "data.prompt_key", "prompt"),
            "label-key": "reward_model.ground_truth",
            "apply-chat-template": True,
        },
    )


def _rewards(made: Imported, settings: Mapping[str, Setting], out: Path) -> None:
    path = _value(settings, "custom_reward_function.path")
    name = _value(settings, "custom_reward_function.name", "compute_score")
    kwargs = {n[len(_KWARGS) :]: one.value for n, one in settings.items() if n.startswith(_KWARGS)}
    if path is not None and kwargs:
        file = out.with_name(f"{out.stem}_rewards.py")
        made.files[file.name] = _WITH_KWARGS.format(path=path, name=name, kwargs=kwargs)
        made.add(
            f"custom_reward_function: {path}:{name} with reward_kwargs",
            **{"custom-rm-path": f"{file}:{name}"},
        )
    elif path is not None:
        made.add(
            "custom_reward_function: called as verl calls it (docs/from-trl-verl.md)",
            **{"custom-rm-path": f"{path}:{name}"},
        )
    else:
        _own_rewards(made, settings)


_WITH_KWARGS = '''"""The reward of verl with its reward_kwargs. Made by `vime import`."""

import functools

from slime.hooks import load_function

{name} = functools.partial(load_function("{path}:{name}"), **{kwargs!r})
'''


def _own_rewards(made: Imported, settings: Mapping[str, Setting]) -> None:
    """Adds the reward of the first file's data source, because verl's own rewards depend on the data source of each
    row."""
    files = _value(settings, "data.train_files")
    first = files[0] if isinstance(files, list) and files else files
    source = _data_source(Path(str(first)).expanduser()) if first else None
    if source in _SOURCES:
        made.add(
            f"verl's reward of data source {source}: the reward of the same task, which accepts more spellings of an "
            "answer",
            **{"rm-type": _SOURCES[source]},
        )
        return
    reason = "verl chooses the reward by the column data_source; give --rm-type or --custom-rm-path"
    made.entries.append(Entry(f"reward: {reason}", absent=reason))
    made.first.append("give --rm-type or --custom-rm-path: verl chooses the reward by the column data_source")


def _data_source(path: Path) -> str | None:
    """Returns the data source of the first row, or None if the file is not here."""
    if not path.is_file() or path.suffix != ".parquet":
        return None
    import pyarrow.parquet as pq  # only for a file that is here

    table = pq.ParquetFile(path)
    if "data_source" not in table.schema_arrow.names:
        return None
    batch = next(table.iter_batches(1, columns=["data_source"]), None)
    return None if batch is None else str(batch.column(0)[0].as_py())


def _batches(made: Imported, settings: Mapping[str, Setting]) -> None:
    mini, group = _value(settings, f"{_ACTOR}.ppo_mini_batch_size", 256), _value(settings, f"{_ROLLOUT}.n", 1)
    if not isinstance(mini, int) or not isinstance(group, int):
        raise FlagError(
            "ppo_mini_batch_size and rollout.n", "be whole numbers", f"{mini} and {group}", "correct them"
        )
    made.add(
        f"ppo_mini_batch_size={mini} prompts x rollout.n={group}: samples of an optimizer step",
        **{"global-batch-size": mini * group},
    )
    steps, epochs = (
        _value(settings, "trainer.total_training_steps"),
        _value(settings, "trainer.total_epochs", 30),
    )
    if steps is not None:
        made.add(f"trainer.total_training_steps={steps}: verl counts rollouts, too", **{"num-rollout": steps})
    else:
        made.add(f"trainer.total_epochs={epochs}: same meaning", **{"num-epoch": epochs})


def _kl(made: Imported, settings: Mapping[str, Setting]) -> None:
    if _value(settings, "algorithm.use_kl_in_reward", False):
        coefficient = _value(settings, "algorithm.kl_ctrl.kl_coef", 0.001)
        made.add(f"use_kl_in_reward with kl_ctrl.kl_coef={coefficient}", **{"kl-coef": coefficient})
    if _value(settings, f"{_ACTOR}.use_kl_loss", False):
        defaults = {"kl_loss_coef": 0.001, "kl_loss_type": "low_var_kl"}
        for name, default in defaults.items():
            if f"{_ACTOR}.{name}" not in settings:
                made.add(f"{name}={default} (default of verl)", **{name.replace("_", "-"): default})
