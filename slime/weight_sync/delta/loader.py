"""Runs inside the workers of engines: applies a delta to this host's copy of the weights, and opens the copy.

The live weights are loaded from the copy as from any file with all weights. So layers that vLLM fuses or quantises need
no special code.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from slime.protocols import WeightSet
from slime.weight_sync.channel import Part, Worker
from slime.weight_sync.delta.local_copy import CopyVersion, LocalCopy, RefusedError
from slime.weight_sync.delta.refusals import refuse
from slime.weight_sync.file_channel import allowed_path, opened

logger = logging.getLogger(__name__)


class DeltaLoader:
    """Collects the parts of a worker's update."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._series: str | None = None
        self._payloads: dict[str, Tensor] = {}
        self._wanted = 0

    @property
    def _copy(self) -> LocalCopy:
        """Returns this host's copy. By default it is in the directory of weights, under the host's name, because hosts
        may share that directory."""
        root = self._worker.weight_dir
        assert root is not None, "a server has a directory of weights"
        return LocalCopy(self._worker.local_dir or Path(root) / "local" / socket.gethostname())

    def keep(self, part: Part, weights: WeightSet) -> None:
        """Copies a whole set that deltas will follow."""
        if "chain" in weights.settings:
            assert part.path is not None, "whole sets of deltas come in files"
            self._copy.keep(part.path, _make_version(weights))

    @contextmanager
    def whole(self, part: Part, weights: WeightSet) -> Iterator[Part | None]:
        """Yields all weights after the last part has come. Yields None before that, and for a delta that this host
        cannot use. In the second case the trainer gets a message and sends the whole set."""
        if self._series not in (None, part.series):
            self._payloads = {}  # all parts are sent again
        self._series, self._wanted = part.series, weights.settings["tensors"]
        self._payloads |= {name: part.get(name).to("cpu", copy=True) for name in part.shapes}
        if len(self._payloads) < self._wanted:
            yield None
            return
        payloads, self._payloads, self._wanted = self._payloads, {}, 0
        copy = self._copy
        try:
            assert weights.base_version is not None
            copy.patch(payloads, weights.base_version, _make_version(weights))
        except RefusedError as error:
            logger.warning("a delta is refused: %s", error)
            path = allowed_path(weights.settings["refusals"], self._worker.weight_dir)
            refuse(path, f"engine {self._worker.engine}: {error}")
            yield None
            return
        with opened([str(copy.path)], compare=weights.settings["compare"]) as found:
            yield replace(found, origin=f"the trainer's, which are those of {copy.path}")

    def finish(self) -> None:
        """Raises ValueError for a delta with missing parts."""
        if self._wanted:
            raise ValueError(
                f"a delta must have all {self._wanted} tensors, got {len(self._payloads)}; see the log of trainer-0"
            )


def _make_version(weights: WeightSet) -> CopyVersion:
    return CopyVersion(weights.settings["chain"], weights.settings["version"])
