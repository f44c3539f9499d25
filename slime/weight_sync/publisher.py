"""The publisher of a trainer rank: it returns a version of the weights, one part at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from slime.protocols import FULL, WeightSet, WeightUpdate
from slime.weight_sync.channel import Export, TrainerSettings, WeightChannel
from slime.weight_sync.delta.series import DeltaSeries
from slime.weight_sync.delta.snapshot import Snapshot
from slime.weight_sync.file_channel import FileChannel
from slime.weight_sync.registry import CHANNELS

Written = Callable[[Path, list[str]], None]
"""Called with the folder of a version after it was written, and the names of the engines that will read it."""


class Publisher:
    """Publishes a rank's weights. Every trainer rank has a publisher, and every call is collective over the trainer
    ranks.

    `channel` is for running engines, `files` for engines that restart. `compare`: engines compare their live weights
    with the trainer's (--check-weight-update-equal). `weights` describes the set that `export` yields. `deltas` sends
    the changes instead of `weights`. Rank 0 calls `written` after each file.
    """

    def __init__(
        self,
        export: Export,
        channel: WeightChannel,
        files: FileChannel,
        *,
        compare: bool,
        weights: WeightSet = FULL,
        deltas: DeltaSeries | None = None,
        written: Written | None = None,
    ) -> None:
        self._export, self._channel, self._files, self._compare = export, channel, files, compare
        self._weights, self._deltas, self._written = weights, deltas, written
        self._sending: Iterator[WeightUpdate] | None = None
        self._receivers: dict[str, int] = {}  # receivers of the version that is being sent

    @classmethod
    def of(
        cls,
        transport: str,
        settings: TrainerSettings,
        export: Export,
        *,
        compare: bool,
        weights: WeightSet = FULL,
        snapshot: Snapshot | None = None,
        written: Written | None = None,
    ) -> Publisher:
        """Returns the publisher of a rank. `transport` is a value of --update-weight-transport. With a `snapshot` it
        sends deltas."""
        kind, files, deltas = CHANNELS[transport].load(), FileChannel.on_trainer(settings), None
        channel = kind.on_trainer(settings if snapshot is None else replace(settings, stem="delta"))
        if snapshot is not None:
            deltas = DeltaSeries(channel, files, snapshot, settings.directory, compare=compare)
        return cls(export, channel, files, compare=compare, weights=weights, deltas=deltas, written=written)

    def next(self, version: int, receivers: dict[str, int]) -> WeightUpdate | None:
        """Returns the next part of the current weights, whose version is `version`, or None after the last part.

        The call after None returns the first part again. If `receivers` differ from those of the last call, the first
        part is returned too. The engines get the parts of rank 0. Without `receivers`, the weights go into a file.
        """
        if self._sending is None or self._receivers != receivers:
            self._receivers = receivers
            self._sending = self._parts(version, receivers)
        part = None
        try:
            part = next(self._sending, None)
        finally:
            if part is None:  # the end, or an error, after which the generator cannot continue
                self._sending = None
        return None if part is None else self._report_written(part)

    def file(self, version: int) -> WeightUpdate:
        """Returns the current weights in a file, for an engine that starts between two updates."""
        part = next(self._files.parts(self._export, version, compare=False, receivers={}))
        weights = self._weights if self._deltas is None else self._deltas.describe_file(version)
        return self._report_written(replace(part, weights=weights))

    def _parts(self, version: int, receivers: dict[str, int]) -> Iterator[WeightUpdate]:
        if self._deltas is not None:
            yield from self._deltas.parts(self._export, version, receivers)
            return
        channel = self._channel if receivers else self._files
        for part in channel.parts(self._export, version, compare=self._compare, receivers=receivers):
            yield replace(part, weights=self._weights)

    def _report_written(self, part: WeightUpdate) -> WeightUpdate:
        if self._written is not None and part.channel == FileChannel.name and part.info:
            self._written(Path(part.info["path"]).parent, list(self._receivers))
        return part
