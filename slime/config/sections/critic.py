"""Flags of the critic section: the model of values, which an estimator such as ppo reads."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slime.config.fields import flag
from slime.config.ranges import BOUND, COUNT, COUNT_OR_ZERO, RATE, UNIT


@dataclass(frozen=True)
class CriticConfig:
    """The critic has the policy's architecture and one value per token."""

    critic_devices: str = flag(
        "auto",
        "shared: the critic is on the policy's ranks; own: on ranks of its own, whose number the next two flags give; "
        "auto: own if that is another number than the policy has",
        choices=("auto", "shared", "own"),
    )
    critic_num_nodes: int | None = flag(
        None, "number of nodes that train the critic (default: --actor-num-nodes)", range=COUNT
    )
    critic_num_gpus_per_node: int | None = flag(
        None, "number of the critic's ranks per node (default: --actor-num-gpus-per-node)", range=COUNT
    )

    critic_load: str | None = flag(
        None,
        "folder of the critic's checkpoints, or its first weights (default: the folder critic in --load, and the "
        "policy's first weights with a new head)",
    )
    critic_save: str | None = flag(
        None, "folder for checkpoints of the critic (default: the folder critic in --save)"
    )
    critic_lr: float | None = flag(None, "learning rate of the critic (default: --lr)", range=RATE)
    critic_lr_warmup_iters: int = flag(
        0, "number of optimizer steps of linear warm-up of the critic", range=COUNT_OR_ZERO
    )
    num_critic_only_steps: int = flag(
        0, "number of rollouts at the start of a run that train the critic alone", range=COUNT_OR_ZERO
    )
    critic_train_only: bool = flag(False, "train the critic alone in all rollouts; the policy stays as it is")
    value_clip: float = flag(
        0.2, "clip range of a value around the value before the rollout's first step", range=BOUND
    )
    lambd: float = flag(1.0, "lambda of generalised advantage estimation: weight of later steps", range=UNIT)

    @property
    def first_of_policy(self) -> float:
        """Returns the first rollout that trains the policy, or infinity if none does."""
        return math.inf if self.critic_train_only else self.num_critic_only_steps
