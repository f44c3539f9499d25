"""Defines Role, the record of one model on a run's trainer ranks. This module must not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slime.algo.losses import loss_for
from slime.config import Config
from slime.config.problems import require_value


@dataclass(frozen=True)
class Source:
    """The directory from which a role loads its weights."""

    directory: str
    """A Hugging Face directory, a Megatron directory, or a directory from slime's converter."""
    iteration: int | None
    """The iteration in a Megatron directory; None for the newest."""
    flag: str
    """The flag that names the directory."""

    def shares_weights(self, other: Source) -> bool:
        """Returns whether both name the same weights."""
        same = Path(self.directory).resolve() == Path(other.directory).resolve()
        return same and self.iteration == other.iteration


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
    """The column that the role's pass over a rank's samples fills (`slime.data.columns`). A run has the role if a loss
    or an estimator reads this column."""
    timer: str
    """The pass's time is the metric `perf/{timer}_time`."""
    source: Callable[[Config], Source]
    """Returns the role's first weights."""
    resumes: Callable[[Config], Source | None] = _never
    """Returns the checkpoint from which a trained role resumes, None for a new run."""
    saves_to: Callable[[Config], str | None] = _never
    """Returns the folder for a trained role's checkpoints, None if the run saves no checkpoints."""
    devices: Callable[[Config], tuple[int, int] | None] = _with_policy
    """Returns the role's separate devices as (nodes, ranks per node), from --{name}-num-nodes and
    --{name}-num-gpus-per-node. None if the role shares the policy's devices."""
    trained: bool = False
    """True if the role has gradients, an optimizer and a checkpoint."""
    head: Literal["lm", "value"] = "lm"
    """The model's head: "lm" for log-probs over the vocabulary, "value" for one value per token."""
    prefix: str = ""
    """Argument with which --custom-megatron-before-log-prob-hook-path is called before the pass."""
    shape: Callable[[Config], str] = _as_policy
    """Returns the directory whose config.json describes the model."""
    of_base: Callable[[Config], bool] = _has_weights
    """Returns True if the model is the policy's model without its adapters. Such a role loads no weights."""
    absent: Callable[[Config], bool] = _nobody
    """Returns True if samples bring the column. Then the trainer does not have the model."""
    save_flag: str = "--save"
    """The flag that messages name for `saves_to`."""
    metrics: str = ""
    """Prefix of the role's metrics after "train/"."""
    lr: str = "lr"
    """The field of the configuration with the learning rate."""
    lr_warmup_iters: str = "lr_warmup_iters"
    """The field of the configuration with the number of warm-up steps of the learning rate."""

    def has_values(self, c: Config) -> bool:
        """Returns True if the head computes one value per token. This holds for a critic, and for a policy that is
        trained as a reward model."""
        return self.head == "value" or (self.trained and loss_for(c.algorithm).head == "value")

    def restarts(self, c: Config) -> Source | None:
        """Returns the checkpoint of a trained role from which restarted ranks continue, or None if the ranks start as
        at the start of the run."""
        folder, iteration = c.checkpoint.restart_dir, c.checkpoint.restart_iteration
        if iteration is None:
            return None
        directory = self.saves_to(c) if folder is None else str(Path(folder) / self.name)
        return Source(require_value(directory), iteration, self.save_flag)
