"""This module holds the default --data-source-path: the prompts of slime.data.source, whose labels are checked for the
run's reward. It also holds the classes that data sources of plug-ins use."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from slime.config.schema import Config
from slime.data.drawing.mixing import shuffled
from slime.data.limits.samples import filter_long_prompt
from slime.data.prompts import LabelCheck, load_prompts
from slime.data.rows import RowColumns
from slime.data.source import PromptDataSource, pop_first, pop_oldest
from slime.hooks import load_function
from slime.protocols import DataSource
from slime.types import Metadata, Sample, SampleGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

__all__ = [
    "DataSource",
    "Dataset",
    "RolloutDataSource",
    "RolloutDataSourceWithBuffer",
    "pop_first",
    "pop_oldest",
]

_LABEL_CHECK = "slime.rollout.rewards.labels.training_label_check"
"""A path, because the rollout imports this package."""


class RolloutDataSourceWithBuffer(PromptDataSource):
    """The default data source, under the name that existing slime scripts and subclasses import.

    `metadata` is a record of a plug-in's rollout function. It has JSON values, and is saved with the position.
    """

    def __init__(self, args: Namespace) -> None:
        super().__init__(args)
        self.metadata: Metadata = {}

    def get_metadata(self) -> Metadata:
        return self.metadata

    def update_metadata(self, metadata: Metadata) -> None:
        self.metadata.update(metadata)

    def get_buffer_length(self) -> int:
        """Returns the number of groups in the buffer."""
        return len(self.buffer)

    def state_dict(self, outstanding: Sequence[SampleGroup] = ()) -> dict[str, object]:
        state = super().state_dict(outstanding)
        return {**state, "metadata": copy.deepcopy(self.metadata)} if self.metadata else state

    def load_state_dict(self, state: Mapping[str, object], where: str = "the saved data position") -> None:
        super().load_state_dict(state, where)
        self.metadata = cast("Metadata", copy.deepcopy(state.get("metadata", {})))

    def label_check(self, config: Config) -> LabelCheck | None:
        found: LabelCheck | None = load_function(_LABEL_CHECK)(config)
        return found


RolloutDataSource = RolloutDataSourceWithBuffer
"""In slime, this class has no buffer. Here its buffer is empty until `add_samples`."""


class Dataset:
    """The prompts of a file as samples, for data sources and evaluations of plug-ins.

    `origin_samples` are in the order of the file. `samples` are in the order of the last `shuffle`, at first the file's
    order. Both lists hold the same objects, so copy a sample before it is generated. `path`, the keys and the errors
    are those of `load_prompts`. Prompts with more than `max_length` tokens are left out. With `processor`, the tokens
    of images count.
    """

    def __init__(
        self,
        path: str,
        tokenizer: PreTrainedTokenizerBase | None,
        processor: ProcessorMixin | None,
        max_length: int | None,
        *,
        prompt_key: str = "text",
        multimodal_keys: dict[str, object] | None = None,
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: dict[str, object] | None = None,
    ) -> None:
        columns = RowColumns(
            input_key=prompt_key,
            label_key=label_key,
            metadata_key=metadata_key,
            tool_key=tool_key,
            apply_chat_template=apply_chat_template,
            apply_chat_template_kwargs=apply_chat_template_kwargs or {},
            multimodal_keys=multimodal_keys or {},
        )
        self.seed, self.epoch_id = seed, -1
        text_limit = max_length if processor is None else None
        self.origin_samples = [
            Sample(
                prompt=prompt.text,
                label=prompt.label,
                metadata=prompt.metadata,
                multimodal_inputs=prompt.multimodal_inputs(),
            )
            for prompt in load_prompts(path, columns, tokenizer=tokenizer, max_prompt_len=text_limit)
        ]
        for sample in self.origin_samples:
            if apply_chat_template or not isinstance(sample.prompt, str):
                sample.apply_chat_template_kwargs = dict(columns.apply_chat_template_kwargs)
        if processor is not None and tokenizer is not None:
            self.origin_samples = filter_long_prompt(self.origin_samples, tokenizer, processor, max_length)
        self.samples = self.origin_samples

    def shuffle(self, new_epoch_id: int) -> None:
        """Sorts `samples` into the order that --rollout-shuffle gives the epoch."""
        if new_epoch_id == self.epoch_id:
            return
        order = shuffled(len(self.origin_samples), self.seed + new_epoch_id)
        self.samples, self.epoch_id = [self.origin_samples[i] for i in order], new_epoch_id

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]
