"""The file channel: every version of the weights is one safetensors file that trainer and engines both see (/dev/shm on
one host, a network disk for external engines). Owns the files; loading them is the engine's business.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from slime.protocols import WeightUpdate
from slime.weight_sync.buckets import Export


def tensor_digest(tensor: torch.Tensor) -> str:
    """sha256 hex digest of the tensor's bytes in row-major order; equal exactly when dtype, order and bits are."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


class FileChannel:
    """Publishes weights as `DIR/weights-{version}.safetensors`; the newest two versions are kept.

    Two, because an engine that restarts while a new version is being published still loads the one before.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = self.directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise ValueError(
                f"--weight-dir must be a directory of this user that nobody else can write to, got {self.directory} "
                f"(owner {found.st_uid}, mode {stat.filemode(found.st_mode)}); engines load what lies there"
            )

    def parts(
        self, export: Export, version: int, *, compare: bool, receivers: dict[str, int]
    ) -> Iterator[WeightUpdate]:
        """One part, the whole file. Collective over all ranks; rank 0 writes, the others take part in the export and
        have nothing to tell."""
        if dist.get_rank() == 0:
            yield self.publish(export(), version, checksums=compare)
        else:
            for _ in export():
                pass
            yield WeightUpdate(version, {})

    def publish(
        self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, *, checksums: bool = False
    ) -> WeightUpdate:
        """Write all `(HF name, full tensor)` pairs as `version` and return what engines need to load it.

        The file appears under its name only when complete. Holds one copy of the model in host memory.
        """
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
        path = self._path(version)
        partial = path.with_suffix(".partial")
        save_file(state, partial)
        os.replace(partial, path)
        versions = {
            int(file.stem.removeprefix("weights-")): file
            for file in self.directory.glob("weights-*.safetensors")
        }
        previous = max((v for v in versions if v < version), default=version)
        for other in versions.keys() - {version, previous}:
            versions[other].unlink()
        digests = {name: tensor_digest(tensor) for name, tensor in state.items()} if checksums else None
        return WeightUpdate(version=version, info={"path": str(path)}, checksums=digests)

    def _path(self, version: int) -> Path:
        return self.directory / f"weights-{version}.safetensors"
