"""The record of one role: a model of a run, by what it does. Must start without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from slime.config import Config


@dataclass(frozen=True)
class Source:
    """Where weights of a role come from: a directory (Hugging Face's, Megatron's, converted), and the iteration of a
    Megatron directory, None for the newest. `flag` names the directory in messages."""

    directory: str
    iteration: int | None
    flag: str


def _never(c: Config) -> None:
    return None


@dataclass(frozen=True)
class Role:
    """One model of a run.

    `column`: what its pass over a rank's samples fills (`slime.data.columns`); the role is needed where a loss or an
    estimator reads that column. `timer`: the pass's time, `perf/{timer}_time`. `source`: its first weights. `head`:
    log-probs of a vocabulary, or one value per token. `prefix`: what --custom-megatron-before-log-prob-hook-path gets.

    `trained`: it has gradients, an optimizer and a checkpoint of its own. `resumes`: the one that it resumes from,
    None for a new run. `saves_to`: the folder of its checkpoints, which `save_flag` names in messages. `metrics`: what
    its metrics begin with after train/. `lr`, `lr_warmup_iters`: the flags of its learning rate.
    """

    name: str
    column: str
    timer: str
    source: Callable[[Config], Source]
    resumes: Callable[[Config], Source | None] = _never
    saves_to: Callable[[Config], str | None] = _never
    trained: bool = False
    head: Literal["lm", "value"] = "lm"
    prefix: str = ""
    save_flag: str = "--save"
    metrics: str = ""
    lr: str = "lr"
    lr_warmup_iters: str = "lr_warmup_iters"
