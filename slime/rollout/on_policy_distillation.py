"""Import path of slime scripts for on-policy distillation, which comes with a later version."""

from __future__ import annotations

from argparse import Namespace
from typing import NoReturn

_LATER = "must not be used yet, got a call; on-policy distillation is not supported, write a --custom-rm-path instead"


async def reward_func(args: Namespace, sample: object, **kwargs: object) -> NoReturn:
    """ValueError."""
    raise ValueError(f"slime.rollout.on_policy_distillation.reward_func {_LATER}")


def post_process_rewards(args: Namespace, samples: object, **kwargs: object) -> NoReturn:
    """ValueError."""
    raise ValueError(f"slime.rollout.on_policy_distillation.post_process_rewards {_LATER}")
