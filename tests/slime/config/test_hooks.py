"""User functions in a process share one flat `args`, and the configuration sees their changes."""

from __future__ import annotations

import copy
import pickle
from argparse import Namespace
from typing import Any

import pytest

from slime.config.hook_calls import Hooks
from slime.config.schema import Config

INIT, STEP = "custom_megatron_init_path", "custom_megatron_before_train_step_hook_path"


def leaves_a_value(args: Namespace) -> None:
    args.mine = ["init"]


def reads_it(args: Namespace, step: int) -> tuple[Namespace, int]:
    args.mine.append(step)
    return args, step


def anneals(args: Namespace) -> None:
    args.entropy_coef, args.rewards_of = 0.25, "not a flag"
    args.apply_chat_template_kwargs["x"] = 1


def config_of(**fields: Any) -> Config:
    return Config.from_flat(fields)


def test_all_functions_get_the_same_args_with_the_facts_of_the_process() -> None:
    paths = {INIT: f"{__name__}.leaves_a_value", STEP: f"{__name__}.reads_it"}
    hooks = Hooks(config_of(**paths), sglang_router_ip="10.0.0.1")
    assert hooks.call(INIT) is None
    args, step = hooks.call(STEP, 3)
    assert step == 3 and args.mine == ["init", 3] and args is hooks.args
    assert args.sglang_router_ip == "10.0.0.1" and args.eps_clip == 0.2


def test_the_configuration_has_a_changed_flag() -> None:
    config = config_of(**{INIT: f"{__name__}.anneals"}, kl_coef=0.5, lambd=0.75)
    hooks = Hooks(config)
    assert hooks.config is config and hooks.call(STEP) is None and hooks.config is config
    hooks.call(INIT)
    found = hooks.config
    assert found == config.with_values(entropy_coef=0.25, apply_chat_template_kwargs={"x": 1})
    assert found.critic.lambd == 0.75 and config.algorithm.entropy_coef == 0
    assert config.data.apply_chat_template_kwargs == {}
    hooks.args.kl_coef = 0.0  # a function that kept `args` does this
    assert hooks.config.algorithm.kl_coef == 0 and hooks.config is hooks.config


def test_a_function_may_change_which_function_is_called() -> None:
    hooks = Hooks(config_of())
    assert hooks.call(INIT) is None
    setattr(hooks.args, INIT, f"{__name__}.leaves_a_value")
    hooks.call(INIT)
    assert hooks.args.mine == ["init"]


def test_code_that_was_written_for_args_learns_the_section() -> None:
    """The error is for code such as an estimator in a fork, which reads `args.eps_clip`."""
    config: Any = config_of()
    with pytest.raises(
        AttributeError, match="through its section, got eps_clip of a Config; read algorithm.eps_clip"
    ):
        _ = config.eps_clip
    with pytest.raises(AttributeError, match="'Config' object has no attribute 'eps_clop'"):
        _ = config.eps_clop
    assert not hasattr(config, "lambd") and config.critic.lambd == 1.0
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config


def test_args_and_sections_hold_the_same_values() -> None:
    config = config_of(eps_clip_high=0.3, rollout_num_gpus=4, custom_delta_pre_push_path="a.b")
    assert Config.from_args(config.namespace()) == config
