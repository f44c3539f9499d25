"""Groups of the stream: as they were drawn, at which weights, and with their responses."""

from __future__ import annotations

from dataclasses import dataclass

from slime.types import Sample, SampleGroup


@dataclass(eq=False)
class Drawn:
    """A group of the stream."""

    given: SampleGroup
    """As it was drawn."""
    version: int
    """The weights of the engines when it was drawn: no token is older."""
    group: SampleGroup
    """With its responses, once it is ready. Samples may have fanned out to several."""

    def age(self, rollout_id: int) -> int:
        """By how many weight updates its oldest token is behind the weights that rollout `rollout_id` trains."""
        return max(0, rollout_id - self.version)


def index_of(group: SampleGroup) -> int:
    """Of the group's first sample. Groups are ordered by it."""
    return group[0].index if group[0].index is not None else -1


def restarted(sample: Sample) -> Sample:
    """The sample as the data source first returned it."""
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


def number_of(group: SampleGroup) -> int:
    """The group's name in the run's events. Groups of a plug-in's data source may have no index of their own."""
    return group[0].group_index if group[0].group_index is not None else index_of(group)
