"""REINFORCE++ (2501.03262) whitens advantages and has the KL in the reward. Its variant with a baseline subtracts the
mean of the group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.algo.estimators.record import Estimator, Response
from slime.algo.surrogates import CLIPPED
from slime.records.errors import FlagError

if TYPE_CHECKING:
    from torch import Tensor

    from slime.config.schema import Config


def _discounted(c: Config, response: Response) -> tuple[Tensor, Tensor]:
    from slime.algo.returns import discounted_returns

    returns = discounted_returns(
        response.reward, response.mask, response.kl, kl_coef=c.algorithm.kl_coef, gamma=c.algorithm.gamma
    )
    return returns, returns


def _less_kl(c: Config, response: Response) -> tuple[Tensor, Tensor]:
    penalty: Tensor = c.algorithm.kl_coef * response.kl.float()
    returns = response.reward - penalty
    return returns, returns


def _whitened(c: Config) -> None:
    if not c.algorithm.normalize_advantages:
        raise FlagError(
            f"--advantage-estimator {c.algorithm.advantage_estimator}", "be used with --normalize-advantages"
        )


REINFORCE_PLUS_PLUS = Estimator(
    "reinforce_plus_plus",
    "discounted sum over the trained tokens of `-kl_coef * kl_t`, plus `r` at the last of them",
    CLIPPED,
    _discounted,
    flags=frozenset({"kl_coef", "gamma"}),
    source="2501.03262",
    aliases=("reinforce++",),
    checks=(_whitened,),
)
REINFORCE_PLUS_PLUS_BASELINE = Estimator(
    "reinforce_plus_plus_baseline",
    "`A_t = r - kl_coef * kl_t`",
    CLIPPED,
    _less_kl,
    group="mean",
    flags=frozenset({"kl_coef"}),
    source="2501.03262",
    aliases=("reinforce++_baseline", "reinforce_baseline"),
    checks=(_whitened,),
)
