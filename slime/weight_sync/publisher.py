"""The publisher of a trainer rank: it gives out a version of the weights, one part at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from slime.protocols import FULL, WeightSet, WeightUpdate
from slime.weight_sync.channel import Export, TrainerPlace, WeightChannel
from slime.weight_sync.file_channel import FileChannel
from slime.weight_sync.registry import CHANNELS


class Publisher:
    """Every trainer rank has one, and every call is collective over the trainer ranks.

    `channel` is for running engines, `files` for engines that restart. `compare`: engines compare their live weights
    with the trainer's (--check-weight-update-equal). `weights`: what `export` gives.
    """

    def __init__(
        self,
        export: Export,
        channel: WeightChannel,
        files: FileChannel,
        *,
        compare: bool,
        weights: WeightSet = FULL,
    ) -> None:
        self._export, self._channel, self._files, self._compare = export, channel, files, compare
        self._weights = weights
        self._sending: Iterator[WeightUpdate] | None = None
        self._receivers: dict[str, int] = {}  # of the version that is being sent

    @classmethod
    def of(
        cls,
        transport: str,
        place: TrainerPlace,
        export: Export,
        *,
        compare: bool,
        weights: WeightSet = FULL,
    ) -> Publisher:
        """The publisher of one rank; `transport` is a value of --update-weight-transport."""
        channel = CHANNELS[transport].load().on_trainer(place)
        return cls(export, channel, FileChannel.on_trainer(place), compare=compare, weights=weights)

    def next(self, version: int, receivers: dict[str, int]) -> WeightUpdate | None:
        """The next part of the current weights, whose version is `version`, or None after the last part.

        The call after None returns the first part again. If `receivers` differ from those of the last call, the first
        part is returned too. The engines get the parts of rank 0. Without `receivers`, the weights go into a file.
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
        return None if part is None else replace(part, weights=self._weights)

    def file(self, version: int) -> WeightUpdate:
        """The current weights in a file, for an engine that starts between two updates."""
        part = next(self._files.parts(self._export, version, compare=False, receivers={}))
        return replace(part, weights=self._weights)
