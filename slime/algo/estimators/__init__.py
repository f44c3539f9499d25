"""The advantage estimators: one file each, or one for close relatives, and a line in ESTIMATORS."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from slime.algo.estimators.cispo import CISPO
from slime.algo.estimators.grpo import GRPO
from slime.algo.estimators.gspo import GSPO
from slime.algo.estimators.ppo import PPO
from slime.algo.estimators.record import CLIPPED, Estimator, Response, Surrogate, same_for_all_tokens
from slime.algo.estimators.reinforce_plus_plus import REINFORCE_PLUS_PLUS, REINFORCE_PLUS_PLUS_BASELINE

if TYPE_CHECKING:
    from slime.config.sections.algorithm import AlgorithmConfig

ESTIMATORS: dict[str, Estimator] = {
    record.name: record
    for record in (
        GRPO,
        GSPO,
        CISPO,
        REINFORCE_PLUS_PLUS,
        REINFORCE_PLUS_PLUS_BASELINE,
        PPO,
    )
}


def estimator_of(args: Namespace | AlgorithmConfig) -> Estimator:
    """The record that --advantage-estimator names, of a configuration or a hook's namespace."""
    if args.advantage_estimator not in ESTIMATORS:
        raise ValueError(
            f"--advantage-estimator must be one of {', '.join(ESTIMATORS)}, got {args.advantage_estimator}"
        )
    return ESTIMATORS[args.advantage_estimator]


__all__ = [
    "CLIPPED",
    "ESTIMATORS",
    "Estimator",
    "Response",
    "Surrogate",
    "estimator_of",
    "same_for_all_tokens",
]
