"""This package computes rewards. `--rm-type` selects a reward, and each reward has its own file.

This file owns the selection, custom functions and their errors. A rule-based reward is a plain function
`(response, label, metadata) -> float | dict`. A new reward is one file and one entry in REWARDS. Rule-based rewards run
in threads, so they do not block the event loop of generation.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import functools
import inspect
import logging
import numbers
import os
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import numpy as np

from slime.config.foreign_rewards import RewardColumns, adapted
from slime.config.schema import Config
from slime.config.sections.reward import RewardConfig, is_hook, part_name, reward_names
from slime.event_loop import call_in_thread, loop_objects
from slime.hooks import Hook, load_function
from slime.records.errors import FlagError
from slime.rollout.context import RunContext, find_context
from slime.rollout.rewards.dapo import dapo_reward
from slime.rollout.rewards.deepscaler import deepscaler_reward
from slime.rollout.rewards.f1 import f1_reward
from slime.rollout.rewards.gpqa import gpqa_reward
from slime.rollout.rewards.gsm8k import gsm8k_reward
from slime.rollout.rewards.ifbench import ifbench_reward
from slime.rollout.rewards.math_boxed import math_reward
from slime.rollout.rewards.remote import remote_reward
from slime.rollout.rewards.several import add
from slime.rollout.rewards.special_tokens import answer_text, plain_text
from slime.rollout.rewards.text import extract_answer, without_special_text
from slime.rollout.rewards.ungraded import random_reward, zero_reward
from slime.rollout.rewards.unit_tests import code_reward
from slime.types import Metadata, Reward, Sample
from slime.user_code import calling, find_location, is_cancelled, remedy, slow_is_logged

logger = logging.getLogger(__name__)

_OF_TEXT = (ValueError, TypeError, ArithmeticError, LookupError, RecursionError, MemoryError)
"""Errors that a grader may raise for an unexpected text."""
_SHOWN = 150
"""Number of characters that an error shows from the beginning, and from the end, of a response."""
_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""Number of graders that run concurrently. It equals asyncio's default number of threads."""

REWARDS: dict[str, Callable[[str, object, Metadata], Reward]] = {
    "math": math_reward,
    "deepscaler": deepscaler_reward,
    "dapo": dapo_reward,
    "gsm8k": gsm8k_reward,
    "gpqa": gpqa_reward,
    "f1": f1_reward,
    "ifbench": ifbench_reward,
}
SAMPLE_REWARDS: dict[str, Callable[[Config, Sample], Awaitable[Reward]]] = {
    "code": code_reward,
    "random": random_reward,
    "remote_rm": remote_reward,
    "zero": zero_reward,
}
REWARD_NAMES = (*REWARDS, *(f"boxed_{name}" for name in REWARDS), *SAMPLE_REWARDS)

# The reward boxed_X reads only the last boxed answer, and writes it in the form that reward X reads.
_ANSWER_FORM = {"math": "\\boxed{{{}}}", "deepscaler": "</think>\\boxed{{{}}}", "dapo": "Answer: {}"}


async def async_rm(args: Namespace, sample: Sample, **kwargs: object) -> Reward:
    """Returns the reward of a sample. Does not set `sample.reward`.

    The first setting that is present selects the reward: `sample.custom_rm_path`, `--custom-rm-path` (each `(args,
    sample, **kwargs) -> float | dict`, async or plain; a plain function runs in a thread),
    `sample.metadata["rm_type"]`, `--rm-type`. A type with several names is their weighted sum, see `several`. Raises
    ValueError for wrong settings, labels and reward values, and after --reward-deadline-s. Raises RuntimeError,
    chained, for any other error of the reward, including SystemExit. Every error names the sample.
    """
    return await score(find_context(args), sample, **kwargs)


async def score(context: RunContext, sample: Sample, **kwargs: object) -> Reward:
    """Returns the reward of a sample, see `async_rm`."""
    flags, limit = context.config.reward, context.config.reward.reward_deadline_s
    path = sample.custom_rm_path or flags.custom_rm_path
    if path:
        flag = "custom_rm_path of the sample" if sample.custom_rm_path else "--custom-rm-path"
        function = _reward(context, path, flag)
        async with _scoring(limit, sample, path) as clock:
            return _checked(
                flags, await _call(clock, f"{flag} {path}", function, context.hook_args, sample, **kwargs)
            )
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    wanted, flag = metadata.get("rm_type"), "metadata rm_type"
    if not wanted:
        wanted, flag = flags.rm_type, "--rm-type"
    names = reward_names(wanted)
    with _naming(sample, wanted):
        check_names(names, flag)
    if len(names) == 1:
        return await _one(context, sample, names[0], **kwargs)
    rewards = await asyncio.gather(*(_one(context, sample, name, **kwargs) for name in names))
    with _naming(sample, wanted):
        return add(flags, sample, dict(zip(names, rewards, strict=True)))


def _reward(context: RunContext, path: str, flag: str) -> Hook:
    """Returns the user's reward, called as f(args, sample). It may have the form of another trainer."""
    function, data = load_function(path, flag), context.config.data
    made = adapted(function, RewardColumns(data.input_key, data.label_key))
    if made is function:
        return made
    tokenizer = None if context.state is None else context.state.tokenizer
    return functools.partial(made, plain_text=functools.partial(plain_text, tokenizer=tokenizer))


async def _one(context: RunContext, sample: Sample, name: str, **kwargs: object) -> Reward:
    """Returns the reward `name` of --rm-type. The name is a built-in reward, or the path of a user's function."""
    flags, limit = context.config.reward, context.config.reward.reward_deadline_s
    if is_hook(name):
        function = _reward(context, name, "--rm-type")
        async with _scoring(limit, sample, name) as clock:
            return _checked(
                flags, await _call(clock, f"--rm-type {name}", function, context.hook_args, sample, **kwargs)
            )
    if name in SAMPLE_REWARDS:
        async with _scoring(limit, sample, name):
            return _checked(flags, await SAMPLE_REWARDS[name](context.config, sample))
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    with _naming(sample, name):
        tokenizer = None if context.state is None else context.state.tokenizer
        stop = context.config.rollout.rollout_stop_token_ids
        text = functools.partial(answer_text, sample, tokenizer, stop)
        return _checked(flags, await _graded(limit, text, sample, name, metadata))


async def _graded(
    limit: float | None, text: Callable[[], str], sample: Sample, name: str, metadata: Metadata
) -> Reward:
    """Computes the reward of a rule-based grader in a thread. If grading takes longer than --reward-deadline-s, the
    response counts as a response without an answer, because a response must not end the run. The time starts with the
    thread."""
    grade = functools.partial(_rule_based, text, sample.label, name, metadata)
    slots = loop_objects().semaphore(_graded, _THREADS)
    where, clock = (
        f"reward {name} for sample {sample.index} of group {sample.group_index}",
        asyncio.timeout(limit),
    )
    async with slots:
        try:
            with slow_is_logged(where, limit):
                async with clock:
                    return await call_in_thread(grade)
        except TimeoutError:
            if not clock.expired():
                raise
    logger.warning(
        "%s needs more than --reward-deadline-s %s; the response counts as no answer", where, limit
    )
    return await asyncio.to_thread(_rule_based, str, sample.label, name, metadata)


def _rule_based(text: Callable[[], str], label: object, name: str, metadata: Metadata) -> Reward:
    """Computes the reward `name`. `text` returns the response without the tokenizer's special tokens."""
    response, base = text(), name.removeprefix("boxed_")
    try:
        if base != name:
            answer = extract_answer(without_special_text(response))
            response = "" if answer is None else _ANSWER_FORM.get(base, "{}").format(" ".join(answer.split()))
        return REWARDS[base](response, label, metadata)
    except _OF_TEXT as error:
        reward = REWARDS[base]("", label, metadata)  # raises the error of a label that the reward cannot use
        logger.warning("reward %s counts %.80r as no answer, because of %r", name, response, error)
        return reward


async def batched_async_rm(args: Namespace, samples: list[Sample], **kwargs: object) -> list[Reward]:
    """Returns the rewards of several samples (a group with `--group-rm`), in order.

    `--custom-rm-path` is called once: `(args, samples, **kwargs) -> list`, one reward per sample. `async_rm`
    scores samples with their own `custom_rm_path`, and samples without any custom function, individually.
    """
    return await score_together(find_context(args), samples, **kwargs)


async def score_together(context: RunContext, samples: list[Sample], **kwargs: object) -> list[Reward]:
    """Returns the rewards of several samples in order, see `batched_async_rm`."""
    flags = context.config.reward
    path = flags.custom_rm_path or ""
    batch = [sample for sample in samples if path and not sample.custom_rm_path]
    single = [sample for sample in samples if not path or sample.custom_rm_path]
    rewards: dict[int, Reward] = {}
    if batch:
        function = _reward(context, path, "--custom-rm-path")
        async with _scoring(
            flags.reward_deadline_s, batch[0], path, of=f"the {len(batch)} samples from "
        ) as clock:
            values = await _call(
                clock, f"--custom-rm-path {path}", function, context.hook_args, batch, **kwargs
            )
            if not isinstance(values, list | tuple) or len(values) != len(batch):
                got = f"{len(values)}" if isinstance(values, list | tuple) else f"a {type(values).__name__}"
                raise ValueError(f"a batched reward must return a list of {len(batch)} rewards, got {got}")
        for sample, value in zip(batch, values, strict=True):
            with _naming(sample, path):
                rewards[id(sample)] = _checked(flags, value)
    values = await asyncio.gather(*(score(context, sample, **kwargs) for sample in single))
    rewards.update((id(sample), value) for sample, value in zip(single, values, strict=True))
    return [rewards[id(sample)] for sample in samples]


async def _call(
    clock: asyncio.Timeout, named: str, function: Hook, *arguments: object, **kwargs: object
) -> object:
    """Runs an async function in this loop, and a plain function in a thread, so that it cannot block generation. The
    time of a plain function starts with its thread: it does not fail because others occupy all threads.

    `named` is the function's flag and path.
    """
    if inspect.iscoroutinefunction(function):
        with calling(named):
            return await function(*arguments, **kwargs)
    loop = asyncio.get_running_loop()
    seconds = None if (end := clock.when()) is None else end - loop.time()
    clock.reschedule(None)
    result = await call_in_thread(
        functools.partial(function, *arguments, **kwargs),
        begins=lambda: clock.reschedule(None if seconds is None else loop.time() + seconds),
    )
    return await result if inspect.isawaitable(result) else result


def _checked(flags: RewardConfig, reward: object) -> Reward:
    """Returns a number as float, or a dict whose `--reward-key` entry is a number. The caller that sets a sample's
    reward removes NaN from training (`finite.remove_unless_finite`)."""
    value: object = reward.get(flags.reward_key, 0.0) if isinstance(reward, dict) else reward
    if not isinstance(value, numbers.Real | np.bool_):
        kind = type(value).__name__
        raise ValueError(
            f"a reward must be a number or a dict of numbers, got {value!r} of type {kind}; return a float"
        )
    return reward if isinstance(reward, dict) else float(value)


@contextlib.asynccontextmanager
async def _scoring(
    limit: float | None, sample: Sample, name: object, of: str = ""
) -> AsyncIterator[asyncio.Timeout]:
    """Enforces --reward-deadline-s, logs slow rewards, and names the sample in each error."""
    where = f"{of}sample {sample.index} of group {sample.group_index}"
    clock = asyncio.timeout(limit)
    with _naming(sample, name, of):
        try:
            with slow_is_logged(f"reward {name} for {where}", limit):
                async with clock:
                    yield clock
        except TimeoutError as error:
            if not clock.expired():
                raise
            raise LateRewardError(
                f"it must return within --reward-deadline-s, got no reward in {limit:g} s; mend it or raise the limit"
            ) from error


class LateRewardError(ValueError):
    """A reward has not returned in time."""

    failed_sample = "reward_deadline"


class RewardError(Exception):
    """An error of a reward for a sample. `problem` is the message without the reward and the sample."""

    def __init__(self, text: str, problem: str) -> None:
        super().__init__(text, problem)
        self.problem = problem

    def __str__(self) -> str:
        return str(self.args[0])


class WrongReward(RewardError, ValueError):
    """The reward raised ValueError."""


class FailedReward(RewardError, RuntimeError):
    """The reward raised another error."""


@contextlib.contextmanager
def _naming(sample: Sample, name: object, of: str = "") -> Iterator[None]:
    """Adds the sample and the reward's name to the error of a block with reward code, which may raise any error."""
    try:
        yield
    except BaseException as error:
        if is_cancelled(error):
            raise
        kind = WrongReward if isinstance(error, ValueError) else FailedReward
        where = f"{of}sample {sample.index} of group {sample.group_index}"
        seen = [f"at {found}"] if (found := find_location(error)) else []
        if not of:
            seen += [f"label {sample.label!r:.200}", f"response {_shortened(sample.response)}"]
        shown = f" ({', '.join(seen)})" if seen else ""
        problem = describe_problem(error)
        raise kind(f"reward {name} failed for {where}: {problem}{shown}", problem) from error


def describe_problem(error: BaseException) -> str:
    """Returns the message of a reward's error, with the remedy that the reward's environment has added."""
    what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return f"{what}{remedy(error)}"


def _shortened(response: str) -> str:
    """Returns the beginning and the end of a response on a single line."""
    if len(response) <= 2 * _SHOWN:
        return repr(response)
    return f"{response[:_SHOWN]!r} ... {response[-_SHOWN:]!r}"


def check_flags(flags: RewardConfig) -> None:
    """Raises ValueError for a wrong --rm-type or --rm-weights, and for a missing flag that the reward needs."""
    names, weights = reward_names(flags.rm_type), flags.rm_weights
    if weights is not None and (len(weights) != len(names) or len(names) < 2):
        raise FlagError(
            "--rm-weights",
            "have a weight for each of several rewards of --rm-type",
            f"{len(weights)} for {len(names)}",
            "give as many, or leave it out",
        )
    check_names(names, "--rm-type")
    if "remote_rm" in names and flags.rm_url is None:
        raise FlagError("--rm-url", "be given with --rm-type remote_rm", "none")
    records = [name for name in names if name.removeprefix("boxed_") == "dapo"]
    if len(names) > 1 and records and flags.reward_key is None and flags.custom_rm_path is None:
        raise FlagError(
            "--reward-key",
            f"name the entry of reward {records[0]} that is added",
            "none",
            "give --reward-key score",
        )


def check_names(names: list[str], flag: str) -> None:
    """Raises ValueError for a duplicate name, and for a name that is neither a built-in reward nor a function's path.
    `flag` is the source of the names in the message."""
    if not names:
        raise ValueError(unknown_type(None, flag))
    for name in names:
        if is_hook(name):
            load_function(name, flag)
        elif name not in REWARD_NAMES:
            raise ValueError(unknown_type(name, flag))
    parts = [part_name(name) for name in names]
    if twice := sorted({part for part in parts if parts.count(part) > 1}):
        raise FlagError(flag, "name each reward once", f"{', '.join(twice)} more than once", "rename one")


def unknown_type(name: object, flag: str) -> str:
    """Returns the error message for a name that is not a reward. A name of None means that no name was set."""
    known = ", ".join(REWARD_NAMES)
    if name is None:
        return f"--rm-type must be one of {known}, got {name!r}; or name a function with --custom-rm-path"
    near = difflib.get_close_matches(str(name), REWARD_NAMES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "write your own with --custom-rm-path"
    return f"{flag} must be one of {known}, got {name!r}; {hint}"
