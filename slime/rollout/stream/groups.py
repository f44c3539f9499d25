"""This module holds the record of a group in the stream: its prompts, the version of the weights, its responses."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from slime.types import Sample, SampleGroup
from slime.vision.plain import media_as_plain


@dataclass(eq=False)
class StreamGroup:
    """One group in the stream."""

    original: SampleGroup
    """The group as the data source returned it."""
    version: int
    """The version of the engines' weights when the group was drawn. No token of the group is older."""
    group: SampleGroup
    """The group that is generated, and the group with its responses once it is ready. A sample may have fanned out to
    several samples."""
    prompts: str = ""
    """`hash_prompts` of the group when it was drawn."""
    is_ready: bool = False
    """True once the group has its responses and rewards."""

    def age(self, rollout_id: int) -> int:
        """Returns the age of the group's oldest token in weight updates, seen from rollout `rollout_id`."""
        return max(0, rollout_id - self.version)


def get_index(group: SampleGroup) -> int:
    """Returns the index of the group's first sample, by which groups are sorted."""
    return group[0].index if group[0].index is not None else -1


def restarted(sample: Sample) -> Sample:
    """Returns the sample as the data source first returned it."""
    return Sample(
        group_index=sample.group_index,
        index=sample.index,
        prompt=sample.prompt,
        label=sample.label,
        metadata=sample.metadata,
        multimodal_inputs=sample.multimodal_inputs,
        apply_chat_template_kwargs=sample.apply_chat_template_kwargs,
        generate_function_path=sample.generate_function_path,
        custom_rm_path=sample.custom_rm_path,
        session_id=sample.session_id,
    )


def hash_prompts(group: SampleGroup) -> str:
    """Returns a hash of the prompts and labels of a group that was drawn now."""
    fields = [[sample.index, media_as_plain(sample.prompt), sample.label] for sample in group]
    text = json.dumps(fields, default=lambda value: type(value).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def resumable(original: SampleGroup, group: SampleGroup) -> SampleGroup:
    """Returns the group that a later rollout can continue: the group, or its prompts if samples fanned out."""
    if len(group) != len(original):
        return [restarted(sample) for sample in original]
    return group


def get_number(group: SampleGroup) -> int:
    """Returns the number that names the group in the run's events. A plug-in's data source may set no `group_index`."""
    return group[0].group_index if group[0].group_index is not None else get_index(group)
