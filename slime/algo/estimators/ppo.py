"""PPO with a critic (1707.06347) uses generalised advantage estimation (1506.02438) from the critic's values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.algo.estimators.record import Estimator, Response
from slime.algo.surrogates import CLIPPED

if TYPE_CHECKING:
    from torch import Tensor

    from slime.config.schema import Config


def _generalised(c: Config, response: Response) -> tuple[Tensor, Tensor]:
    """Computes GAE over the trained tokens, with the rewards `x = -kl_coef * kl` plus `reward` at the last trained
    token.

    Tokens of tools are not actions: the successor of a trained token is the next trained token. The advantage of any
    other token is 0, and its return is its value.
    """
    import torch

    from slime.algo.returns import gae, penalised

    values = response.columns["values"].float()
    trained, x = penalised(response.reward, response.mask, response.kl, kl_coef=c.algorithm.kl_coef)
    found, _ = gae(x, values[trained], c.algorithm.gamma, c.critic.lambd)
    advantages = torch.zeros_like(values).index_copy(0, trained, found)
    return advantages, advantages + values


PPO = Estimator(
    "ppo",
    "GAE of `-kl_coef * kl_t`, plus `r` at the last trained token, and the critic's values",
    CLIPPED,
    _generalised,
    reads=frozenset({"values"}),
    flags=frozenset({"kl_coef", "gamma", "lambd"}),
    source="1707.06347",
    aliases=("gae",),
    example="examples/ppo-critic",
)
