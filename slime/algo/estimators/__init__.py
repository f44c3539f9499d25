"""The advantage estimators: one file each, or one for close relatives, and a line in ESTIMATORS."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.algo.estimators.cispo import CISPO
from slime.algo.estimators.grpo import GRPO
from slime.algo.estimators.grpo_turn import GRPO_TURN
from slime.algo.estimators.gspo import GSPO
from slime.algo.estimators.pass_at_k import PASS_AT_K
from slime.algo.estimators.ppo import PPO
from slime.algo.estimators.record import Estimator, Response, same_for_all_tokens
from slime.algo.estimators.reinforce_plus_plus import REINFORCE_PLUS_PLUS, REINFORCE_PLUS_PLUS_BASELINE
from slime.algo.estimators.rloo import RLOO
from slime.algo.surrogates import CENTRED, SURROGATES, Surrogate
from slime.config.peer_names import instead
from slime.records.errors import FlagError

if TYPE_CHECKING:
    from slime.config.sections.algorithm import AlgorithmConfig

ESTIMATORS: dict[str, Estimator] = {
    record.name: record
    for record in (
        GRPO,
        GRPO_TURN,
        GSPO,
        CISPO,
        REINFORCE_PLUS_PLUS,
        REINFORCE_PLUS_PLUS_BASELINE,
        RLOO,
        PASS_AT_K,
        PPO,
    )
}


def estimator_for(algorithm: AlgorithmConfig) -> Estimator:
    """Returns the record that --advantage-estimator names."""
    if algorithm.advantage_estimator not in ESTIMATORS:
        raise FlagError(
            "--advantage-estimator",
            f"be one of {', '.join(ESTIMATORS)}",
            f"{algorithm.advantage_estimator}"
            f"{instead('advantage_estimator', algorithm.advantage_estimator, ESTIMATORS)}",
        )
    return ESTIMATORS[algorithm.advantage_estimator]


def surrogate_for(algorithm: AlgorithmConfig) -> Surrogate:
    """Returns the record of the policy loss: CENTRED with --use-score-centering, else the record that --pg-loss-type
    names, else the one of the estimator."""
    if algorithm.use_score_centering:
        return CENTRED
    if algorithm.pg_loss_type is None:
        return estimator_for(algorithm).surrogate
    if algorithm.pg_loss_type not in SURROGATES:
        raise FlagError(
            "--pg-loss-type",
            f"be one of {', '.join(SURROGATES)}",
            f"{algorithm.pg_loss_type}{instead('pg_loss_type', algorithm.pg_loss_type, SURROGATES)}",
        )
    return SURROGATES[algorithm.pg_loss_type]


__all__ = [
    "ESTIMATORS",
    "Estimator",
    "Response",
    "estimator_for",
    "same_for_all_tokens",
    "surrogate_for",
]
