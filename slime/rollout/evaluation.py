"""Evaluation: several datasets, each with its own columns, sampling and reward, in one pass.

The first value found counts: the dataset's entry in --eval-config, the `defaults` there, the --eval-* flags,
the training flags.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from slime.config.fields import nearest
from slime.config.schema import Flags
from slime.data.prompts import Context, load_prompts
from slime.data.rows import Columns
from slime.hf_config import read_hf_config
from slime.rollout import generate
from slime.rollout.base_types import RolloutFnEvalOutput
from slime.rollout.generate import run_together
from slime.rollout.metrics import eval_reward_args
from slime.rollout.rewards.labels import LabelCheck, label_check
from slime.rollout.sampling import RULES
from slime.rollout.state import GenerateState, rollout_sampling_params
from slime.types import Prompt, Sample, SampleGroup

logger = logging.getLogger(__name__)


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
    metadata_key: str = "metadata"
    apply_chat_template: bool = False
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    rm_type: str | None = None
    custom_rm_path: str | None = None
    custom_generate_function_path: str | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    """Other keys. Each is an attribute, for functions of the user; sampling parameters also go to the engine."""

    def __getattr__(self, name: str) -> Any:
        if name in (extra := vars(self).get("extra", {})):
            return extra[name]
        raise AttributeError(f"the evaluation dataset has no setting {name!r}")


_SETTINGS = frozenset(f.name for f in dataclasses.fields(EvalDatasetConfig)) - {"name", "path", "extra"}

# Setting -> the flags that give its default, in order.
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
    "metadata_key": ("metadata_key",),
    "apply_chat_template": ("apply_chat_template",),
    "apply_chat_template_kwargs": ("apply_chat_template_kwargs",),
}


def resolve_eval_datasets(args: Any) -> list[EvalDatasetConfig]:
    """The datasets of --eval-config (a YAML file), else of --eval-prompt-data (name path pairs), else none.

    The file holds `datasets`, a list or a mapping from names, and optionally `defaults`. Both are at the top
    level or under `eval`.
    """
    if args.eval_config is None:
        pairs = list(args.eval_prompt_data or [])
        if len(pairs) % 2:
            raise ValueError(
                f"--eval-prompt-data must be pairs of name and path, got {len(pairs)} words: {pairs}"
            )
        raw = [{"name": name, "path": path} for name, path in zip(pairs[::2], pairs[1::2], strict=True)]
        return build_eval_dataset_configs(args, raw, {})
    path = Path(args.eval_config)
    if not path.is_file():
        raise ValueError(f"--eval-config must name an existing file, got {path}; check the path")
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"--eval-config must be YAML, got {path}: {error}") from error
    if isinstance(config, dict):
        config = config.get("eval", config)
    if not isinstance(config, dict) or not config.get("datasets"):
        raise ValueError(
            f"--eval-config must hold a `datasets` entry, got none in {path}; list name and path there"
        )
    datasets = config["datasets"]
    if isinstance(datasets, dict):
        datasets = [{"name": name, **(settings or {})} for name, settings in datasets.items()]
    return build_eval_dataset_configs(args, datasets, config.get("defaults") or {})


def build_eval_dataset_configs(
    args: Any, raw_config: list[dict[str, Any]], defaults: dict[str, Any]
) -> list[EvalDatasetConfig]:
    """Resolve the settings of each entry. An unknown key becomes an attribute of its record.

    ValueError for a key that is spelled nearly as a setting, for missing settings and for duplicate names.
    """
    configs, flags = [], Flags(args)
    for entry in raw_config:
        others = (set(entry) | set(defaults)) - _SETTINGS - {"name", "path"}
        if mistyped := sorted(
            key for key in others if nearest(key, _SETTINGS | RULES.keys()) and key not in RULES
        ):
            raise ValueError(
                f"--eval-config must use known settings, got {mistyped}; known: {sorted(_SETTINGS)}"
            )
        if not entry.get("name") or not entry.get("path"):
            raise ValueError(f"--eval-config must give every dataset a name and a path, got {entry}")
        settings = {}
        for setting, names in _FALLBACKS.items():
            values = [getattr(flags, name) for name in names]
            settings[setting] = next((value for value in values if value is not None), None)
        given = {k: v for k, v in {**defaults, **entry}.items() if v is not None}
        extra = {key: given.pop(key) for key in sorted(others & given.keys())}
        configs.append(EvalDatasetConfig(**{**settings, **given}, extra=extra))
    names = [config.name for config in configs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"evaluation datasets must have different names, got {twice} more than once")
    return configs


def load_eval_datasets(state: GenerateState) -> list[tuple[EvalDatasetConfig, Sequence[Prompt]]]:
    """Settings and prompts of every evaluation dataset. Each file is read once per run.

    The rollout manager calls this at the start of a run, so that a bad file is an error at the start.
    """
    configs = resolve_eval_datasets(state.args)
    if not configs:
        raise ValueError(
            "--eval-prompt-data or --eval-config must name a dataset for --eval-interval, got none"
        )
    checkpoint = state.args.hf_checkpoint
    longest = read_hf_config(checkpoint).get("max_position_embeddings") if checkpoint else None
    for config in configs:
        if config.name in state.eval_prompts:
            continue
        if unread := sorted(config.extra.keys() - RULES.keys()):
            logger.warning(
                "evaluation dataset %s: only your own functions read %s", config.name, ", ".join(unread)
            )
        columns = Columns(**{f.name: getattr(config, f.name) for f in dataclasses.fields(Columns)})
        limits = [config.max_prompt_len, config.max_context_len and config.max_context_len - 1]
        state.eval_prompts[config.name] = load_prompts(
            config.path,
            columns,
            tokenizer=state.tokenizer,
            max_prompt_len=next((limit for limit in limits if limit is not None), None),
            flag="--eval-prompt-data",
            limit_flag="--eval-max-prompt-len",
            context=Context(longest, lambda: state.tokenizer) if longest else None,
            check_label=eval_label_check(state.args, config),
        )
    return [(config, state.eval_prompts[config.name]) for config in configs]


def eval_label_check(args: Any, config: EvalDatasetConfig) -> LabelCheck | None:
    """The check of a dataset's labels, for the reward that scores them."""
    reward = config.rm_type or config.metadata_overrides.get("rm_type")
    if config.custom_rm_path or (config.custom_generate_function_path and config.label_key is None):
        return None
    return label_check(args, config.label_key, reward)


async def eval_rollout(state: GenerateState, rollout_id: int) -> RolloutFnEvalOutput:
    """Generate and score `n_samples_per_eval_prompt` responses to every prompt of every dataset.

    Deterministic if the engine is: the random stream of a response is "eval/{name}/{rollout_id}/{index}".
    An error of a reward or generate function names the sample. TimeoutError if every response of a dataset
    passes --rollout-deadline-s. If only some responses are late, the rewards exclude them and a warning
    counts them.
    """
    datasets = load_eval_datasets(state)
    total = sum(len(prompts) * config.n_samples_per_eval_prompt for config, prompts in datasets)
    state.begin()
    state.progress = (0, total)
    try:
        results = await run_together(
            _eval_dataset(state, config, prompts, rollout_id) for config, prompts in datasets
        )
    finally:
        state.aborted = True
        state.end()
    names = [config.name for config, _ in datasets]
    return RolloutFnEvalOutput(data=dict(zip(names, results, strict=True)))


async def _eval_dataset(
    state: GenerateState, config: EvalDatasetConfig, prompts: Sequence[Prompt], rollout_id: int
) -> dict[str, Any]:
    params = _sampling_params(state.args, config)

    async def one(group: SampleGroup) -> SampleGroup:
        done = await generate.generate_and_rm_group(
            state.args, group, params, evaluation=True, rollout_id=rollout_id, stream=f"eval/{config.name}"
        )
        finished, wanted = state.progress
        state.progress = (finished + len(group), wanted)
        return done

    groups = await run_together(
        one(_eval_group(config, number, prompt)) for number, prompt in enumerate(prompts)
    )
    samples = [sample for group in groups for sample in group]
    scored = [sample for sample in samples if sample.status is not Sample.Status.ABORTED]
    if not scored:
        raise TimeoutError(
            f"--rollout-deadline-s must suffice for a response, got {state.args.rollout_deadline_s} s "
            f"and no response of evaluation dataset {config.name} within it; last: "
            f"{next(iter(state.timed_out.values()), 'aborted')}"
        )
    if len(scored) < len(samples):
        logger.warning(
            "%d of %d responses of %s were cut off", len(samples) - len(scored), len(samples), config.name
        )
    reward_args = eval_reward_args(state.args)
    return {
        "rewards": [sample.get_reward_value(reward_args) for sample in scored],
        "truncated": [sample.status is Sample.Status.TRUNCATED for sample in scored],
        "samples": samples,
    }


def _eval_group(config: EvalDatasetConfig, number: int, prompt: Prompt) -> SampleGroup:
    metadata = {**prompt.metadata, **config.metadata_overrides}
    if config.rm_type is not None:
        metadata["rm_type"] = config.rm_type
    size = config.n_samples_per_eval_prompt
    return [
        Sample(
            group_index=number,
            index=number * size + i,
            prompt=copy.deepcopy(prompt.text),
            label=copy.deepcopy(prompt.label),
            metadata=copy.deepcopy(metadata),
            apply_chat_template_kwargs=dict(config.apply_chat_template_kwargs),
            custom_rm_path=config.custom_rm_path,
            generate_function_path=config.custom_generate_function_path,
        )
        for i in range(size)
    ]


def _sampling_params(args: Any, config: EvalDatasetConfig) -> dict[str, Any]:
    params = rollout_sampling_params(args) | {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "max_new_tokens": config.max_response_len,
        "stop": config.stop,
        "stop_token_ids": config.stop_token_ids,
    }
    if config.max_context_len != args.rollout_max_context_len:
        params["max_context_len"] = config.max_context_len
    if config.min_new_tokens is not None:
        params["min_new_tokens"] = config.min_new_tokens
    return params | {name: value for name, value in config.extra.items() if name in RULES}
