"""This module reads evaluation datasets from --eval-config and --eval-prompt-data into checked settings and prompts.

A setting is searched in this order: the dataset's entry in --eval-config, the `defaults` in that file, the --eval-*
flags, the training flags. `null` in the file is the value None for the keys of _NULLABLE; for other keys it means that
the key is not set.
"""

from __future__ import annotations

import dataclasses
import difflib
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any

import yaml

from slime.algo.losses import held_out, loss_for
from slime.config.config_file import YAML_ERRORS
from slime.config.fields import Values
from slime.config.foreign_rewards import any_foreign
from slime.config.hook_calls import CALLS, check_call
from slime.config.near_names import NEAR
from slime.config.ranges import COUNT, COUNT_OR_ZERO, FRACTION, TEMPERATURE_OR_GREEDY, TOP_K, Range
from slime.config.schema import Config
from slime.config.sections.reward import RewardConfig, reward_names
from slime.data.limits.context import ContextLimits, find_lowest, prompt_limit
from slime.data.limits.conversations import Masks
from slime.data.media.check import check_for
from slime.data.prompts import Prompts, load_prompts
from slime.data.rows import RowColumns
from slime.data.tokenizer import require_template_reads
from slime.environments.flags import check_dataset
from slime.hooks import load_function
from slime.records.errors import FlagError
from slime.rollout import sampling
from slime.rollout.rewards import check_names
from slime.rollout.rewards.labels import LabelCheck, label_check
from slime.types import Metadata

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EvalDatasetConfig:
    """One evaluation dataset with all its settings. Lengths are in tokens."""

    name: str
    path: str
    n_samples_per_eval_prompt: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_response_len: int | None = None
    max_prompt_len: int | None = None
    max_context_len: int | None = None
    min_new_tokens: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    input_key: str = "input"
    label_key: str | None = None
    tool_key: str | None = "tools"
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    metadata_key: str = "metadata"
    apply_chat_template: bool = False
    apply_chat_template_kwargs: dict[str, object] = field(default_factory=dict)
    rm_type: str | list[str] | None = None
    custom_rm_path: str | None = None
    custom_generate_function_path: str | None = None
    metadata_overrides: Metadata = field(default_factory=dict)
    extra: dict[str, object] = field(default_factory=dict)
    """Other keys, which are attributes for functions of the user. Sampling parameters are also sent to the engine."""

    def __getattr__(self, name: str) -> Any:
        if name in (extra := vars(self).get("extra", {})):
            return extra[name]
        raise AttributeError(f"the evaluation dataset has no setting {name!r}")


_SETTINGS = frozenset(f.name for f in dataclasses.fields(EvalDatasetConfig)) - {"name", "path", "extra"}
_NULLABLE = frozenset(f.name for f in dataclasses.fields(EvalDatasetConfig) if f.default is None) | {
    "tool_key"
}


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_text_or_texts(value: object) -> bool:
    return all(map(_is_text, value)) and bool(value) if isinstance(value, list) else _is_text(value)


def _is_record(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


_NUMBERS: dict[str, Range] = {
    "n_samples_per_eval_prompt": COUNT,
    "temperature": TEMPERATURE_OR_GREEDY,
    "top_p": FRACTION,
    "top_k": TOP_K,
    "max_response_len": COUNT,
    "max_prompt_len": COUNT,
    "max_context_len": COUNT,
    "min_new_tokens": COUNT_OR_ZERO,
}
_REALS = ("temperature", "top_p")
_OTHERS: dict[str, tuple[str, sampling.Check]] = {
    **{name: sampling.RULES[name] for name in ("stop", "stop_token_ids")},
    "apply_chat_template": ("be true or false", lambda value: isinstance(value, bool)),
    "apply_chat_template_kwargs": ("be a mapping from names", _is_record),
    "metadata_overrides": ("be a mapping from names", _is_record),
    "rm_type": ("be a text or a list of texts", _is_text_or_texts),
}
"""Maps a setting to (description of a valid value, check). Settings that are in neither table are texts."""

# Maps a setting to the flags that hold its default, in order.
_FALLBACKS = {
    "n_samples_per_eval_prompt": ("n_samples_per_eval_prompt",),
    "temperature": ("eval_temperature", "rollout_temperature"),
    "top_p": ("eval_top_p", "rollout_top_p"),
    "top_k": ("eval_top_k", "rollout_top_k"),
    "max_response_len": ("eval_max_response_len", "rollout_max_response_len"),
    "max_prompt_len": ("eval_max_prompt_len", "rollout_max_prompt_len"),
    "max_context_len": ("eval_max_context_len", "rollout_max_context_len"),
    "min_new_tokens": ("eval_min_new_tokens",),
    "stop": ("rollout_stop",),
    "stop_token_ids": ("rollout_stop_token_ids",),
    "input_key": ("eval_input_key", "input_key"),
    "label_key": ("eval_label_key", "label_key"),
    "tool_key": ("eval_tool_key", "tool_key"),
    "chosen_key": ("chosen_key",),
    "rejected_key": ("rejected_key",),
    "metadata_key": ("metadata_key",),
    "apply_chat_template": ("apply_chat_template",),
    "apply_chat_template_kwargs": ("apply_chat_template_kwargs",),
}


def resolve_eval_datasets(c: Config, *, masked: bool | None = None) -> list[EvalDatasetConfig]:
    """Returns the datasets of --eval-config (a YAML file), or else of --eval-prompt-data (name path pairs), or else [].

    The file holds `datasets`, a list or a mapping from names, and optionally `defaults`. Both are at the top level or
    under `eval`. For `masked`, see `read_eval_prompts`.
    """
    chosen = c.evaluation
    if chosen.eval_config is None:
        pairs = list(chosen.eval_prompt_data or [])
        if len(pairs) % 2:
            raise FlagError("--eval-prompt-data", "be pairs of name and path", f"{len(pairs)} words: {pairs}")
        raw = [{"name": name, "path": path} for name, path in zip(pairs[::2], pairs[1::2], strict=True)]
        return _resolved(c, raw, {})
    path = Path(chosen.eval_config)
    if not path.is_file():
        raise FlagError("--eval-config", "name an existing file", path, "check the path")
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except YAML_ERRORS as error:
        raise FlagError("--eval-config", "be YAML", f"{path}: {error}", "fix the file") from error
    if isinstance(config, dict):
        config = config.get("eval", config)
    if not isinstance(config, dict) or not config.get("datasets"):
        raise FlagError(
            "--eval-config", "hold a `datasets` entry", f"none in {path}", "list name and path there"
        )
    if unknown := sorted(map(str, set(config) - {"datasets", "defaults"})):
        raise FlagError(
            "--eval-config", "hold `datasets` and `defaults` only", f"{unknown} in {path}", "rename them"
        )
    datasets = config["datasets"]
    if isinstance(datasets, dict):
        datasets = [
            {"name": name, **settings} if isinstance(settings, dict) else settings
            for name, settings in datasets.items()
        ]
    configs = _resolved(c, datasets, config.get("defaults") or {})
    generated = not (held_out(c) if masked is None else masked)
    for one in configs if generated else ():
        _check_lengths(f"dataset {one.name!r}", one)
    return configs


def build_eval_dataset_configs(
    args: Namespace, raw_config: list[Values], defaults: Values
) -> list[EvalDatasetConfig]:
    """Returns the settings for every entry in `raw_config`, for plug-ins. Errors: see `_resolved`."""
    return _resolved(Config.from_args(args), raw_config, defaults)


def _resolved(c: Config, raw_config: list[Values], defaults: Values) -> list[EvalDatasetConfig]:
    """Resolves the settings for every entry. An unknown key becomes an attribute of the dataset's record. Raises
    ValueError, with dataset and key, for a key that is nearly the name of a setting, for missing or wrong settings, and
    for duplicate names."""
    if not isinstance(raw_config, list) or not all(isinstance(e, dict) for e in (*raw_config, defaults)):
        raise FlagError(
            "--eval-config",
            "hold `datasets` as a list or mapping of settings, and `defaults` as settings",
            f"{raw_config!r:.200} and {defaults!r:.80}",
            "write `datasets: [{name: NAME, path: FILE}]`",
        )
    configs = []
    _require_no_typing_error("defaults", defaults, _SETTINGS)
    for entry in raw_config:
        if not _is_text(entry.get("name")) or not _is_text(entry.get("path")):
            raise FlagError(
                "--eval-config", "give every dataset a name and a path", entry, "write both as texts"
            )
        where = f"dataset {entry['name']!r}"
        _require_no_typing_error(where, entry, _SETTINGS | {"name", "path"})
        settings = {}
        for setting, named in _FALLBACKS.items():
            values = [c.get_value(name) for name in named]
            settings[setting] = next((value for value in values if value is not None), None)
        chosen = {k: v for k, v in {**defaults, **entry}.items() if v is not None or k in _NULLABLE}
        extra = {key: chosen.pop(key) for key in sorted(chosen.keys() - _SETTINGS - {"name", "path"})}
        for key, value in (chosen | extra).items():
            _check_setting(where, key, value)
        config = EvalDatasetConfig(**{**settings, **chosen}, extra=extra)
        check_dataset(c, where, config.path, chosen)
        _check_dataset(c.reward, where, config)
        configs.append(config)
    names = [config.name for config in configs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"evaluation datasets must have different names, got {twice} more than once")
    return configs


def _require_no_typing_error(where: str, settings: Values, known: frozenset[str]) -> None:
    """Raises ValueError for an unknown key that is nearly a setting's name. Users' functions read other unknown
    keys."""
    for key in settings:
        near = difflib.get_close_matches(str(key), known | sampling.RULES.keys(), n=1, cutoff=NEAR)
        misplaced = key in ("name", "path") and key not in known
        if not isinstance(key, str) or misplaced or (near and near[0] != key):
            hint = f"did you mean {near[0]}?" if near else "rename it, or write it as a text of a dataset"
            raise FlagError(f"--eval-config: {where}", "have known settings", f"{key!r}", hint)


def _check_setting(where: str, key: str, value: object) -> None:
    """Raises ValueError for a value of a wrong type or out of range."""
    if value is None:
        return
    problem = None
    if key in _NUMBERS:
        kinds: type | UnionType = int | float if key in _REALS else int
        if isinstance(value, int | float) and isinstance(value, kinds) and not isinstance(value, bool):
            problem = _NUMBERS[key].problem(value)
        else:
            problem = "be a number" if key in _REALS else "be a whole number"
    elif key in sampling.RULES and key not in _SETTINGS:
        rule, fits = sampling.RULES[key]
        problem = None if fits(value) else rule
    elif key in _SETTINGS or key in ("name", "path"):
        rule, fits = _OTHERS.get(key, ("be a text", _is_text))
        problem = None if fits(value) else rule
    if problem:
        raise FlagError(
            f"--eval-config: {key} of {where}",
            problem,
            f"{value!r:.80} ({type(value).__name__})",
            "fix the file",
        )


def _check_dataset(reward: RewardConfig, where: str, config: EvalDatasetConfig) -> None:
    """Raises ValueError for a reward or a function that does not exist."""
    rewards = {
        "rm_type": config.rm_type,
        "rm_type in metadata_overrides": config.metadata_overrides.get("rm_type"),
    }
    own = config.custom_rm_path or reward.custom_rm_path  # a function of the user may accept any name
    for key, name in rewards.items() if not own else ():
        names = reward_names(name)
        if names:
            check_names(names, f"--eval-config: {key} of {where}")
        if "remote_rm" in names and reward.rm_url is None:
            raise FlagError(
                "--rm-url", f"be given with {key} remote_rm of {where}", "none", "give its address"
            )
    for key in ("custom_rm_path", "custom_generate_function_path"):
        if path := getattr(config, key):
            flag = f"--eval-config: {key} of {where}"
            check_call(flag, path, load_function(path, flag), CALLS[key], scores=key == "custom_rm_path")


def _check_lengths(where: str, config: EvalDatasetConfig) -> None:
    """Raises ValueError for lengths that leave no response."""
    if config.max_response_len is None and config.max_context_len is None:
        raise FlagError(
            f"--eval-config: max_response_len of {where}", "be a number", "none", "or give max_context_len"
        )
    if config.max_response_len is not None and (config.min_new_tokens or 0) > config.max_response_len:
        raise FlagError(
            f"--eval-config: min_new_tokens of {where}",
            f"be at most max_response_len {config.max_response_len}",
            config.min_new_tokens,
            "lower it",
        )


def check_evaluation(c: Config) -> None:
    """Raises ValueError for a wrong setting of an evaluation dataset. The start of a run calls this rule."""
    resolve_eval_datasets(c)


def read_eval_prompts(
    c: Config,
    config: EvalDatasetConfig,
    tokenizer: Callable[[], PreTrainedTokenizerBase],
    *,
    masked: bool | None = None,
    most_bytes: int | None = None,
) -> Prompts:
    """Returns the checked prompts of a dataset. Raises ValueError with file and line for a wrong prompt. `masked` reads
    conversations or pairs, as training does (None: if `held_out`). For `most_bytes`, see `load_prompts`."""
    checkpoint, masked = c.rollout.hf_checkpoint, held_out(c) if masked is None else masked
    limit = (find_lowest if masked else prompt_limit)(config.max_prompt_len, config.max_context_len)
    if checkpoint and config.apply_chat_template_kwargs:
        name = f"apply_chat_template_kwargs of dataset {config.name!r}"
        require_template_reads(config.apply_chat_template_kwargs, tokenizer(), name)
    named = {f.name: getattr(config, f.name) for f in dataclasses.fields(RowColumns) if f.name in _SETTINGS}
    pairs = masked and loss_for(c.algorithm).pairs
    rewards = config.custom_rm_path or c.reward.custom_rm_path, config.rm_type or c.reward.rm_type
    named |= {"conversations": masked and not pairs, "whole_rows": any_foreign(*rewards)}
    named |= {"multimodal_keys": dict(c.data.multimodal_keys or {})}
    named["apply_chat_template"] = config.apply_chat_template and not masked  # the loss mask renders it
    columns = RowColumns(**named if pairs else named | {"chosen_key": None, "rejected_key": None})
    context = masks = None
    if checkpoint and masked:
        masks = Masks.of(c, tokenizer(), columns, "--eval-max-context-len")
    elif checkpoint:
        context = ContextLimits.of(c, tokenizer).for_responses(
            config.max_response_len, "--eval-max-response-len"
        )
    return load_prompts(
        config.path,
        columns,
        tokenizer=tokenizer() if config.apply_chat_template or limit is not None else None,
        max_prompt_len=limit,
        flag="--eval-prompt-data" if c.evaluation.eval_config is None else "--eval-config",
        limit_flag="--eval-max-prompt-len",
        context=context,
        check_label=None if masked else eval_label_check(c, config),
        conversations=masked and not pairs,
        masks=masks,
        most_bytes=most_bytes,
        media=check_for(c),
    )


def eval_label_check(c: Config, config: EvalDatasetConfig) -> LabelCheck | None:
    """Returns the check of a dataset's labels for the dataset's reward."""
    reward = config.rm_type or config.metadata_overrides.get("rm_type")
    if config.custom_rm_path or (config.custom_generate_function_path and config.label_key is None):
        return None
    return label_check(c, config.label_key, reward)
