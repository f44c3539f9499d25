"""GRPO with rewards of single turns (2505.11821) adds the advantage of a token's turn to that of its response.

The two advantages are normalized in the same way: --use-dr-grpo, --disable-grpo-std-normalization and
--disable-rewards-normalization change both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.algo.estimators.record import Estimator, Response, same_for_all_tokens
from slime.algo.surrogates import CLIPPED

if TYPE_CHECKING:
    from torch import Tensor

    from slime.config.schema import Config


def _response_and_turn(c: Config, response: Response) -> tuple[Tensor, Tensor]:
    """Computes `A_t = r + turn_advantages_t` in fp32 (`slime.data.agents.turn_rewards`)."""
    same, _ = same_for_all_tokens(c, response)
    found = same + response.columns["turn_advantages"].to(same)
    return found, found


GRPO_TURN = Estimator(
    "grpo_turn",
    "`A_t = r + a_turn(t)`, where the rewards from a turn on are normalized among the same turns of the group",
    CLIPPED,
    _response_and_turn,
    group="mean and std",
    reads=frozenset({"turn_advantages"}),
    source="2505.11821",
)
