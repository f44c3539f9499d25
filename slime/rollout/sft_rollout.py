"""This module turns conversations of the data source into samples for supervised fine-tuning, without an engine.

In an evaluation, the same functions make the samples of the held-out sets, and the trainer computes their loss.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable

from slime.algo.losses import loss_for
from slime.data.media.row import without_media
from slime.loss_mask import MultiTurnLossMaskGenerator
from slime.protocols import DataSource
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.context import RunContext, find_context
from slime.rollout.evaluation import eval_group, load_eval_datasets
from slime.rollout.state import GenerateState
from slime.types import Sample, SampleGroup

Maker = Callable[[Sample], SampleGroup]
"""A function that maps a sample of the data source to the samples to train on."""


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Returns `--rollout-batch-size` tokenised conversations, with the loss on the assistant's turns.

    `Sample.prompt` is a list of messages (--input-key names the column, --apply-chat-template stays off). The response
    starts at the first token of the first trained assistant turn and ends with the conversation. The loss mask is 0 on
    the turns of other roles. With `evaluation`, returns all conversations of the held-out sets. Raises ValueError, with
    the sample's name, for a wrong conversation.
    """
    context = find_context(args)
    generator = _generator(context)

    def make(sample: Sample) -> SampleGroup:
        _fill(sample, generator, context.run)
        return [sample]

    return _held_out(context.run, make) if evaluation else _draw_samples(context, data_source, make)


def generate_pairs(
    args: Namespace, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Returns `--rollout-batch-size` preference pairs. A pair is a group with a chosen and a rejected sample. With
    `evaluation`, returns all pairs of the held-out sets.

    The two conversations are in the metadata (--chosen-key, --rejected-key). The samples of a pair share a rollout_id,
    so that they enter the same micro-batch. The chosen sample is first. The column `preference` is 1 for the chosen
    sample and -1 for the rejected sample.
    """
    context = find_context(args)
    generator = _generator(context)
    scored = loss_for(context.config.algorithm).head == "value"

    def make(sample: Sample) -> SampleGroup:
        pair = [sample, copy.deepcopy(sample)]
        for one, name, sign in zip(pair, ("chosen", "rejected"), (1.0, -1.0), strict=True):
            one.prompt, one.rollout_id = one.metadata[name], sample.index
            _fill(one, generator, context.run)
            if scored:
                _score_all(one)
            one.columns["preference"] = [sign] * one.response_length
        return pair

    return _held_out(context.run, make) if evaluation else _draw_samples(context, data_source, make)


def _generator(context: RunContext) -> MultiTurnLossMaskGenerator:
    kind = context.config.data.loss_mask_type
    return MultiTurnLossMaskGenerator(context.run.tokenizer, tokenizer_type=kind)


def _draw_samples(context: RunContext, data_source: DataSource, make: Maker) -> RolloutFnTrainOutput:
    """Returns the samples of a rollout. A prompt may have several samples, which are made in turn."""
    groups = data_source.get_samples(context.config.data.rollout_batch_size)
    return RolloutFnTrainOutput(
        samples=[[one for sample in group for one in make(sample)] for group in groups]
    )


def _held_out(state: GenerateState, make: Maker) -> RolloutFnEvalOutput:
    """Returns the held-out sets with their samples, which are made once per run. The samples do not come from the data
    source, so the order of the training data does not change."""
    for config, prompts in load_eval_datasets(state, masked=True):
        if config.name in state.held_out:
            continue
        groups = (eval_group(config, number, prompt)[0] for number, prompt in enumerate(prompts))
        try:
            state.held_out[config.name] = [one for sample in groups for one in make(sample)]
        except ValueError as error:
            raise ValueError(f"held-out set {config.name}: {error}") from error
    return RolloutFnEvalOutput({name: {"samples": samples} for name, samples in state.held_out.items()})


def _score_all(sample: Sample) -> None:
    """Adds a token at the end: a token's value is the value of the state before the token, and the score is the value
    of the last state."""
    sample.tokens.append(sample.tokens[-1])
    sample.response_length += 1
    sample.loss_mask = [*(sample.loss_mask or []), 1]


def _fill(sample: Sample, generator: MultiTurnLossMaskGenerator, state: GenerateState) -> None:
    who = f"sample {sample.index} of group {sample.group_index}"
    if not isinstance(sample.prompt, list):
        raise ValueError(
            f"--input-key must name a column of chat messages for SFT, got text in {who}; "
            "leave --apply-chat-template off"
        )
    try:
        images = state.start_expansion(sample.multimodal_inputs)
        tokens, mask = generator.get_loss_mask(
            without_media(sample.prompt),
            sample.metadata.get("tools"),
            sample.apply_chat_template_kwargs,
            str if images is None else images.expand,
        )
        sample.multimodal_train_inputs = None if images is None else images.finish(tokens)
    except ValueError as error:
        raise ValueError(f"{who}: {error}") from error
    length = generator.get_response_lengths([mask])[0]
    if length == 0:
        raise ValueError(f"messages must hold an assistant turn to train on, got none in {who}; fix the data")
    sample.tokens, sample.response_length, sample.loss_mask = tokens, length, mask[-length:]
    sample.response = str(generator.tokenizer.decode(tokens[-length:]))
    sample.reward = 0.0
    sample.status = Sample.Status.COMPLETED
