"""The newest weights of a run, in a file of its queue: the trainer's driver writes it, and rollout hosts read it.

The file names a folder of weights that trainer and hosts share. A host moves the weights into its engines as a trainer
does, so its engines take requests with whole versions only.
"""

from __future__ import annotations

import uuid
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path

from slime.protocols import WeightSet, WeightUpdate
from slime.rollout.straw.folder import Plain, read_plain, write_plain


def announce(path: Path, update: WeightUpdate) -> None:
    """Writes the weights that the trainer's own engines have loaded."""
    fields = {"version": update.version, "channel": update.channel, "info": dict(update.info)}
    weights = asdict(update.weights)
    write_plain(path, {"id": uuid.uuid4().hex, **fields, "weights": weights, "size_bytes": update.size_bytes})


@dataclass
class AnnouncedWeights:
    """Implements slime.protocols.WeightSource with the weights of another process's trainer."""

    path: Path
    _newest: Plain = field(default_factory=dict)
    _sent_to: dict[str, int] | None = None

    def look(self) -> bool:
        """Returns True if there are other weights than at the last look. A run that has started again publishes its
        versions again, with other weights."""
        found = read_plain(self.path)
        if found is None or found["id"] == self._newest.get("id"):
            return False
        self._newest, self._sent_to = found, None
        return True

    @property
    def version(self) -> int:
        return int(self._newest["version"])

    def next_weights(self, version: int, receivers: dict[str, int]) -> Future[WeightUpdate | None]:
        if self._sent_to == receivers:
            self._sent_to = None
            return _done(None)
        self._sent_to = dict(receivers)
        return _done(self._update())

    def weights_file(self) -> Future[WeightUpdate]:
        found: Future[WeightUpdate] = Future()
        found.set_result(self._update())
        return found

    def _update(self) -> WeightUpdate:
        newest = self._newest
        weights = WeightSet.of(newest["weights"])
        return WeightUpdate(
            self.version, newest["channel"], newest["info"], weights=weights, size_bytes=newest["size_bytes"]
        )


def _done(update: WeightUpdate | None) -> Future[WeightUpdate | None]:
    future: Future[WeightUpdate | None] = Future()
    future.set_result(update)
    return future
