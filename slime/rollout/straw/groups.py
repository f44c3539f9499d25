"""A group in the queue: the task with its newest tokens, and a host's answer. Both are JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from slime.rollout.stream.groups import StreamGroup, get_number
from slime.rollout.stream.snapshot_file import Record, sample_text
from slime.rollout.stream.snapshots import GroupCopy
from slime.types import Sample, SampleGroup


@dataclass(frozen=True)
class GroupTask:
    """A group that a host may generate."""

    number: int
    prompts: str
    """`hash_prompts` of the group, which a resumed run compares."""
    version: int
    """No token of the group is older than this version of the weights."""
    rollout: int
    """The rollout for which the group was drawn."""
    original: SampleGroup
    samples: SampleGroup
    """The samples with their tokens so far. Samples may have fanned out."""

    @classmethod
    def from_entry(cls, entry: StreamGroup, rollout: int) -> GroupTask:
        """Returns the task of a group in the stream."""
        number = get_number(entry.original)
        return cls(number, entry.prompts, entry.version, rollout, entry.original, entry.group)

    def with_copy(self, made: GroupCopy) -> GroupTask:
        """Returns the task with the tokens that a host has now."""
        return replace(self, samples=made.samples, version=min(self.version, made.version))

    def text(self) -> bytes:
        """Returns the task's record. Raises ValueError for a sample whose values are not plain."""
        head = {name: getattr(self, name) for name in ("number", "prompts", "version", "rollout")}
        return _join(sample_text(head), original=self.original, samples=self.samples)

    @classmethod
    def from_text(cls, text: bytes) -> GroupTask:
        fields = json.loads(text)
        for name in ("original", "samples"):
            fields[name] = [Sample.from_dict(each) for each in fields[name]]
        return cls(**fields)


@dataclass(frozen=True)
class GroupAnswer:
    """A host's result for a group: the samples, or the reason why the group has no samples."""

    samples: SampleGroup
    timed_out: Mapping[str, str] = field(default_factory=dict)
    """Random stream of a sample -> the reason why the sample passed its deadline."""
    error: str = ""
    """The reason why the group has no samples, or ""."""
    reason: str | None = None
    """The reason of --failed-samples; None for an error that ends the run."""

    def text(self) -> bytes:
        """Returns the answer's record. Raises ValueError for a sample whose values are not plain."""
        head = {"timed_out": dict(self.timed_out), "error": self.error, "reason": self.reason}
        return _join(sample_text(head), samples=self.samples)

    @classmethod
    def from_text(cls, text: bytes) -> GroupAnswer:
        fields = json.loads(text)
        return cls(**fields | {"samples": [Sample.from_dict(each) for each in fields["samples"]]})


def snapshot_record(text: bytes) -> Record | None:
    """Returns the record of `Snapshots.restore` for a task. Returns None for an answer, which `add_answer` joins with
    it."""
    fields = json.loads(text)
    return {name: fields[name] for name in ("prompts", "version", "samples")}


def join_answer(task: bytes, answer: bytes) -> Record:
    """Returns the record of `Snapshots.restore` for a task with its answer. An answer without samples leaves the task's
    tokens."""
    record = snapshot_record(task)
    assert record is not None
    samples = json.loads(answer)["samples"]
    return record | ({"samples": samples} if samples else {})


def _join(head: str, **groups: Sequence[Sample]) -> bytes:
    """Returns a record: `head`, and samples that are converted one by one, so that no call holds the interpreter for
    long."""
    parts = [head[:-1]]
    for name, samples in groups.items():
        parts.append(f', "{name}": [')
        for position, sample in enumerate(samples):
            parts += [", "] * bool(position) + [sample_text(sample.to_dict())]
        parts.append("]")
    return "".join([*parts, "}"]).encode()
