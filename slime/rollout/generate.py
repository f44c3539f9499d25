"""Generation of one sample, one with its reward, and a group. Owns seeds, token budgets and status.

A custom generate function (`--custom-generate-function-path`) replaces `generate`; the rest stays.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import inspect
import time
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from slime.hooks import load_function
from slime.protocols import GenerateResult
from slime.rollout.facts import note_sampling
from slime.rollout.rewards import async_rm, batched_async_rm
from slime.rollout.sample_hooks import accepted, apply_rollout_sample_hooks
from slime.rollout.state import GenerateState
from slime.types import Sample, SampleGroup

T = TypeVar("T")

FINISHED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED, Sample.Status.FAILED)
_STATUS = {
    "stop": Sample.Status.COMPLETED,
    "length": Sample.Status.TRUNCATED,
    "abort": Sample.Status.ABORTED,
}


def request_seed(run_seed: int, session_id: str, generated_tokens: int) -> int:
    """Seed of one request: the first 52 bits of sha256(f"{run_seed}/{session_id}/{generated_tokens}").

    `session_id` is "{stream}/{rollout_id}/{sample index}" (see `generate_and_rm_group`), so a run repeats exactly where
    the engine's numbers do not depend on its batch, and no two requests share a seed but by chance. 52 bits survive
    every JSON implementation.
    """
    digest = hashlib.sha256(f"{run_seed}/{session_id}/{generated_tokens}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 12


def rollout_sampling_params(args: Any) -> dict[str, Any]:
    """How training samples are drawn, by the names that generate functions know."""
    return {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
    }


async def run_together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all, in order. When one fails the rest are cancelled first, then its error is raised as
    it is.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in tasks]


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Continue `sample` by one request and fill tokens, response, log-probs, status and weight versions.

    A sample that has a response already goes on after its last token: `max_new_tokens` and
    --rollout-max-context-len bound the whole, and one with nothing left is TRUNCATED without a request. A
    request that passes --rollout-deadline-s leaves the sample ABORTED, with what it had before. ValueError,
    naming the sample, when the prompt leaves no room or the engine refuses it.
    """
    state: GenerateState = args.rollout_state
    assert state.engine is not None, "generation needs an engine"
    if not sample.tokens:
        sample.tokens = state.prompt_ids(sample)
    budget = _token_budget(args, sample, sampling_params)
    if budget <= 0:
        sample.status = Sample.Status.TRUNCATED
        return sample
    experts = {"experts_from": sample.known_experts} if args.use_rollout_routing_replay else {}
    session = sample.session_id or f"sample/0/{sample.index}"
    seed = request_seed(args.rollout_seed, session, sample.response_length)
    note_sampling(args, sample, sampling_params)
    began = time.perf_counter()
    try:
        # The engine keeps the deadline and knows the reason; the margin is for one that never returns.
        async with asyncio.timeout(args.rollout_deadline_s * 1.1 + 0.5):
            result = await state.engine.generate(
                sample.tokens,
                {k: v for k, v in sampling_params.items() if k != "max_context_len"}
                | {"max_new_tokens": budget},
                seed=seed,
                deadline_s=args.rollout_deadline_s,
                **experts,
            )
        _take(sample, result, state, sampling_params)
    except TimeoutError as error:
        state.timed_out[sample.index] = str(error) or "the engine did not answer"
        sample.status = Sample.Status.ABORTED
        return sample
    except ValueError as error:
        raise ValueError(f"sample {sample.index} of group {sample.group_index}: {error}") from error
    state.note_request(time.perf_counter() - began, result)
    return sample


def _token_budget(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> int:
    limits = []
    if sampling_params.get("max_new_tokens") is not None:
        limits.append(sampling_params["max_new_tokens"] - sample.response_length)
    context = sampling_params.get("max_context_len", args.rollout_max_context_len)
    if context is not None:
        prompt_len = len(sample.tokens) - sample.response_length
        if prompt_len >= context:
            raise ValueError(
                f"--rollout-max-context-len must leave room for a response, got {context} for {prompt_len} "
                f"prompt tokens of sample {sample.index} of group {sample.group_index}; "
                "lower --rollout-max-prompt-len"
            )
        limits.append(context - len(sample.tokens))
    if not limits:
        raise ValueError(
            "--rollout-max-response-len must be set, got none; or give --rollout-max-context-len"
        )
    return min(limits)


def _take(sample: Sample, result: GenerateResult, state: GenerateState, params: dict[str, Any]) -> None:
    continued = sample.response_length > 0
    sample.append_response_tokens(result.token_ids, result.log_probs, text=result.text)
    if result.routed_experts is not None:
        sample.append_routed_experts(result.routed_experts)
    if continued and result.token_ids:
        # A character may be split between two requests: only the whole response decodes right.
        skip = bool(params.get("skip_special_tokens"))
        ids = sample.tokens[-sample.response_length :]
        sample.response = str(state.tokenizer.decode(ids, skip_special_tokens=skip))
    for version in result.weight_versions if result.token_ids else []:
        if not sample.weight_versions or sample.weight_versions[-1] != version:
            sample.weight_versions.append(version)
    for name, tokens in (
        ("cached_tokens", result.cached_tokens),
        ("total_prompt_tokens", result.prompt_tokens),
    ):
        sample.prefix_cache_info[name] = sample.prefix_cache_info.get(name, 0) + tokens
    sample.status = _STATUS[result.finish_reason]


async def generate_and_rm(
    args: Any,
    sample: Sample,
    sampling_params: dict[str, Any],
    evaluation: bool = False,
    *,
    rollout_id: int | None = None,
) -> Sample | list[Sample]:
    """Generate (unless finished already), run the sample hooks, and score what has no reward yet.

    A list comes back when a custom generate function fanned out; its siblings share a rollout_id. Aborted
    samples are not scored, and with --group-rm nobody is: see `generate_and_rm_group`.

    In an evaluation `args.use_rollout_routing_replay` is False for all that is called here: nobody trains on its
    samples, and all of them are held at once.
    """
    if evaluation and args.use_rollout_routing_replay:
        args = copy.copy(args)
        args.use_rollout_routing_replay = False
    state: GenerateState = args.rollout_state
    finished = sample.status in FINISHED
    if args.partial_rollout and args.mask_offpolicy_in_partial_rollout and sample.response_length:
        sample.loss_mask = [0] * sample.response_length
        sample.remove_sample = sample.remove_sample or finished  # it still counts in its group's statistics
    result: Sample | list[Sample] = sample
    if not finished:
        async with state.semaphore:
            if state.aborted:
                sample.status = Sample.Status.ABORTED
                return sample
            result = await _generate_one(args, sample, sampling_params, evaluation)
        with _blame("--rollout-sample-hook-path", sample):
            result = await apply_rollout_sample_hooks(
                args, result, rollout_id=rollout_id, evaluation=evaluation
            )
    if args.group_rm:
        return result
    waiting = [s for s in (result if isinstance(result, list) else [result]) if _wants_reward(s)]
    if isinstance(result, list):
        await _score_together(args, waiting)
    elif waiting:
        result.reward = await async_rm(args, result)
    return result


async def generate_and_rm_group(
    args: Any,
    group: SampleGroup,
    sampling_params: dict[str, Any],
    evaluation: bool = False,
    *,
    rollout_id: int | None = None,
    stream: str = "rollout",
) -> SampleGroup:
    """All samples of a group, side by side; fanned-out siblings flattened in place. With --group-rm, scored
    as one.

    Names the random stream of each sample in `session_id`: "{stream}/{rollout_id}/{index}". A sample that
    returns from the buffer keeps the one it has.
    """
    for sample in group:
        if sample.session_id is None:
            sample.session_id = f"{stream}/{rollout_id}/{sample.index}"
    done = await run_together(
        generate_and_rm(args, sample, dict(sampling_params), evaluation, rollout_id=rollout_id)
        for sample in group
    )
    flat = [s for one in done for s in (one if isinstance(one, list) else [one])]
    if args.group_rm and not any(s.status is Sample.Status.ABORTED for s in flat):
        await _score_together(args, [s for s in flat if _wants_reward(s)])
    return flat


async def _generate_one(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> Sample | list[Sample]:
    path = sample.generate_function_path or args.custom_generate_function_path
    if path is None:
        return await generate(args, sample, sampling_params)
    flag = "--custom-generate-function-path"
    function = load_function(path, flag=flag)
    rollout_id, index = sample.rollout_id, sample.index
    with _blame(f"{flag} {path}", sample):
        result = function(args, sample, sampling_params, **accepted(function, evaluation=evaluation))
        if inspect.isawaitable(result):
            result = await result
        if isinstance(result, list):
            if not result or not all(isinstance(s, Sample) for s in result):
                raise ValueError(f"must return samples, got {result!r:.80}")
            for sibling in result:
                sibling.rollout_id = index if rollout_id is None else rollout_id
        elif not isinstance(result, Sample):
            raise ValueError(f"must return a Sample or a list of them, got {type(result).__name__}")
    return result


def _wants_reward(sample: Sample) -> bool:
    return sample.reward is None and sample.status is not Sample.Status.ABORTED


async def _score_together(args: Any, samples: list[Sample]) -> None:
    if not samples:
        return
    for sample, reward in zip(samples, await batched_async_rm(args, samples), strict=True):
        sample.reward = reward


@contextmanager
def _blame(what: str, sample: Sample) -> Iterator[None]:
    """Border with a user's function: whatever it raises names the function and the sample."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(
            f"{what} failed on sample {sample.index} of group {sample.group_index}: "
            f"{type(error).__name__}: {error}"
        ) from error
