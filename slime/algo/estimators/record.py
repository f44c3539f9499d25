"""The record of one advantage estimator: what it needs, how rewards become advantages, and its policy loss.

Configuration, conversion, trainer and documents read the record, and no other code compares an estimator's name.
`slime.config` imports this folder, and must start without torch: functions here import torch and rl_kernel themselves.

Shapes: R response tokens of a micro-batch, R_i of sample i.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from slime.algo.token_columns import TokenColumns
    from slime.config.schema import Config


@dataclass(frozen=True)
class Surrogate:
    """The policy-gradient term of a token."""

    policy: str
    """Describes the term in docs/algorithms.md; `{ratio}` stands for the level of the ratio."""
    per_token: Callable[[Namespace, TokenColumns, Tensor, Tensor], tuple[Tensor, Tensor]]
    """`per_token(args, t, log_probs, ppo_kl)`: its loss, and 1.0 where a clip was active, [R] each. The ratio is
    `exp(-ppo_kl)`, with `ppo_kl = old - log_probs`; if the ratio is per sequence, so are these two. `t` has all
    columns."""
    fused: bool = False
    """`rl_kernel.grpo_loss` computes the same term and its sum."""
    whole_sequences: bool = False
    """It reads more than its own token."""


@dataclass(frozen=True)
class Response:
    """What an estimator reads of one sample."""

    reward: float
    """After normalization in its group."""
    mask: Tensor
    """[R_i]: 1 for the tokens that are trained on, else 0."""
    kl: Tensor
    """[R_i] fp32: to the reference model, as --kl-loss-type estimates it; 0 without --kl-coef."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """The sample's entries of the columns that the estimator's record `reads`, such as values [R_i], or group_rewards:
    the raw rewards of its group."""


@dataclass(frozen=True)
class Estimator:
    """One value of --advantage-estimator."""

    name: str
    advantage: str
    """Describes the advantages in docs/algorithms.md."""
    surrogate: Surrogate
    estimate: Callable[[Namespace, Response], tuple[Tensor, Tensor]]
    """`estimate(args, response)`: the advantages of a sample before --normalize-advantages, and its returns, [R_i] fp32
    each."""
    ratio: Literal["token", "sequence"] = "token"
    """Of one token, or the mean over its sequence."""
    group: Literal["none", "mean", "mean and std"] = "none"
    """Which statistics of its group normalize a reward."""
    reads: frozenset[str] = frozenset()
    """The columns (`slime.data.columns`) that the estimate or the surrogate reads besides rewards, masks and
    advantages. What reads ref_log_probs or values brings the model that computes them (`slime.roles`); what reads
    old_log_probs, a pass for them before the first step."""
    checks: tuple[Callable[[Config], None], ...] = ()
    """Rules for other flags; each gets the configuration and raises ValueError."""

    @property
    def centred(self) -> bool:
        """Whether a reward counts relative to its group."""
        return self.group != "none"

    @property
    def whole_sequences(self) -> bool:
        """Whether the loss of a token needs more than that token's log-prob."""
        return self.ratio == "sequence" or self.surrogate.whole_sequences

    @property
    def policy(self) -> str:
        """The policy loss, as docs/algorithms.md describes it."""
        return self.surrogate.policy.format(ratio=self.ratio)


def same_for_all_tokens(args: Namespace, response: Response) -> tuple[Tensor, Tensor]:
    """`A_t = r`, fp32; the returns are the same."""
    import torch

    same = torch.full_like(response.kl, response.reward, dtype=torch.float32)
    return same, same


def _clipped(args: Namespace, t: TokenColumns, log_probs: Tensor, ppo_kl: Tensor) -> tuple[Tensor, Tensor]:
    from slime.algo.surrogates import compute_policy_loss

    clips = args.eps_clip, args.eps_clip_high, args.eps_clip_c
    return compute_policy_loss(ppo_kl, t["advantages"], *clips)


CLIPPED = Surrogate("clipped ratio per {ratio}", _clipped, fused=True)
"""PPO's clipped surrogate (1707.06347), with --eps-clip-c also clipped for negative advantages."""
