"""Existing slime scripts import this module for rollouts that overlap training.

With `train_async.py` or `--max-staleness`, the default rollout function generates without pause, so this module exports
the default function.
"""

from slime.rollout.vllm_rollout import generate_rollout
from slime.rollout.vllm_rollout import generate_rollout as generate_rollout_fully_async
from slime.system.upstream import refused_names

__all__ = ["generate_rollout", "generate_rollout_fully_async"]
__getattr__ = refused_names("slime.rollout.fully_async_rollout")
