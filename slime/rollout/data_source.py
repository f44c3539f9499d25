"""The default --data-source-path: the prompts of slime.data.source, with labels that the run's reward can use."""

from __future__ import annotations

from argparse import Namespace

from slime.algo.losses import loss_of
from slime.config.schema import Config
from slime.data.source import PromptDataSource, pop_first, pop_oldest
from slime.protocols import DataSource
from slime.rollout.rewards.labels import LabelCheck, label_check

__all__ = ["DataSource", "RolloutDataSource", "RolloutDataSourceWithBuffer", "pop_first", "pop_oldest"]


class RolloutDataSourceWithBuffer(PromptDataSource):
    """Import path of existing slime scripts and subclasses."""

    def label_check(self, args: Namespace) -> LabelCheck | None:
        return training_label_check(Config.of_args(args))


RolloutDataSource = RolloutDataSourceWithBuffer
"""slime's has no buffer; this one's is empty until `add_samples`."""


def training_label_check(c: Config) -> LabelCheck | None:
    """The check of the labels of --prompt-data. None without rewards, as in SFT."""
    return label_check(c, c.data.label_key) if loss_of(c.algorithm).rewarded else None
