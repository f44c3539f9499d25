"""The record of one role: a model of a run, by what it does. Must start without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from slime.algo.losses import loss_of
from slime.config import Config


@dataclass(frozen=True)
class Source:
    """Where weights of a role come from."""

    directory: str
    """Hugging Face's, Megatron's, or one that slime's converter wrote."""
    iteration: int | None
    """Of a Megatron directory; None for the newest."""
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
    """One model of a run."""

    name: str
    column: str
    """What its pass over a rank's samples fills (`slime.data.columns`). The role is needed where a loss or an estimator
    reads that column."""
    timer: str
    """The time of the pass is `perf/{timer}_time`."""
    source: Callable[[Config], Source]
    """Its first weights."""
    resumes: Callable[[Config], Source | None] = _never
    """The checkpoint that a trained role resumes from, None for a new run."""
    saves_to: Callable[[Config], str | None] = _never
    """The folder of a trained role's checkpoints, None for none."""
    devices: Callable[[Config], tuple[int, int] | None] = _with_policy
    """Its own devices, (nodes, ranks per node): --{name}-num-nodes, --{name}-num-gpus-per-node. None where it shares
    those of the policy."""
    trained: bool = False
    """It has gradients, an optimizer and a checkpoint of its own."""
    head: Literal["lm", "value"] = "lm"
    """Log-probs of a vocabulary, or one value per token."""
    prefix: str = ""
    """What --custom-megatron-before-log-prob-hook-path gets before the pass."""
    shape: Callable[[Config], str] = _as_policy
    """The directory whose config.json describes the model."""
    of_base: Callable[[Config], bool] = _has_weights
    """Whether its model is the policy's with its adapters switched off, so that it has no weights of its own."""
    absent: Callable[[Config], bool] = _nobody
    """Whether the samples bring the column, so that the run does not have the model."""
    save_flag: str = "--save"
    """The flag of `saves_to` in messages."""
    metrics: str = ""
    """What the names of its metrics begin with after train/."""
    lr: str = "lr"
    """The field of its learning rate."""
    lr_warmup_iters: str = "lr_warmup_iters"
    """The field of its warm-up."""

    def has_values(self, c: Config) -> bool:
        """Whether its head gives one value per token: that of a critic, and of a model that is trained to give rewards
        in the policy's place."""
        return self.head == "value" or (self.trained and loss_of(c.algorithm).head == "value")
