"""The outputs of frozen vision towers for the images of a rollout.

A frozen tower returns the same rows for an image in every pass of a rollout. A trainer rank keeps
them on the host until the rollout is trained, while they fit in `CACHE_BYTES`. An image beyond this goes through the
tower again: in a pass over all samples, each image is used equally often, so replacing another one would save nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from slime.plan.tower import CACHE_BYTES


class TowerCache:
    """Tensors by tower and by the digest of an image. The tensors are on the host."""

    def __init__(self, most_bytes: int = CACHE_BYTES) -> None:
        self._most_bytes = most_bytes
        self.clear()

    def clear(self) -> None:
        """Removes all outputs."""
        self._found: dict[tuple[nn.Module, str], tuple[Tensor, ...]] = {}
        self._bytes = 0

    def find(self, tower: nn.Module, key: str) -> tuple[Tensor, ...] | None:
        """Returns the output of a tower for an image, or None."""
        return self._found.get((tower, key))

    def add(self, tower: nn.Module, key: str, output: Sequence[Tensor]) -> None:
        """Stores the output of a tower for an image, if it fits."""
        size = sum(part.nbytes for part in output)
        if self._bytes + size > self._most_bytes:
            return
        self._bytes += size
        self._found[tower, key] = tuple(part.to("cpu", copy=True) for part in output)
