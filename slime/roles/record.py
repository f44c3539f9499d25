"""This module defines the record of a role, which is a model of a run. It must start without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from slime.algo.losses import loss_of
from slime.config import Config


@dataclass(frozen=True)
class Source:
    """The source of a role's weights."""

    directory: str
    """A directory of Hugging Face, of Megatron, or of slime's converter."""
    iteration: int | None
    """The iteration in a Megatron directory; None for the newest."""
    flag: str
    """The flag that names the directory."""


def _never(c: Config) -> None:
    return None


def _as_policy(c: Config) -> str:
    return c.rollout.hf_checkpoint


def _nobody(c: Config) -> bool:
    return False


def _with_policy(c: Config) -> None:
    return None


def _has_weights(c: Config) -> bool:
    return False


@dataclass(frozen=True)
class Role:
    """A model of a run."""

    name: str
    column: str
    """The column that the role's pass over a rank's samples fills (`slime.data.columns`). A run has the role if a loss
    or an estimator reads this column."""
    timer: str
    """The time of the pass is `perf/{timer}_time`."""
    source: Callable[[Config], Source]
    """Returns the source of the first weights."""
    resumes: Callable[[Config], Source | None] = _never
    """Returns the checkpoint from which a trained role resumes, None for a new run."""
    saves_to: Callable[[Config], str | None] = _never
    """Returns the folder of a trained role's checkpoints, or None."""
    devices: Callable[[Config], tuple[int, int] | None] = _with_policy
    """Returns its separate devices, (nodes, ranks per node): --{name}-num-nodes, --{name}-num-gpus-per-node. None if
    the role shares the policy's devices."""
    trained: bool = False
    """True if the role has gradients, an optimizer and a checkpoint."""
    head: Literal["lm", "value"] = "lm"
    """The output: log-probs of a vocabulary, or one value per token."""
    prefix: str = ""
    """Prefix that --custom-megatron-before-log-prob-hook-path gets before the pass."""
    shape: Callable[[Config], str] = _as_policy
    """Returns the directory whose config.json describes the model."""
    of_base: Callable[[Config], bool] = _has_weights
    """Returns True if the model is the policy without its adapters, so that the role needs no separate weights."""
    absent: Callable[[Config], bool] = _nobody
    """Returns True if the samples contain the column, so that the run does not need the model."""
    save_flag: str = "--save"
    """The flag of `saves_to` in messages."""
    metrics: str = ""
    """Prefix of the names of its metrics after train/."""
    lr: str = "lr"
    """The field of its learning rate."""
    lr_warmup_iters: str = "lr_warmup_iters"
    """The field of its warm-up."""

    def has_values(self, c: Config) -> bool:
        """Returns True if the head computes one value per token: for a critic, and for a reward model that is trained
        instead of a policy."""
        return self.head == "value" or (self.trained and loss_of(c.algorithm).head == "value")
