"""Provides the flags and samples from which tests make a rollout's training data."""

from __future__ import annotations

from types import SimpleNamespace

from slime.config.hook_calls import Hooks
from slime.config.schema import Config
from slime.config.sections.megatron import MegatronConfig
from slime.types import Sample


def make_args(**flags) -> SimpleNamespace:
    defaults = {
        **vars(MegatronConfig()),
        "custom_reward_post_process_path": None,
        "custom_convert_samples_to_train_data_path": None,
        "advantage_estimator": "grpo",
        "disable_rewards_normalization": False,
        "disable_grpo_std_normalization": False,
        "reward_key": None,
        "loss_type": "policy_loss",
        "global_batch_size": 4,
        "use_dynamic_batch_size": False,
        "micro_batch_size": 1,
        "max_tokens_per_gpu": None,
        "context_parallel_size": 1,
        "balance_data": False,
        "balance_by_flops": False,
        "use_rollout_routing_replay": False,
        "use_score_centering": False,
        "score_centering_top_k": 128,
    }
    assert set(flags) <= set(defaults)
    return SimpleNamespace(**{**defaults, **flags})


def border(**flags) -> tuple[Config, Hooks]:
    """Returns the configuration with these flags, and its user functions."""
    config = Config.from_args(make_args(**flags))
    return config, Hooks(config)


def sample(index: int, group: int | None, reward: float | None, response: int = 2, **fields) -> Sample:
    values = {
        "tokens": [index, *range(1, response + 2)],  # two prompt tokens; the first identifies the sample
        "rollout_log_probs": [-0.5] * response,
        "status": Sample.Status.COMPLETED,
    }
    return Sample(
        **{
            "index": index,
            "group_index": group,
            "reward": reward,
            "response_length": response,
            **values,
            **fields,
        }
    )


def four(**fields) -> list[Sample]:
    return [sample(i, i // 2, r, **fields) for i, r in enumerate([1.0, 0.0, 3.0, 5.0])]
