"""The record of one policy loss: the policy-gradient term of a token, and what it needs.

`slime.config` imports this folder, and must start without torch: functions here import torch themselves. The surrogate
of a run is that of --pg-loss-type, else the one of its estimator's record.

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
    """Describes the term in docs/algorithms.md."""
    per_token: Callable[[Config, TokenColumns, Tensor, Tensor], tuple[Tensor, Tensor]]
    """`per_token(c, t, log_probs, ppo_kl)`: the loss of each token, and 1.0 where a clip was active, [R] each. The
    ratio is `exp(-ppo_kl)`, with `ppo_kl = old - log_probs`. `t` has all columns."""
    source: str = ""
    """The paper."""
    ratio: Literal["token", "sequence", "sequence_token"] = "token"
    """Of one token; of its sequence, the exponential of the masked mean of the log-prob differences, and then so are
    `log_probs` and `ppo_kl`; or the value of the sequence with the gradient of the token."""
    whole_sequences: bool = False
    """It reads more than its own token."""
    fused: bool = False
    """`rl_kernel.grpo_loss` computes the same term and its sum."""
    reads: frozenset[str] = frozenset()
    """The columns that it needs before the first step, as in an estimator's record."""
    flags: frozenset[str] = frozenset()
    """The fields of the configuration that `per_token` and `choose` read."""
    choose: Callable[[AlgorithmConfig, Tensor, Tensor, Tensor, ProcessGroup | None], Tensor] | None = None
    """`choose(algorithm, advantages, old_log_probs, keys, group)` makes the column chosen_tokens from all trained
    tokens of a rollout, [N] each: 1.0 for each chosen token, which the surrogate treats differently. `keys` int64
    identify the tokens on every rank. Collective over `group`."""
    aliases: tuple[str, ...] = ()
    """Names that TRL, verl and others give it."""
    weighs: bool = False
    """Its term has the importance weight of --use-tis in it."""
    flag: str = ""
    """The flag that puts it in the place of the policy loss of its name."""
    checks: tuple[Callable[[Config], None], ...] = ()
    """Rules for other flags; each gets the configuration and raises ValueError."""

    @property
    def reads_sequences(self) -> bool:
        """Whether the loss of a token needs more than that token's log-prob."""
        return self.ratio != "token" or self.whole_sequences
