"""Defines how a run calls the function of each flag that takes one and the `args` of the function, and checks that a
function fits its call.

A reward may have the form of another trainer (`slime.config.foreign_rewards`). Each hook is one line.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slime.config.fields import spelled
from slime.config.foreign_rewards import is_foreign, read_parameters
from slime.config.schema import Config
from slime.hooks import load_function
from slime.records.errors import FlagError


@dataclass(frozen=True)
class Call:
    """Describes one call of a user's function."""

    positional: str
    """Names of its positional arguments, separated by spaces."""
    keywords: str = ""
    """Arguments that are always passed by name."""
    optional: str = ""
    """Arguments that are passed by name if the function accepts them."""
    may_wait: bool = False
    """True if the function may be async."""
    may_be_class: bool = False

    @property
    def shown(self) -> str:
        names = ", ".join(self.positional.split())
        named = [f"{name}=..." for name in (*self.keywords.split(), *self.optional.split())]
        return f"({', '.join(filter(None, [names, *named]))})"


_ROLLOUT = Call("args rollout_id data_source", keywords="evaluation")
_WRITTEN = Call("args version_dir rollout_engines")
CALLS: Mapping[str, Call] = {
    "rollout_function_path": _ROLLOUT,
    "eval_function_path": _ROLLOUT,
    "data_source_path": Call("args", may_be_class=True),
    "custom_generate_function_path": Call(
        "args sample sampling_params", optional="evaluation", may_wait=True
    ),
    "rollout_sample_hook_path": Call("args sample", optional="rollout_id evaluation", may_wait=True),
    "custom_rm_path": Call("args sample", may_wait=True),
    "dynamic_sampling_filter_path": Call("args samples"),
    "rollout_sample_filter_path": Call("args groups"),
    "rollout_all_samples_process_path": Call("args all_samples data_source"),
    "buffer_filter_path": Call("args rollout_id buffer num_samples"),
    "custom_rollout_log_function_path": Call("rollout_id args samples metrics rollout_time"),
    "custom_eval_rollout_log_function_path": Call("rollout_id args data metrics"),
    "custom_reward_post_process_path": Call("args samples"),
    "custom_convert_samples_to_train_data_path": Call("args samples"),
    "rollout_data_postprocess_path": Call("args rollout_id rollout_data"),
    "custom_advantage_function_path": Call("args rollout_data"),
    "custom_loss_function_path": Call("args batch logits sum_of_sample_mean"),
    "custom_pg_loss_reducer_function_path": Call(
        "total_lengths response_lengths loss_masks calculate_per_token_loss"
    ),
    "custom_tis_function_path": Call(
        "",
        keywords="args pg_loss train_log_probs rollout_log_probs loss_masks total_lengths response_lengths",
    ),
    "custom_megatron_init_path": Call("args"),
    "custom_megatron_before_log_prob_hook_path": Call("args model store_prefix"),
    "custom_megatron_before_train_step_hook_path": Call(
        "args rollout_id step_id model optimizer opt_param_scheduler"
    ),
    "custom_update_weight_post_write_path": _WRITTEN,
    "custom_delta_pre_push_path": _WRITTEN,
    "selected_logprob_provider": Call("request"),
}
"""Maps the field of a flag to the call of its function."""


class Hooks:
    """Calls the user's functions in one process, with the same flat `args`.

    `args` are built once, with the run-time values `facts` (see `Config.namespace`). A function may leave values in
    them for the next function, and may change a flag: `config` has the changed value.
    """

    def __init__(self, config: Config, **facts: object) -> None:
        self._config, self._facts = config, facts
        self._args: Namespace | None = None
        self._args_passed = False

    @property
    def args(self) -> Namespace:
        """Returns the flat `args`. The next read of `config` searches them for flags that the caller has changed."""
        if self._args is None:
            self._args = self._config.namespace(**self._facts)
        self._args_passed = True
        return self._args

    @property
    def config(self) -> Config:
        """Returns the configuration, with the values that functions of the user have set in `args`."""
        if self._args_passed:
            self._config, self._args_passed = Config.from_args(self._args), False
        return self._config

    def call(self, name: str, *inputs: object) -> Any:
        """Calls the function of the flag with the field `name` as f(args, *inputs), and returns its result. Returns
        None if the flag names no function."""
        path = self._config.get_value(name) if self._args is None else getattr(self._args, name)
        return load_function(path, flag=spelled(name))(self.args, *inputs) if path else None


def check_call(
    flag: str,
    path: str,
    function: Callable[..., object],
    call: Call,
    *,
    scores: bool = False,
) -> None:
    """Raises ValueError if `function` does not fit `call`.

    `flag` is spelled as the user typed it. `scores` means that the function is a reward, which may have been written
    for another trainer.
    """
    if inspect.isclass(function) and not call.may_be_class:
        raise FlagError(
            flag,
            "name a function",
            f"the class {path}",
            "name a function of the module that makes an object of the class, or set a name of "
            "the module to such an object",
        )
    parameters = read_parameters(function)
    if parameters is None:
        return
    if scores and is_foreign(function):
        return  # `slime.rollout.rewards` calls it as the other trainer does
    shown = f"{path}{inspect.Signature(list(parameters.values()))}"
    problem = _misfit(parameters, call)
    if problem is not None:
        raise FlagError(
            flag,
            f"name a function that can be called as f{call.shown}",
            f"{shown}: {problem}",
            "change its parameters (docs/hooks.md)",
        )
    if inspect.iscoroutinefunction(function) and not call.may_wait:
        raise FlagError(
            flag,
            "name a plain function",
            f"the async function {shown}, whose result nobody awaits",
            "take the word async away",
        )


def _misfit(parameters: Mapping[str, inspect.Parameter], call: Call) -> str | None:
    """Returns why the call would fail, or would pass `args` to another parameter, or None."""
    positional, keywords = call.positional.split(), call.keywords.split()
    optional = [name for name in call.optional.split() if name in parameters]
    try:
        inspect.Signature(list(parameters.values())).bind(
            *(None for _ in positional), **dict.fromkeys([*keywords, *optional])
        )
    except TypeError as error:
        return str(error)
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    placed = [name for name, one in parameters.items() if one.kind in by_position]
    for name in {"args", "sample", "samples"} & set(placed[: len(positional)]) & set(positional):
        if placed.index(name) != positional.index(name):
            return f"{name} must be parameter {positional.index(name) + 1}"
    return None
