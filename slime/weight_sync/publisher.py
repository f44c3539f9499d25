"""Versions of the weights, part by part, on the trainer ranks."""

from __future__ import annotations

from collections.abc import Iterator

from slime.protocols import WeightUpdate
from slime.weight_sync.channel import Export, TrainerPlace, WeightChannel
from slime.weight_sync.file_channel import FileChannel
from slime.weight_sync.registry import CHANNELS


class Publisher:
    """One on every trainer rank; all calls are collective.

    `channel` serves engines that run, `files` engines that restart. `compare`: engines compare their live weights with
    the trainer's (--check-weight-update-equal).
    """

    def __init__(self, export: Export, channel: WeightChannel, files: FileChannel, *, compare: bool) -> None:
        self._export, self._channel, self._files, self._compare = export, channel, files, compare
        self._sending: Iterator[WeightUpdate] | None = None
        self._receivers: dict[str, int] = {}  # of the version that is being sent

    @classmethod
    def of(cls, transport: str, place: TrainerPlace, export: Export, *, compare: bool) -> Publisher:
        """The publisher of one rank; `transport` is a value of --update-weight-transport."""
        channel = CHANNELS[transport].load().on_trainer(place)
        return cls(export, channel, FileChannel.on_trainer(place), compare=compare)

    def next(self, version: int, receivers: dict[str, int]) -> WeightUpdate | None:
        """The next part of the current weights, named `version`; None after the last part, and then the first again.

        Engines get rank 0's parts. Without `receivers` the weights go into a file. Other receivers than in the call
        before get all parts, from the first one.
        """
        if self._sending is None or self._receivers != receivers:
            self._receivers = receivers
            channel = self._channel if receivers else self._files
            self._sending = channel.parts(self._export, version, compare=self._compare, receivers=receivers)
        part = None
        try:
            part = next(self._sending, None)
        finally:
            if part is None:  # the end, or an error, after which the generator cannot continue
                self._sending = None
        return part

    def file(self, version: int) -> WeightUpdate:
        """The current weights in a file, for an engine that starts between two updates."""
        return next(self._files.parts(self._export, version, compare=False, receivers={}))
