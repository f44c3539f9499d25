"""Supervised fine-tuning as a rollout: turns conversations of the data source into samples, without an engine."""

from __future__ import annotations

import copy
from argparse import Namespace

from slime.algo.losses import loss_of
from slime.config.schema import section_of
from slime.config.sections.algorithm import AlgorithmConfig
from slime.config.sections.data import DataConfig
from slime.loss_mask import MultiTurnLossMaskGenerator
from slime.protocols import DataSource
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.state import of_process
from slime.types import Sample


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """`--rollout-batch-size` tokenised conversations, with the loss on the assistant's turns.

    `Sample.prompt` is a list of messages (--input-key names the column, --apply-chat-template stays off). The
    response starts at the first token of the first trained assistant turn and ends with the conversation. Its
    loss mask is 0 on the turns of other roles. ValueError, with the sample's name, for a wrong conversation.
    """
    if evaluation:
        raise ValueError(
            "--eval-interval must not be set for SFT, which has no engine; give --eval-function-path"
        )
    data = section_of(DataConfig, args)
    generator = MultiTurnLossMaskGenerator(of_process(args).tokenizer, tokenizer_type=data.loss_mask_type)
    groups = data_source.get_samples(data.rollout_batch_size)
    for sample in (sample for group in groups for sample in group):
        _fill(sample, generator)
    return RolloutFnTrainOutput(samples=groups)


def generate_pairs(
    args: Namespace, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """`--rollout-batch-size` preference pairs, each a group of a chosen and a rejected sample.

    The two conversations are in the metadata (--chosen-key, --rejected-key). The samples of a pair are one rollout, so
    that they get into one micro-batch, the chosen one first; their column `preference` is 1 and -1.
    """
    if evaluation:
        raise ValueError(
            "--eval-interval must not be set for preference pairs, which need no engine; give --eval-function-path"
        )
    data = section_of(DataConfig, args)
    generator = MultiTurnLossMaskGenerator(of_process(args).tokenizer, tokenizer_type=data.loss_mask_type)
    scored, groups = loss_of(section_of(AlgorithmConfig, args)).head == "value", []
    for (sample,) in data_source.get_samples(data.rollout_batch_size):
        pair = sample, copy.deepcopy(sample)
        for one, name, sign in zip(pair, ("chosen", "rejected"), (1.0, -1.0), strict=True):
            one.prompt, one.rollout_id = one.metadata[name], sample.index
            _fill(one, generator)
            if scored:
                _score_all(one)
            one.columns["preference"] = [sign] * one.response_length
        groups.append(list(pair))
    return RolloutFnTrainOutput(samples=groups)


def _score_all(sample: Sample) -> None:
    """A token more: the value of a token is that of the state before it, and a score is that of the last state."""
    sample.tokens.append(sample.tokens[-1])
    sample.response_length += 1
    sample.loss_mask = [*(sample.loss_mask or []), 1]


def _fill(sample: Sample, generator: MultiTurnLossMaskGenerator) -> None:
    who = f"sample {sample.index} of group {sample.group_index}"
    if not isinstance(sample.prompt, list):
        raise ValueError(
            f"--input-key must name a column of chat messages for SFT, got text in {who}; "
            "leave --apply-chat-template off"
        )
    try:
        tokens, mask = generator.get_loss_mask(
            sample.prompt, sample.metadata.get("tools"), sample.apply_chat_template_kwargs
        )
    except ValueError as error:
        raise ValueError(f"{who}: {error}") from error
    length = generator.get_response_lengths([mask])[0]
    if length == 0:
        raise ValueError(f"messages must hold an assistant turn to train on, got none in {who}; fix the data")
    sample.tokens, sample.response_length, sample.loss_mask = tokens, length, mask[-length:]
    sample.response = str(generator.tokenizer.decode(tokens[-length:]))
    sample.reward = 0.0
    sample.status = Sample.Status.COMPLETED
