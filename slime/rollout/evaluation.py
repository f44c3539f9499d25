"""This module evaluates several datasets in one pass. Each dataset has its own columns, sampling and reward."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence

from slime.algo.losses import held_out
from slime.config.sections.reward import eval_reward_key
from slime.config.sections.rollout import RolloutConfig
from slime.data.trajectories import trajectory_rewards, truncated_trajectories
from slime.rollout import generate
from slime.rollout.base_types import EvalResult, RolloutFnEvalOutput
from slime.rollout.context import RunContext
from slime.rollout.eval_datasets import EvalDatasetConfig, read_eval_prompts, resolve_eval_datasets
from slime.rollout.generate import run_together
from slime.rollout.sampling import RULES
from slime.rollout.state import GenerateState, rollout_sampling_params
from slime.types import Prompt, Sample, SampleGroup, SamplingParams

logger = logging.getLogger(__name__)


def load_eval_datasets(
    state: GenerateState, *, masked: bool | None = None
) -> list[tuple[EvalDatasetConfig, Sequence[Prompt]]]:
    """Returns the settings and prompts of every evaluation dataset. Each file is read once per run. For `masked`, see
    `read_eval_prompts`.

    The rollout manager calls this at the start of a run, so that a bad file is an error at the start.
    """
    c = RunContext.from_state(state).config
    masked = held_out(c) if masked is None else masked
    configs = resolve_eval_datasets(c, masked=masked)
    if not configs:
        raise ValueError(
            "--eval-prompt-data or --eval-config must name a dataset for --eval-interval, got none"
        )
    for config in configs:
        if (config.name, masked) in state.eval_prompts:
            continue
        if unread := sorted(config.extra.keys() - RULES.keys()):
            logger.warning(
                "evaluation dataset %s: only your own functions read %s", config.name, ", ".join(unread)
            )
        prompts = read_eval_prompts(c, config, lambda: state.tokenizer, masked=masked)
        state.eval_prompts[config.name, masked] = prompts
    return [(config, state.eval_prompts[config.name, masked]) for config in configs]


async def eval_rollout(state: GenerateState, rollout_id: int) -> RolloutFnEvalOutput:
    """Generates and scores `n_samples_per_eval_prompt` responses to every prompt of every dataset.

    The result is deterministic if the engine is: a response's random stream is "eval/{name}/{rollout_id}/{index}". An
    error of a reward or generate function names the sample. Raises TimeoutError if every response of a dataset passes
    --rollout-deadline-s. If only some responses are late, the rewards exclude them and a warning counts them.
    """
    datasets = load_eval_datasets(state)
    total = sum(len(prompts) * config.n_samples_per_eval_prompt for config, prompts in datasets)
    if not state.busy:
        state.progress = (0, total)
    results = await run_together(
        _eval_dataset(state, config, prompts, rollout_id) for config, prompts in datasets
    )
    names = [config.name for config, _ in datasets]
    return RolloutFnEvalOutput(data=dict(zip(names, results, strict=True)))


async def _eval_dataset(
    state: GenerateState, config: EvalDatasetConfig, prompts: Sequence[Prompt], rollout_id: int
) -> EvalResult:
    context = RunContext.from_state(state).for_evaluation()
    params = _sampling_params(context.config.rollout, config)
    late: list[str] = []

    async def one(group: SampleGroup) -> SampleGroup:
        done = await generate.finish_group(
            *(context, group, params),
            evaluation=True,
            rollout_id=rollout_id,
            stream=f"{generate.EVALUATION}{config.name}/{rollout_id}",
        )
        late.extend(state.forget(group))
        if not state.busy:
            finished, wanted = state.progress
            state.progress = (finished + len(group), wanted)
        return done

    groups = await run_together(
        one(eval_group(config, number, prompt)) for number, prompt in enumerate(prompts)
    )
    samples = [sample for group in groups for sample in group]
    scored = [sample for sample in samples if sample.status is not Sample.Status.ABORTED]
    if not scored:
        raise TimeoutError(
            f"--rollout-deadline-s must suffice for a response, got {context.config.rollout.rollout_deadline_s} s "
            f"and no response of evaluation dataset {config.name} within it; last: "
            f"{next(iter(late), 'aborted')}"
        )
    if len(scored) < len(samples):
        logger.warning(
            "%d of %d responses of %s were cut off", len(samples) - len(scored), len(samples), config.name
        )
    key = eval_reward_key(context.config.reward)
    return {
        "rewards": trajectory_rewards(scored, key),
        "truncated": truncated_trajectories(scored),
        "samples": samples,
    }


def eval_group(config: EvalDatasetConfig, number: int, prompt: Prompt) -> SampleGroup:
    """Returns the samples of a prompt of a dataset, without responses."""
    metadata = {**prompt.metadata, **config.metadata_overrides}
    if config.rm_type is not None:
        metadata["rm_type"] = config.rm_type
    size = config.n_samples_per_eval_prompt
    templated = config.apply_chat_template or not isinstance(prompt.text, str)
    return [
        Sample(
            group_index=number,
            index=number * size + i,
            prompt=copy.deepcopy(prompt.text),
            label=copy.deepcopy(prompt.label),
            metadata=copy.deepcopy(metadata),
            multimodal_inputs=prompt.multimodal_inputs(),
            apply_chat_template_kwargs=dict(config.apply_chat_template_kwargs) if templated else None,
            custom_rm_path=config.custom_rm_path,
            generate_function_path=config.custom_generate_function_path,
        )
        for i in range(size)
    ]


def _sampling_params(rollout: RolloutConfig, config: EvalDatasetConfig) -> SamplingParams:
    params = rollout_sampling_params(rollout) | {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "max_new_tokens": config.max_response_len,
        "stop": config.stop,
        "stop_token_ids": config.stop_token_ids,
    }
    if config.max_context_len != rollout.rollout_max_context_len:
        params["max_context_len"] = config.max_context_len
    if config.min_new_tokens is not None:
        params["min_new_tokens"] = config.min_new_tokens
    return params | {name: value for name, value in config.extra.items() if name in RULES}
