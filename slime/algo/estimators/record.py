"""The record of one advantage estimator: what it needs, and how rewards become advantages.

Configuration, conversion, trainer and documents read the record, and no other code compares an estimator's name.
`slime.config` imports this folder, and must start without torch: functions here import torch and rl_kernel themselves.

Shapes: R_i response tokens of sample i.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from slime.algo.surrogates import Surrogate

if TYPE_CHECKING:
    from torch import Tensor

    from slime.config.schema import Config


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
    the rewards of its group before normalization, its own rollout's first."""


@dataclass(frozen=True)
class Estimator:
    """One value of --advantage-estimator."""

    name: str
    advantage: str
    """Describes the advantages in docs/algorithms.md."""
    surrogate: Surrogate
    """Its policy loss, unless --pg-loss-type names another."""
    estimate: Callable[[Config, Response], tuple[Tensor, Tensor]]
    """`estimate(c, response)`: the advantages of a sample before --normalize-advantages, and its returns, [R_i] fp32
    each."""
    group: Literal["none", "mean", "mean and std"] = "none"
    """Which statistics of its group normalize a reward."""
    reads: frozenset[str] = frozenset()
    """The columns (`slime.data.columns`) that the estimate reads besides rewards, masks and advantages. What reads
    ref_log_probs or values brings the model that computes them (`slime.roles`); what reads old_log_probs, a pass for
    them before the first step."""
    flags: frozenset[str] = frozenset()
    """The fields of the configuration that `estimate` reads."""
    source: str = ""
    """The paper."""
    aliases: tuple[str, ...] = ()
    """Names that TRL, verl and others give it."""
    example: str = ""
    """A folder of examples/."""
    checks: tuple[Callable[[Config], None], ...] = ()
    """Rules for other flags; each gets the configuration and raises ValueError."""

    @property
    def centred(self) -> bool:
        """Whether a reward counts relative to its group."""
        return self.group != "none"

    @property
    def flags_of_group(self) -> frozenset[str]:
        """The fields that its normalization in the group reads."""
        names = {"mean": _OF_MEAN, "mean and std": _OF_MEAN | {"disable_grpo_std_normalization"}}
        return names.get(self.group, frozenset())


_OF_MEAN = frozenset({"disable_rewards_normalization"})


def same_for_all_tokens(c: Config, response: Response) -> tuple[Tensor, Tensor]:
    """`A_t = r`, fp32; the returns are the same."""
    import torch

    same = torch.full_like(response.kl, response.reward, dtype=torch.float32)
    return same, same
