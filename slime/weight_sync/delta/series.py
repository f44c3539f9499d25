"""Chooses which updates of a run are deltas. This is the trainer's side of --update-weight-mode delta.

whole set 0 --> delta 1 (base 0) --> delta 2 (base 1) --> ...          one chain
                                 --> whole set 2, if delta 2 was refused, or some engines lost a part
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from slime.protocols import FULL, WeightSet, WeightUpdate
from slime.weight_sync.channel import Export, WeightChannel
from slime.weight_sync.delta.refusals import new_file
from slime.weight_sync.delta.snapshot import Snapshot
from slime.weight_sync.file_channel import FileChannel
from slime.weight_sync.ranks import is_first


class DeltaSeries:
    """The series of a trainer rank; every call is collective. Deltas go through `channel`, whole sets through `files`.

    All hosts see `directory`. Engines write there that they refuse a delta.
    """

    def __init__(
        self,
        channel: WeightChannel,
        files: FileChannel,
        snapshot: Snapshot,
        directory: Path,
        *,
        compare: bool,
    ) -> None:
        self._channel, self._files, self._snapshot, self._directory = channel, files, snapshot, directory
        self._compare = compare
        self._chain = ""
        self._base: int | None = None
        """Version in the snapshot. None while parts are being returned, and after an interrupted series."""

    def describe_file(self, version: int) -> WeightSet:
        """Returns the record of a file with the current weights, which an engine loads between two updates. Deltas may
        follow the file if it has the weights of the last update."""
        if version != self._base:
            return FULL
        return WeightSet("full", settings={"chain": self._chain, "version": version})

    def parts(self, export: Export, version: int, receivers: dict[str, int]) -> Iterator[WeightUpdate]:
        """Yields the parts of `version`: a delta, or the whole set for the first version and for a version that is
        requested again.

        Without `receivers` no engine has the base, so the whole set is sent.
        """
        base, self._base = self._base, None
        if base is None or base == version or not receivers:
            yield from self._whole(export, version)
        else:
            yield from self._delta(export, base, version, receivers)
        self._base = version

    def _whole(self, export: Export, version: int) -> Iterator[WeightUpdate]:
        self._chain = uuid.uuid4().hex
        weights = WeightSet("full", settings={"chain": self._chain, "version": version})
        taken = Export(None, lambda: self._snapshot.taken(export))
        for part in self._files.parts(taken, version, compare=self._compare, receivers={}):
            yield replace(part, weights=weights)

    def _delta(
        self, export: Export, base: int, version: int, receivers: dict[str, int]
    ) -> Iterator[WeightUpdate]:
        delta = self._snapshot.delta(export)
        weights = WeightSet(
            "delta",
            base,
            settings={
                "chain": self._chain,
                "version": version,
                "tensors": delta.tensors,
                "compare": self._compare,
                "refusals": str(new_file(self._directory)) if is_first() else "",
            },
        )
        payloads = Export(None, lambda: delta.slices)
        for part in self._channel.parts(payloads, version, compare=False, receivers=receivers):
            yield replace(part, weights=weights, lasting=False, density=delta.density)
