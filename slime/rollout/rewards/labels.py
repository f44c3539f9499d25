"""This module checks labels for the built-in rewards while a prompt file is read.

A label that no response can match is an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slime.algo.losses import loss_for
from slime.config.schema import Config
from slime.config.sections.reward import reward_names
from slime.rollout.rewards import check_names
from slime.rollout.rewards.f1 import check_label as f1_label
from slime.rollout.rewards.gpqa import check_label as gpqa_label
from slime.rollout.rewards.gsm8k import label_number
from slime.rollout.rewards.ifbench import check_metadata as ifbench_metadata
from slime.rollout.rewards.text import expected_answer
from slime.rollout.rewards.unit_tests import parse_tests
from slime.types import Metadata

_CHECKS: dict[str, Callable[[object, Metadata], object]] = {
    "math": lambda label, metadata: expected_answer(label),
    "deepscaler": lambda label, metadata: expected_answer(label),
    "dapo": lambda label, metadata: expected_answer(label),
    "gsm8k": lambda label, metadata: label_number(label),
    "gpqa": gpqa_label,
    "f1": f1_label,
    "ifbench": ifbench_metadata,
    "code": parse_tests,
}


@dataclass(frozen=True)
class LabelCheck:
    """A check that raises ValueError for a label that the reward of its row cannot use."""

    rm_type: str | list[str] | None
    """The reward of rows without an `rm_type`."""
    always: bool = False
    """If true, the row's `metadata["rm_type"]` is ignored, as for a dataset of --eval-config with a reward."""
    names: bool = True
    """If true, the reward of a row must be a built-in reward, because the run has no user's function that scores it."""

    def __call__(self, label: object, metadata: Metadata) -> None:
        own = None if self.always else metadata.get("rm_type")
        names = reward_names(own or self.rm_type)
        if own and self.names:
            check_names(names, "metadata rm_type")
        for name in names:
            check = _CHECKS.get(name.removeprefix("boxed_"))
            if check is not None:
                check(label, metadata)


def label_check(
    c: Config, label_key: str | None, rm_type: str | list[str] | None = None
) -> LabelCheck | None:
    """Returns the check of the labels in column `label_key`; `rm_type` is the reward of an evaluation dataset.

    Returns None if a function of the user scores the samples. Without a label column, a function that makes or changes
    samples may set their labels, so the labels are not checked.
    """
    if c.reward.custom_rm_path:
        return None
    hooked = bool(c.rollout.custom_generate_function_path or c.rollout.rollout_sample_hook_path)
    if label_key is None and hooked:
        return None
    return LabelCheck(rm_type or c.reward.rm_type, always=rm_type is not None, names=not hooked)


def training_label_check(c: Config) -> LabelCheck | None:
    """Returns the check of the labels in --prompt-data, or None if the run computes no rewards, as in SFT."""
    return label_check(c, c.data.label_key) if loss_for(c.algorithm).rewarded else None
