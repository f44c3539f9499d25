"""The rules for a script of TRL: its defaults, its batches, its model, its rewards and its data."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime.config.peer_rows import TRL
from slime.records.errors import FlagError
from vime.importing.settings import Entry, Imported, Setting, converted
from vime.importing.slices import join_statements, needed
from vime.importing.trl_script import Script, Unknown, call_name

DEFAULTS: Mapping[str, object] = {
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "max_completion_length": 512,
    "temperature": 1.0,
    "epsilon": 0.2,
    "loss_type": "dapo",
    "shuffle_dataset": True,
    "seed": 42,
}
"""Defaults of TRL 1 that change the training. Batches have their own rule."""
_BATCHES: Mapping[str, int] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_processes": 1,
    "num_generations": 8,
}
_LOSSES: Mapping[str, dict[str, object]] = {
    "grpo": {},
    "dapo": {"calculate-per-token-loss": True},
    "bnpo": {"calculate-per-token-loss": True},
    "dr_grpo": {"use-dr-grpo": True},  # also without the division by the standard deviation
    "cispo": {"advantage-estimator": "cispo"},
    "sapo": {"pg-loss-type": "sapo"},
}
_READ = {"model", "reward_funcs", "args", "train_dataset", "eval_dataset", "peft_config"}
"""Arguments of the trainer that are read."""
_ABSENT = {
    "processing_class": "no flag: the tokenizer is that of --hf-checkpoint",
    "reward_processing_classes": "no flag: a reward model is served, and --rm-type remote_rm sends it the text",
    "callbacks": "no flag: vime.train takes callbacks (docs/python-api.md)",
    "optimizers": "no flag: --optimizer, --lr and --lr-decay-style choose the optimizer",
    "tools": "no flag: an agent calls tools over a session (docs/agents.md), or a --custom-generate-function-path does",
    "rollout_func": "no flag: a --custom-generate-function-path makes the samples (docs/hooks.md)",
    "environment_factory": "no flag: --environment runs environments of hubs (docs/environments.md)",
    "**": "its names are known to a run of the script only; write their flags yourself",
}
"""Arguments of the trainer without a counterpart, and the reason."""
_LORA = {"r": "lora-rank", "lora_alpha": "lora-alpha", "target_modules": "lora-target-modules"}


def import_script(script: Script, overrides: Sequence[Setting], out: Path) -> Imported:
    """Returns the import of a script. `overrides` has the settings of its command line. `out` is the YAML file."""
    made = Imported(TRL, script.path.name)
    settings = {one.name: one for one in (*script.settings, *overrides)}
    if script.unread:
        made.first.append(f"write the value of {', '.join(name for name, _ in script.unread)} into {out}")
    _model(made, script)
    _rewards(made, script, out)
    _data(made, script, settings, out)
    _devices(made, settings)
    _batches(made, settings)
    _losses(made, settings)
    for name, node in script.arguments.items():
        if name not in _READ and not _is_none(node):
            _name_argument(made, name, node)
    for name, expression in script.unread:
        reason = "an expression, whose value only a run of the script has; write the flag yourself"
        made.entries.append(Entry(f"{name}={expression}: {reason}", absent=reason))
    strategy = settings.get("save_strategy")
    never = {"output_dir"} if strategy is not None and strategy.value == "no" else set()
    rest = [one for name, one in settings.items() if name not in _OWN | never]
    rest += [Setting(n, v, "default of TRL", True) for n, v in DEFAULTS.items() if n not in settings]
    made.entries += converted(TRL, [one for one in rest if one.name not in _OWN])
    return made


_OWN = {
    *_BATCHES,
    "generation_batch_size",
    "steps_per_generation",
    "max_steps",
    "num_train_epochs",
    "loss_type",
} | {
    "dataset_name",
    "dataset_config",
    "dataset_train_split",
    "model_name_or_path",
    "config",
    "beta",
    "num_iterations",
}
"""Settings with a rule of this file."""


def _name_argument(made: Imported, name: str, node: ast.expr) -> None:
    """Names an argument of the trainer that has no counterpart."""
    reason = _ABSENT.get(name, "no table of vime has this argument of TRL's trainer")
    made.entries.append(
        Entry(f"{name}={ast.unparse(node)} of the trainer ({made.source}): {reason}", absent=reason)
    )


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _constant(script: Script, node: ast.expr | None) -> object:
    if node is None:
        return None
    try:
        return script.value(node)
    except Unknown:
        return None


def _model(made: Imported, script: Script) -> None:
    node = script.arguments.get("model")
    if isinstance(node, ast.Name):
        node = script.constants.get(node.id, node)
    if (
        call_name(node or ast.Constant(None)) == "from_pretrained"
        and isinstance(node, ast.Call)
        and node.args
    ):
        node = node.args[0]
    model = _constant(script, node)
    if isinstance(model, str):
        made.add(f"model of the trainer ({script.path.name})", **{"hf-checkpoint": model})
    else:
        made.first.append("give --hf-checkpoint: only a run of the script knows its model")
    peft = script.arguments.get("peft_config")
    if isinstance(peft, ast.Name):
        peft = script.constants.get(peft.id, peft)
    lora = isinstance(peft, ast.Call) and call_name(peft) == "LoraConfig"
    for keyword in peft.keywords if isinstance(peft, ast.Call) and lora else []:
        value = _constant(script, keyword.value)
        if keyword.arg in _LORA and value not in (None, "all-linear"):
            made.add(f"{keyword.arg} of LoraConfig: same meaning", **{_LORA[keyword.arg]: value})
        elif keyword.arg not in ("task_type", "target_modules"):
            reason = "no flag: adapters have a rank, an alpha and target modules here"
            made.entries.append(Entry(f"{keyword.arg or '**'} of LoraConfig: {reason}", absent=reason))
    if peft is not None and not lora and not _is_none(peft):
        reason = "an expression, whose value only a run of the script has; write --lora-rank yourself"
        made.entries.append(Entry(f"peft_config={ast.unparse(peft)}: {reason}", absent=reason))


def _rewards(made: Imported, script: Script, out: Path) -> None:
    """Writes the rewards into a file with the statements that they need."""
    node = script.arguments.get("reward_funcs")
    if isinstance(node, ast.Name) and isinstance(script.constants.get(node.id), ast.List):
        node = script.constants[node.id]
    nodes = node.elts if isinstance(node, ast.List | ast.Tuple) else [] if node is None else [node]
    named = [_reward(i, one) for i, one in enumerate(nodes)]
    models = [_constant(script, one) for one in nodes]
    for model in filter(None, models):
        reason = "a reward model: serve it and give --rm-type remote_rm with --rm-url, or --custom-rm-path"
        made.entries.append(Entry(f"reward {model}: {reason}", absent=reason))
    found = [one for one, model in zip(named, models, strict=True) if model is None]
    if not found:
        return
    names = {name for _, extra, reads in found for name in reads}
    chosen, missing = needed(script.statements, names)
    text = join_statements(chosen, names) + "".join(f"\n{extra}\n" for _, extra, _ in found if extra)
    file = out.with_name(f"{out.stem}_rewards.py")
    made.files[file.name] = (
        f'"""The rewards of {script.path.name}, unchanged. Made by `vime import`."""\n\n{text}'
    )
    if missing:
        made.first.append(
            f"{file} reads {', '.join(sorted(missing))}, which the script gets elsewhere: write them"
        )
    paths = [f"{file}:{name}" for name, _, _ in found]
    where = f"reward_funcs of the trainer ({script.path.name})"
    if len(paths) == 1:
        made.add(f"{where}: called as TRL calls it (docs/from-trl-verl.md)", **{"custom-rm-path": paths[0]})
    else:
        made.add(f"{where}: called as TRL calls them, and added", **{"rm-type": paths})


def _reward(number: int, node: ast.expr) -> tuple[str, str, set[str]]:
    """Returns the name of a reward, a statement that makes it if it is no name, and the names that it reads."""
    if isinstance(node, ast.Name):
        return node.id, "", {node.id}
    name = f"reward_{number + 1}"
    reads = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return name, f"{name} = {ast.unparse(node)}", reads


@dataclass(frozen=True)
class _Set:
    """A data set of the trainer: its argument, and the flag and file name here."""

    argument: str
    flag: str
    name: str


_SETS = (_Set("train_dataset", "prompt-data", "train"), _Set("eval_dataset", "eval-prompt-data", "eval"))


def _data(made: Imported, script: Script, settings: Mapping[str, Setting], out: Path) -> None:
    """Turns the data sets into files that a script with the needed statements writes. A plain `load_dataset` becomes
    the name of the data set."""
    writes, names, rewritten = list[str](), set[str](), list[_Set]()
    chat = _has_messages(script)
    for each in _SETS:
        node = script.arguments.get(each.argument)
        if node is None:
            continue
        direct = _loaded(script, node)
        file = direct or str(out.with_name(f"{out.stem}_{each.name}.jsonl"))
        value: object = file if each.name == "train" else [each.name, file]
        made.add(f"{each.argument} of the trainer ({script.path.name})", **{each.flag: value})
        if not direct:
            rewritten.append(each)
            names |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
            writes.append(f"{ast.unparse(node)}.to_json({file!r})")
    made.add(
        "TRL's columns: the prompt is in `prompt`, and rewards get all columns", **{"input-key": "prompt"}
    )
    note = "the script makes chat messages" if chat else "set this to true if the prompts are chat messages"
    made.add(
        f"TRL applies the chat template to prompts that are messages: {note}", **{"apply-chat-template": chat}
    )
    if not rewritten:
        return
    chosen, missing = needed(script.statements, names)
    if missing and "dataset_name" in settings:
        made.entries = [
            one for one in made.entries if not {"prompt-data", "eval-prompt-data"} & one.flags.keys()
        ]
        parts = [str(settings[n].value) for n in ("dataset_name", "dataset_config") if n in settings]
        split = settings.get("dataset_train_split")
        parts += [str(split.value)] if split else []
        made.add("dataset_name of the command line", **{"prompt-data": ":".join(parts)})
        return
    writer = out.with_name(f"{out.stem}_data.py")
    text = join_statements(chosen, names) + "\n" + "\n".join(writes) + "\n"
    made.files[writer.name] = (
        f'"""Writes the data of {script.path.name} for vime. Made by `vime import`."""\n\n{text}'
    )
    made.first.append(f"python {writer}    # writes the data; it needs the packages of your script")
    if missing:
        made.first.append(
            f"{writer} reads {', '.join(sorted(missing))}, which the script gets elsewhere: write them"
        )


def _loaded(script: Script, node: ast.expr) -> str | None:
    """Returns the value of --prompt-data for `load_dataset(...)` with constants, else None."""
    if isinstance(node, ast.Name):
        node = script.constants.get(node.id, node)
    if not isinstance(node, ast.Call) or call_name(node) != "load_dataset":
        return None
    words = [_constant(script, one) for one in node.args]
    keywords = {one.arg: _constant(script, one.value) for one in node.keywords}
    if isinstance(keywords.get("data_files"), str) and words[:1] in (["json"], ["parquet"], ["csv"]):
        return str(keywords["data_files"])
    names = [*words, *(keywords[name] for name in ("name", "split") if name in keywords)]
    if (
        not names
        or not all(isinstance(one, str) for one in names)
        or keywords.keys() - {"name", "split", "path"}
    ):
        return None
    return ":".join(map(str, names))


def _has_messages(script: Script) -> bool:
    """Returns True if the script writes chat messages, such as {"role": "user", ...}."""
    dicts = (node for one in script.statements for node in ast.walk(one.node) if isinstance(node, ast.Dict))
    return any(isinstance(key, ast.Constant) and key.value == "role" for one in dicts for key in one.keys)


def _devices(made: Imported, settings: Mapping[str, Setting]) -> None:
    count = _number(settings, "num_processes", 1)
    made.add(
        "num_processes of accelerate: trainer and engines share the GPUs, as with vllm_mode=colocate",
        **{"actor-num-gpus-per-node": count, "colocate": True},
    )


def _number(settings: Mapping[str, Setting], name: str, default: int) -> int:
    value = settings[name].value if name in settings else None
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or int(value) != value:
        raise FlagError(
            f"{name} of TRL", "be a whole number", value, "correct the script or the command line"
        )
    return int(value)


def _batches(made: Imported, settings: Mapping[str, Setting]) -> None:
    """Converts TRL's completions per device into vime's prompts per rollout and samples per optimizer step."""
    device, accumulated, devices, group = (_number(settings, name, v) for name, v in _BATCHES.items())
    step = device * accumulated * devices
    per_generation = _number(settings, "steps_per_generation", accumulated)
    generated = _number(settings, "generation_batch_size", device * devices * per_generation)
    if generated % group:
        raise FlagError(
            "the batch of TRL", f"be a multiple of num_generations {group}", generated, "correct the script"
        )
    sizes = ", ".join(
        f"{n}={settings[n].value}" if n in settings else f"{n}={v} by default" for n, v in _BATCHES.items()
    )
    made.add(
        f"{sizes}: {generated} completions per generation, {step} per optimizer step",
        **{
            "rollout-batch-size": generated // group,
            "n-samples-per-prompt": group,
            "global-batch-size": step,
            "use-dynamic-batch-size": True,
            "max-tokens-per-gpu": 8192,
        },
    )
    steps = _number(settings, "max_steps", -1)
    if steps > 0:
        rollouts = math.ceil(steps * step / generated)
        made.add(f"max_steps={steps}: optimizer steps become rollouts", **{"num-rollout": rollouts})
    else:
        epochs = settings["num_train_epochs"].value if "num_train_epochs" in settings else 3
        count = math.ceil(float(str(epochs)))
        made.add(f"num_train_epochs={epochs}: whole epochs", **{"num-epoch": count})
    if (again := _number(settings, "num_iterations", 1)) > 1:
        reason = "no flag: each sample is trained on once"
        made.entries.append(Entry(f"num_iterations={again}: {reason}", absent=reason))


def _losses(made: Imported, settings: Mapping[str, Setting]) -> None:
    setting = settings.get("loss_type")
    name = str(setting.value) if setting else str(DEFAULTS["loss_type"])
    origin = setting.origin if setting else "default of TRL"
    if name in _LOSSES:
        more = ", and also scale_rewards=none" if name == "dr_grpo" else ""
        made.add(f"loss_type={name} ({origin}): the same mean over tokens{more}", **_LOSSES[name])
    else:
        reason = "no flag: this loss is not there"
        made.entries.append(Entry(f"loss_type={name} ({origin}): {reason}", absent=reason, setting=setting))
    beta = settings.get("beta")
    if beta is not None and beta.value:
        made.add(
            f"{beta.shown} ({beta.origin}): TRL's KL term is k3",
            **{"use-kl-loss": True, "kl-loss-coef": beta.value, "kl-loss-type": "k3"},
        )


def settings_of_command(words: Sequence[str]) -> list[Setting]:
    """Returns the settings of a command line of TRL: `--learning_rate 1e-6`."""
    found, name, values = list[Setting](), "", list[str]()
    for word in [*words, "--"]:
        if not word.startswith("--"):
            values.append(word)
            continue
        if name:
            value = _parsed(values[0]) if len(values) == 1 else [_parsed(one) for one in values] or True
            found.append(Setting(name, value, "command line"))
        name, equals, value_text = word[2:].partition("=")
        name, values = name.replace("-", "_"), [value_text] if equals else []
    return found


def _parsed(text: str) -> object:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return json.loads(text)
    except ValueError:
        return text
