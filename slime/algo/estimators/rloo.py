"""RLOO (2402.14740) takes the mean reward of the group's other answers as the baseline of an answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from slime.algo.estimators.record import Estimator, Response, same_for_all_tokens
from slime.algo.surrogates import CLIPPED
from slime.records.errors import FlagError

if TYPE_CHECKING:
    from torch import Tensor

    from slime.config.schema import Config


def _less_the_others(c: Config, response: Response) -> tuple[Tensor, Tensor]:
    """Returns `A_t = r_i - mean(r_j, j != i) = n / (n - 1) * (r_i - mean(r))` as fp32, for n rollouts in the group."""
    rollouts = len(response.columns["group_rewards"])
    if rollouts < 2:
        raise FlagError(
            "--advantage-estimator rloo",
            "have at least 2 rollouts in each group",
            "1",
            "the baseline of an answer is the mean of the other answers: raise "
            "--n-samples-per-prompt, or keep whole groups in your hooks",
        )
    return same_for_all_tokens(c, replace(response, reward=response.reward * rollouts / (rollouts - 1)))


def _centred(c: Config) -> None:
    if c.algorithm.disable_rewards_normalization:
        raise FlagError(
            "--disable-rewards-normalization",
            "be left out with --advantage-estimator rloo",
            "both",
            "the mean of the other answers is its baseline",
        )


RLOO = Estimator(
    "rloo",
    "`A_t = n / (n - 1) r`, which is the reward less the mean of the other answers",
    CLIPPED,
    _less_the_others,
    group="mean",
    reads=frozenset({"group_rewards"}),
    source="2402.14740",
    aliases=("rloo_vectorized",),
    example="examples/rloo",
    checks=(_centred,),
)
