"""Functions of users are called with their flags' arguments: a wrong signature is an error before anything starts."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from slime.config.hook_calls import CALLS, check_call
from slime.hooks import load_function
from slime.rules.flags import own_flags


def good(args, sample, **kwargs): ...
async def waits(args, sample): ...
def more(args, sample, limit=3): ...
def anything(*args, **kwargs): ...
def other_names(a, b): ...
def trl(completions, **kwargs): ...
def trl_of_two(prompts, completions, **kwargs): ...
async def trl_async(prompts, completions, answer, **kwargs): ...
def verl(data_source, solution_str, ground_truth, extra_info=None): ...
def verl_batch(data_sources, solution_strs, ground_truths, extra_infos): ...
def openrlhf(queries, prompts, labels): ...
def one(args): ...
def three(args, sample, label): ...
def swapped(sample, args): ...
def named(args, sample, *, label): ...
def log(rollout_id, args, samples, metrics, seconds): ...
def log_swapped(args, rollout_id, samples, metrics, seconds): ...
async def async_filter(args, samples): ...
def filter_with_more(args, samples, **kwargs): ...
def no_evaluation(args, rollout_id, data_source): ...
def rollout(args, rollout_id, data_buffer, evaluation=False): ...
def tis(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs): ...
def tis_by_place(a, b, c): ...


class Source:
    def __init__(self, args, extra=None): ...


class WrongSource:
    def __init__(self): ...


class Callable:
    def __call__(self, args, sample): ...


of_object, partial = Callable(), functools.partial(three, label=1)
HERE = __name__

FINE = [
    *[
        ("custom_rm_path", name)
        for name in ("good", "waits", "more", "anything", "other_names", "of_object", "partial")
    ],
    *[
        ("custom_rm_path", name)
        for name in ("trl", "trl_of_two", "trl_async", "verl", "verl_batch", "openrlhf")
    ],
    ("custom_rollout_log_function_path", "log"),
    ("dynamic_sampling_filter_path", "filter_with_more"),
    ("rollout_function_path", "rollout"),
    ("custom_tis_function_path", "tis"),
    ("data_source_path", "Source"),
    ("custom_generate_function_path", "log_free"),
]
WRONG = [
    (
        "custom_rm_path",
        "one",
        r"can be called as f\(args, sample\), got .*one\(args\): too many positional arguments",
    ),
    ("custom_rm_path", "three", "missing a required argument: 'label'"),
    ("custom_rm_path", "named", "missing a required.* argument: 'label'"),
    ("custom_rm_path", "swapped", "(args must be parameter 1|sample must be parameter 2)"),
    ("custom_rollout_log_function_path", "log_swapped", "args must be parameter 2"),
    ("dynamic_sampling_filter_path", "async_filter", "must name a plain function, got the async function"),
    ("rollout_function_path", "no_evaluation", "got an unexpected keyword argument 'evaluation'"),
    ("custom_tis_function_path", "tis_by_place", r"called as f\(args=\.\.\., pg_loss=\.\.\., "),
    ("data_source_path", "WrongSource", "too many positional arguments"),
    ("custom_reward_post_process_path", "three", "missing a required argument"),
]


def log_free(args, sample, sampling_params, evaluation=False): ...


def check(name: str, function: str) -> None:
    path = f"{HERE}.{function}"
    check_call(f"--{name}", path, load_function(path), CALLS[name], scores=name == "custom_rm_path")


def test_every_flag_with_a_function_has_its_call() -> None:
    flags = {name for name in own_flags() if name.endswith("_path")} - {"custom_config_path"}
    assert set(CALLS) == flags | {"selected_logprob_provider"}


@pytest.mark.parametrize(("name", "function"), FINE)
def test_functions_that_can_be_called(name: str, function: str) -> None:
    check(name, function)


@pytest.mark.parametrize(("name", "function", "message"), WRONG)
def test_functions_that_cannot_be_called(name: str, function: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        check(name, function)
    assert str(error.value).startswith(f"--{name} must name a ")


def test_a_function_without_a_signature_is_taken() -> None:
    check_call("--x", "builtins.max", max, CALLS["custom_rm_path"])


def test_shipped_functions_fit_their_flags() -> None:
    shipped: dict[str, list[Any]] = {
        "rollout_function_path": [
            "slime.rollout.sglang_rollout.generate_rollout",
            "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
            "slime.rollout.sft_rollout.generate_rollout",
            "slime.rollout.sft_rollout.generate_pairs",
        ],
        "custom_generate_function_path": ["slime.rollout.sglang_rollout.generate"],
        "custom_rm_path": ["slime.rollout.on_policy_distillation.reward_func"],
        "dynamic_sampling_filter_path": [
            "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
        ],
        "data_source_path": ["slime.rollout.data_source.RolloutDataSourceWithBuffer"],
        "custom_tis_function_path": ["slime.backends.megatron_utils.loss.icepop_function"],
    }
    for name, paths in shipped.items():
        for path in paths:
            check_call(name, path, load_function(path), CALLS[name], scores=name == "custom_rm_path")
