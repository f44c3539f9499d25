"""The record of a policy loss: the policy-gradient term of a token, and its inputs.

`slime.rules` imports this folder and must start without torch, so functions here import torch. --pg-loss-type names the
surrogate of a run. Without the flag, the surrogate is the one in the record of the estimator.

Shapes: R response tokens of a micro-batch, N trained tokens of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from slime.algo.token_columns import TokenColumns
    from slime.config.schema import Config
    from slime.config.sections.algorithm import AlgorithmConfig


@dataclass(frozen=True)
class Surrogate:
    """One value of --pg-loss-type."""

    name: str
    policy: str
    """Formula of the term in docs/algorithms.md."""
    per_token: Callable[[Config, TokenColumns, Tensor, Tensor], tuple[Tensor, Tensor]]
    """`per_token(c, t, log_probs, ppo_kl)` returns each token's loss, and 1.0 where a clip was active, [R] each.
    The ratio is `exp(-ppo_kl)`, with `ppo_kl = old - log_probs`. `t` has all columns."""
    source: str = ""
    """The paper."""
    ratio: Literal["token", "sequence", "sequence_token"] = "token"
    """Level of the ratio. token: the token's own ratio. sequence: the exponential of the masked mean of the sequence's
    log-prob differences; `log_probs` and `ppo_kl` are then at this level, too. sequence_token: the value of the
    sequence's ratio with the gradient of the token."""
    whole_sequences: bool = False
    """True if the loss of a token reads other tokens of its sequence."""
    fused: bool = False
    """True if `rl_kernel.grpo_loss` computes the same term and the sum."""
    reads: frozenset[str] = frozenset()
    """Columns that must exist before the first step, as in an estimator's record."""
    flags: frozenset[str] = frozenset()
    """Fields of the configuration that `per_token` and `choose` read."""
    choose: Callable[[AlgorithmConfig, Tensor, Tensor, Tensor, ProcessGroup | None], Tensor] | None = None
    """`choose(algorithm, advantages, old_log_probs, keys, group)` makes the column chosen_tokens from all trained
    tokens of a rollout, [N] each: 1.0 for each chosen token, which the surrogate treats differently. `keys` int64
    identify the tokens on every rank. Collective over `group`."""
    aliases: tuple[str, ...] = ()
    """Names of the same policy loss in TRL, verl and other trainers."""
    weighs: bool = False
    """True if the term contains the importance weight of --use-tis already."""
    flag: str = ""
    """Flag that replaces the policy loss of the same name by this one."""
    checks: tuple[Callable[[Config], None], ...] = ()
    """Rules for other flags. Each rule gets the configuration and raises ValueError."""

    @property
    def reads_sequences(self) -> bool:
        """Returns true if the loss of a token reads more than the log-prob of this token."""
        return self.ratio != "token" or self.whole_sequences
