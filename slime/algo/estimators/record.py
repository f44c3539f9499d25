"""The record of an advantage estimator: its inputs, and the function that turns rewards into advantages.

Configuration, conversion, trainer and documents read the record. No other code compares the name of an estimator.
`slime.rules` imports this folder and must start without torch, so functions here import torch and rl_kernel.

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
    """The inputs of an estimator for one sample."""

    reward: float
    """Reward after normalization in the group."""
    mask: Tensor
    """[R_i]: 1 for each token that is trained on, else 0."""
    kl: Tensor
    """[R_i] fp32: KL to the reference model by the estimate of --kl-loss-type; 0 without --kl-coef."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """The sample's entries of the columns that the estimator's record `reads`. Examples are values [R_i], and
    group_rewards: the rewards of the group before normalization, with the reward of this rollout first."""


@dataclass(frozen=True)
class Estimator:
    """One value of --advantage-estimator."""

    name: str
    advantage: str
    """Formula of the advantages in docs/algorithms.md."""
    surrogate: Surrogate
    """Policy loss of the estimator, unless --pg-loss-type names another policy loss."""
    estimate: Callable[[Config, Response], tuple[Tensor, Tensor]]
    """`estimate(c, response)` returns the advantages of a sample before --normalize-advantages, and the returns,
    [R_i] fp32 each."""
    group: Literal["none", "mean", "mean and std"] = "none"
    """Statistics of the group that normalize a reward."""
    reads: frozenset[str] = frozenset()
    """Columns (`slime.data.columns`) that `estimate` reads, without rewards, masks and advantages. A record that reads
    ref_log_probs or values adds the model that computes this column to the run (`slime.roles`). A record that reads
    old_log_probs adds a pass for old log-probs before the first step."""
    flags: frozenset[str] = frozenset()
    """Fields of the configuration that `estimate` reads."""
    source: str = ""
    """The paper."""
    aliases: tuple[str, ...] = ()
    """Names of the same estimator in TRL, verl and other trainers."""
    example: str = ""
    """Folder of examples/ that uses the estimator."""
    checks: tuple[Callable[[Config], None], ...] = ()
    """Rules for other flags. Each rule gets the configuration and raises ValueError."""

    @property
    def centred(self) -> bool:
        """Returns true if a reward counts relative to its group."""
        return self.group != "none"

    @property
    def flags_of_group(self) -> frozenset[str]:
        """Returns the fields of the configuration that the normalization in the group reads."""
        names = {"mean": _OF_MEAN, "mean and std": _OF_MEAN | {"disable_grpo_std_normalization"}}
        return names.get(self.group, frozenset())


_OF_MEAN = frozenset({"disable_rewards_normalization"})


def same_for_all_tokens(c: Config, response: Response) -> tuple[Tensor, Tensor]:
    """Returns `A_t = r` as fp32 for advantages and for returns."""
    import torch

    same = torch.full_like(response.kl, response.reward, dtype=torch.float32)
    return same, same
