"""Versions of the weights, part by part, by the channel that the engines of the moment need."""

from __future__ import annotations

from collections.abc import Iterator

from slime.protocols import WeightUpdate
from slime.weight_sync.buckets import Export, WeightChannel
from slime.weight_sync.file_channel import FileChannel


class Publisher:
    """One on every trainer rank; all calls are collective. `channel` serves engines that run, `files` those that come
    back. `compare`: engines compare what they hold with what they were given (--check-weight-update-equal)."""

    def __init__(self, export: Export, channel: WeightChannel, files: FileChannel, *, compare: bool) -> None:
        self._export, self._channel, self._files, self._compare = export, channel, files, compare
        self._sending: Iterator[WeightUpdate] | None = None
        self._receivers: dict[str, int] = {}  # of what is being sent

    def next(self, version: int, receivers: dict[str, int]) -> WeightUpdate | None:
        """The next part of the current weights, called `version`; None after the last, and then from the first again.
        rank 0's tells engines what to do. Without `receivers` a file. Other receivers than before get all parts,
        whatever the former ones had."""
        if self._sending is None or self._receivers != receivers:
            self._receivers = receivers
            channel = self._channel if receivers else self._files
            self._sending = channel.parts(self._export, version, compare=self._compare, receivers=receivers)
        part = None
        try:
            part = next(self._sending, None)
        finally:
            if part is None:  # the end, or an error, after which a series cannot go on
                self._sending = None
        return part

    def file(self, version: int) -> WeightUpdate:
        """The current weights in a file, for an engine that starts between two updates."""
        return next(self._files.parts(self._export, version, compare=False, receivers={}))
