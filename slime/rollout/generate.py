"""This module generates single samples and groups with their rewards. It owns seeds, token budgets and status.

A custom generate function (`--custom-generate-function-path`) replaces `generate` only.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from argparse import Namespace
from collections.abc import Coroutine, Iterable
from typing import TypeVar

from slime.config.sections.rollout import RolloutConfig
from slime.data import columns
from slime.hooks import Hook, load_function
from slime.protocols import GenerateResult
from slime.rollout import state
from slime.rollout.context import RunContext, find_context
from slime.rollout.facts import note_sampling
from slime.rollout.on_policy_distillation import teach
from slime.rollout.request_abort import CancelledCalls, cancels_its_call
from slime.rollout.rewards import async_rm, batched_async_rm, score, score_together
from slime.rollout.rewards.finite import remove_unless_finite
from slime.rollout.sample_hooks import accepted, run_sample_hooks
from slime.rollout.stream.failures import fill_failed, has_failed, limit_answer, run_sample
from slime.rollout.stream.parts import forget_parts, request_parts
from slime.types import FINISH_STATUS, Reward, Sample, SampleGroup, SamplingParams
from slime.user_code import blamed
from slime.vision.inputs import ImageInputs
from slime.vision.requests import request_images

T = TypeVar("T")

EVALUATION = "eval/"
"""Prefix of the names of an evaluation's random streams."""

FINISHED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED, Sample.Status.FAILED)


async def run_together(coroutines: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """Returns the results of all coroutines, in order. If a coroutine fails, cancels the rest and raises its error."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in tasks]


def GenerateState(args: Namespace) -> state.GenerateState:
    """Returns the run's state: tokenizer, processor, semaphore, sampling_params, aborted, args.

    All calls in the rollout manager's process return the same state, with any `args`. Raises RuntimeError without a
    rollout.
    """
    return state.current_state()


async def generate(args: Namespace, sample: Sample, sampling_params: SamplingParams) -> Sample:
    """Continues `sample` with one request, and sets its tokens, response, log-probs, status and weight versions.

    A sample that already has a response continues after its last token. `max_new_tokens`, --rollout-max-context-len and
    the engine's context bound the whole response; a sample with no tokens left becomes TRUNCATED without a request. If
    the request passes --rollout-deadline-s, the sample keeps its earlier tokens and becomes ABORTED. Raises ValueError,
    with the sample's name, if the prompt leaves no room or the engine rejects it.
    """
    return await _continue(find_context(args), sample, sampling_params)


async def _continue(context: RunContext, sample: Sample, sampling_params: SamplingParams) -> Sample:
    """Implements `generate`."""
    own, flags = context.run, context.config.rollout
    assert own.engine is not None, "generation needs an engine"
    if not sample.tokens:
        sample.tokens = await own.encode_prompt(sample)
    budget = _token_budget(flags, sample, sampling_params, own.context)
    if budget <= 0:
        sample.status = Sample.Status.TRUNCATED
        return sample
    wanted = columns.wanted(context.config, lambda column: column.known(sample) if column.known else 0)
    stream = state.random_stream(sample)
    requests = own.requests[stream]
    seed = state.request_seed(
        flags.rollout_seed, stream, sample.response_length, retry=requests[sample.response_length]
    )
    requests[sample.response_length] += 1
    note_sampling(flags, sample, sampling_params)
    began = time.perf_counter()
    try:
        # The engine client keeps the deadline and reports the reason. The margin covers a client that hangs.
        async with asyncio.timeout(flags.rollout_deadline_s * 1.1 + 0.5):
            result = await own.engine.generate(
                sample.tokens,
                _within(sampling_params, sample, budget),
                seed=seed,
                deadline_s=flags.rollout_deadline_s,
                columns=wanted,
                **request_images(await own.reference_images(sample)),
                **request_parts(own, stream),
            )
        columns.check_answer(sample, result, wanted, sampling_params)
        add_answer(sample, result, own, sampling_params)
    except TimeoutError as error:
        own.timed_out[stream] = str(error) or "the engine did not answer"
        sample.status = Sample.Status.ABORTED
        return sample
    except ValueError as error:
        raise ValueError(f"sample {sample.index} of group {sample.group_index}: {error}") from error
    finally:
        forget_parts(own, stream)
    if not stream.startswith(EVALUATION):
        own.note_request(time.perf_counter() - began, result)
    return sample


def _token_budget(
    flags: RolloutConfig, sample: Sample, params: SamplingParams, of_engine: tuple[int | None, str]
) -> int:
    limits: list[int] = []
    if params.get("max_new_tokens") is not None:
        limits.append(params["max_new_tokens"] - sample.response_length)
    of_flag = params.get("max_context_len", flags.rollout_max_context_len)
    if of_flag is None and not limits:
        raise ValueError(
            "--rollout-max-response-len must be set, got none; or give --rollout-max-context-len"
        )
    for context, setting in ((of_flag, "--rollout-max-context-len"), of_engine):
        if context is None:
            continue
        prompt_len = len(sample.tokens) - sample.response_length
        if prompt_len >= context:
            raise ValueError(
                f"{setting} must leave room for a response, got {context} for {prompt_len} "
                f"prompt tokens of sample {sample.index} of group {sample.group_index}; "
                "lower --rollout-max-prompt-len"
            )
        limits.append(context - len(sample.tokens))
    return min(limits)


def _within(params: SamplingParams, sample: Sample, budget: int) -> SamplingParams:
    """Returns the parameters of a request that may add `budget` tokens to the sample."""
    params = {name: value for name, value in params.items() if name != "max_context_len"}
    if least := params.get("min_new_tokens"):
        params["min_new_tokens"] = min(max(least - sample.response_length, 0), budget)
    return params | {"max_new_tokens": budget}


def add_answer(
    sample: Sample,
    result: GenerateResult,
    own: state.GenerateState,
    params: SamplingParams,
) -> None:
    """Appends the tokens of an answer to the sample."""
    continued = sample.response_length > 0
    sample.append_response_tokens(
        tokens=result.token_ids, log_probs=result.log_probs, text=result.text, columns=result.token_columns
    )
    columns.store(sample, result)
    if continued and result.token_ids:
        # A character may be split between two requests, so the whole response is decoded again.
        sample.response = decode_response(sample, own, params)
    for version in result.weight_versions if result.token_ids else []:
        sample.add_weight_version(version)
    sample.prefix_cache_info.add(
        {"cached_tokens": result.cached_tokens, "prompt_tokens": result.prompt_tokens}
    )
    sample.prefix_cache_info.add_ages(*result.cache_ages)
    if result.speculation is not None:
        names = ("spec_verify_ct", "spec_draft_token_num", "spec_accept_token_num")
        counts = dict(zip(names, result.speculation, strict=True))
        sample.spec_info.add(counts | {"completion_tokens": len(result.token_ids)})
    sample.status = FINISH_STATUS[result.finish_reason]


def decode_response(sample: Sample, own: state.GenerateState, params: SamplingParams) -> str:
    """Returns the text of the response tokens."""
    ids = sample.tokens[-sample.response_length :]
    return str(own.tokenizer.decode(ids, skip_special_tokens=bool(params.get("skip_special_tokens"))))


async def generate_and_rm(
    args: Namespace,
    sample: Sample,
    sampling_params: SamplingParams,
    evaluation: bool = False,
    *,
    rollout_id: int | None = None,
) -> Sample | list[Sample]:
    """Generates an unfinished sample, runs the sample hooks, and scores samples that have no reward yet.

    Returns a list if a custom generate function returned several samples; they share a rollout_id. Aborted
    samples are not scored. With --group-rm, `generate_and_rm_group` scores the samples instead.

    If a plug-in made `args`, missing flags have their defaults (`slime.config.read_section`).

    In an evaluation, functions called here see `args.use_rollout_routing_replay` and `use_score_centering` as False,
    because training does not use the samples, and an evaluation holds all its samples in memory.
    """
    context = find_context(args)
    if evaluation:
        context = context.for_evaluation()
    return await _sample(context, sample, sampling_params, evaluation, rollout_id)


async def _sample(
    context: RunContext,
    sample: Sample,
    sampling_params: SamplingParams,
    evaluation: bool,
    rollout_id: int | None,
) -> Sample | list[Sample]:
    """Implements `generate_and_rm`. In an evaluation, `context` is already the evaluation's context."""
    own, flags, rewards = context.run, context.config.rollout, context.config.reward
    finished = sample.status in FINISHED
    old = sample.response_length if flags.partial_rollout and flags.mask_offpolicy_in_partial_rollout else 0
    if old:
        sample.loss_mask = [0] * old
    result: Sample | list[Sample] = sample
    if finished and isinstance(sample.multimodal_train_inputs, ImageInputs):
        await own.reference_images(sample)  # a resumed run has taken the sample from a file
    if not finished:
        async with own.semaphore:
            if own.aborted:
                sample.status = Sample.Status.ABORTED
                return sample
            result = await _generate_one(context, sample, sampling_params, evaluation)
        with blamed("--rollout-sample-hook-path", sample):
            result = await run_sample_hooks(context, result, rollout_id=rollout_id, evaluation=evaluation)
    made = result if isinstance(result, list) else [result]
    for one in made if old else ():
        if one.status in FINISHED and not any(one.loss_mask or [1]):
            one.remove_sample = (
                True  # no token is from the current weights; the group's statistics include it
            )
    if not evaluation:
        with blamed("--use-opd", sample):
            await teach(context, made)
    if rewards.group_rm:
        return result
    waiting = [s for s in made if _wants_reward(s)]
    if isinstance(result, list):
        await _score_together(context, waiting)
    elif waiting:
        result.reward = await _score(context, result)
    remove_unless_finite(made, rewards.reward_key)
    return result


async def generate_and_rm_group(
    args: Namespace,
    group: SampleGroup,
    sampling_params: SamplingParams,
    evaluation: bool = False,
    *,
    rollout_id: int | None = None,
    stream: str = "rollout",
) -> SampleGroup:
    """Generates all samples of a group concurrently. With --group-rm, one call scores the whole group.

    If a sample fans out to several samples, these replace it in the group. Sets each sample's random stream in
    `session_id`: "{stream}/{index}". A sample from the buffer keeps its `session_id`.
    """
    context = find_context(args)
    if evaluation:
        context = context.for_evaluation()
    return await _group(context, group, sampling_params, evaluation, rollout_id, stream)


async def finish_group(
    context: RunContext,
    group: SampleGroup,
    sampling_params: SamplingParams,
    evaluation: bool = False,
    *,
    rollout_id: int | None,
    stream: str = "rollout",
) -> SampleGroup:
    """Generates and scores a group, see `generate_and_rm_group`. In an evaluation, `context` is the evaluation's."""
    if (own := replaced("generate_and_rm_group")) is not None:
        made: SampleGroup = await own(
            *(context.hook_args, group, sampling_params, evaluation), rollout_id=rollout_id, stream=stream
        )
        return made
    return await _group(context, group, sampling_params, evaluation, rollout_id, stream)


async def _group(
    context: RunContext,
    group: SampleGroup,
    sampling_params: SamplingParams,
    evaluation: bool,
    rollout_id: int | None,
    stream: str,
) -> SampleGroup:
    for sample in group:
        if sample.session_id is None:
            sample.session_id = f"{stream}/{sample.index}"
    spans = context.run.spans
    policy = "end" if evaluation else context.config.fault_tolerance.failed_samples

    async def make(sample: Sample) -> Sample | list[Sample]:
        with spans.around(sample, rollout_id, evaluation) as done:
            result = await run_sample(context.run, policy, sample, lambda: fill(sample))
            done(result)
        return result

    async def fill(sample: Sample) -> Sample | list[Sample]:
        params = dict(sampling_params)
        if (own := replaced("generate_and_rm")) is not None:
            known = accepted(own, rollout_id=rollout_id)
            made: Sample | list[Sample] = await own(context.hook_args, sample, params, evaluation, **known)
            return made
        return await _sample(context, sample, params, evaluation, rollout_id)

    done = await run_together(make(sample) for sample in group)
    flat = [s for one in done for s in (one if isinstance(one, list) else [one])]
    rewards = context.config.reward
    if rewards.group_rm and not any(s.status is Sample.Status.ABORTED for s in flat):
        await _score_together(context, [s for s in flat if _wants_reward(s)])
        remove_unless_finite(flat, rewards.reward_key)
    fill_failed(flat, rewards.reward_key)
    return flat


async def _generate_one(
    context: RunContext, sample: Sample, sampling_params: SamplingParams, evaluation: bool
) -> Sample | list[Sample]:
    path = sample.generate_function_path or context.config.rollout.custom_generate_function_path
    if path is None:
        if (own := replaced("generate")) is not None:
            written: Sample = await own(context.hook_args, sample, sampling_params)
            return written
        return await _continue(context, sample, sampling_params)
    rollout_id, index = sample.rollout_id, sample.index
    with blamed(f"--custom-generate-function-path {path}", sample):
        function = load_function(path)
        result = function(
            context.hook_args, sample, sampling_params, **accepted(function, evaluation=evaluation)
        )
        if cancels_its_call(function):
            result = context.run.part(CancelledCalls, CancelledCalls).result(result, sample)
        if inspect.isawaitable(result):
            async with limit_answer(context.config.sessions.session_deadline_s, path):
                result = await result
        if isinstance(result, list):
            if not result or not all(isinstance(s, Sample) for s in result):
                raise ValueError(f"must return samples, got {result!r:.80}")
            for sibling in result:
                sibling.rollout_id = index if rollout_id is None else rollout_id
        elif not isinstance(result, Sample):
            raise ValueError(f"must return a Sample or a list of them, got {type(result).__name__}")
    made: Sample | list[Sample] = result
    return made


def _wants_reward(sample: Sample) -> bool:
    return sample.reward is None and sample.status is not Sample.Status.ABORTED and not has_failed(sample)


async def _score(context: RunContext, sample: Sample) -> Reward:
    if (own := replaced("async_rm")) is not None:
        reward: Reward = await own(context.hook_args, sample)
        return reward
    return await score(context, sample)


async def _score_together(context: RunContext, samples: list[Sample]) -> None:
    if not samples:
        return
    if (own := replaced("batched_async_rm")) is not None:
        rewards = await own(context.hook_args, samples)
    else:
        rewards = await score_together(context, samples)
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = reward


_OWN = {
    function.__name__: function
    for function in (generate, generate_and_rm, generate_and_rm_group, async_rm, batched_async_rm)
}


def replaced(name: str) -> Hook | None:
    """Returns the function that a plug-in has assigned to this module's `name`, or None.

    slime's plug-ins, and their tests, replace these functions. Theirs get `args`, and ours get the context.
    """
    function: Hook = globals()[name]
    return None if function is _OWN[name] else function
