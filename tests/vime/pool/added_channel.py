"""Provides a weight channel that a test adds: one class, and its entry in the registry."""

from __future__ import annotations

from dataclasses import replace

from slime.weight_sync.channel import TrainerSettings
from slime.weight_sync.file_channel import FileChannel
from slime.weight_sync.registry import CHANNELS, ChannelRecord


class SecondFiles(FileChannel):
    """Writes files with another name."""

    name = "second"

    @classmethod
    def on_trainer(cls, place: TrainerSettings) -> FileChannel:
        return super().on_trainer(replace(place, stem="second"))


CHANNELS["second"] = ChannelRecord(
    "added_channel:SecondFiles", help="through files of another name", plan="second files in {weight_dir}"
)
