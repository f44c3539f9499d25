"""The file channel: each version of the weights is a folder that trainer and engines both see (/dev/shm on one host, a
network disk for several hosts). The folder has one safetensors file, so that any engine can load it as a model. All
trainer ranks write the file together, each rank its own slices (slime.weight_sync.sliced_file).

The engine's side rejects files outside its weight directory. With --check-weight-update-equal it also rejects files
whose tensors differ from those that the trainer hashed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open

from slime.checkpoints.hf_config import OpenFile
from slime.protocols import WeightUpdate
from slime.system.disk_space import DiskSpaceGuard, require_free_bytes
from slime.weight_sync.channel import Export, Info, Part, TrainerSettings, WeightChannel, Worker
from slime.weight_sync.ranks import everywhere, is_first, on_all_ranks
from slime.weight_sync.sliced_file import SlicedFile, octets
from slime.weight_sync.slices import OfAllRanks, Slice, Where
from slime.weight_sync.variables import WEIGHT_DIR_VARIABLE

FILE = "model.safetensors"
Digests = dict[str, list[tuple[Where, str]]]
"""Maps the HF name of a tensor to the position and `tensor_digest` per published slice."""


def tensor_digest(tensor: torch.Tensor) -> str:
    """Returns the sha256 hex digest of the tensor's bytes in row-major order. Two digests are equal exactly when dtype,
    order and bits are equal."""
    return hashlib.sha256(octets(tensor).data).hexdigest()


class FileChannel(WeightChannel):
    """Publishes weights as `DIR/{stem}-{version}/model.safetensors` and keeps the newest two versions, or all versions.

    An engine that restarts while a new version is published loads the previous version.
    """

    name = "disk"

    def __init__(
        self, directory: str | os.PathLike[str], *, keep_files: bool = False, stem: str = "weights"
    ) -> None:
        self.directory, self._keep_files, self.stem = Path(directory), keep_files, stem
        self._of_update = OfAllRanks(
            lambda of_ranks: [position for positions in of_ranks for position in positions]
        )
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = self.directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise ValueError(
                f"--weight-dir must be a directory of this user that nobody else can write to, got {self.directory} "
                f"(owner {found.st_uid}, mode {stat.filemode(found.st_mode)}); engines load the files of this directory"
            )

    @classmethod
    def on_trainer(cls, settings: TrainerSettings) -> FileChannel:
        return cls(settings.directory, keep_files=settings.keep_files, stem=settings.stem)

    @classmethod
    def on_engine(cls, worker: Worker) -> FileReceiver:
        return FileReceiver(worker)

    def parts(
        self, export: Export, version: int, *, compare: bool, receivers: dict[str, int]
    ) -> Iterator[WeightUpdate]:
        """Yields one part, the whole file."""
        yield self.publish(export.slices(), version, checksums=compare)

    def publish(self, slices: Iterable[Slice], version: int, *, checksums: bool = False) -> WeightUpdate:
        """Writes all ranks' slices as `version` and returns the update that engines load. Collective.

        The file gets its name when it is complete. A rank reads one slice at a time. `checksums` means that the update
        holds each slice's sha256 digest, and engines compare their live weights with the file.
        """
        mine = list(slices)
        path = self.directory / f"{self.stem}-{version}" / FILE
        file = SlicedFile(path.with_suffix(".partial"), self._of_update.get([each.position for each in mine]))
        what = f"version {version} of the weights"
        digests: Digests = {}
        try:
            with on_all_ranks(f"write {what}"):
                if is_first():
                    require_free_bytes("--weight-dir", self.directory, file.weights_bytes, what)
                    with DiskSpaceGuard("--weight-dir", self.directory, what):
                        path.parent.mkdir(exist_ok=True, mode=0o700)
                        file.create()
            with on_all_ranks(f"write {what}"), DiskSpaceGuard("--weight-dir", self.directory, what):
                for position, data in file.write(mine):
                    if checksums:
                        of_tensor = digests.setdefault(position.name, [])
                        of_tensor.append((position.where, hashlib.sha256(data.data).hexdigest()))
            if is_first():
                os.replace(file.path, path)
        finally:
            if is_first():
                file.path.unlink(missing_ok=True)
                with suppress(OSError):  # a failed write leaves the folder empty
                    path.parent.rmdir()
        found = everywhere(digests)
        if not is_first():
            return WeightUpdate(version, self.name, {}, size_bytes=file.weights_bytes)
        self._remove_older(version)
        info: dict[str, object] = {"path": str(path)}
        if checksums:
            info["checksums"] = joined(found)
        return WeightUpdate(version, self.name, info, size_bytes=file.weights_bytes)

    def _remove_older(self, version: int) -> None:
        if self._keep_files:
            return
        start = f"{self.stem}-"
        found = {f.parent.name.removeprefix(start): f for f in self.directory.glob(f"{start}*/{FILE}")}
        versions = {
            int(end): file for end, file in found.items() if end.isdigit()
        }  # other files have a longer stem
        previous = max((v for v in versions if v < version), default=version)
        for other in versions.keys() - {version, previous}:
            shutil.rmtree(versions[other].parent)


class FileReceiver:
    """The engine worker's side. Its message is {"path", "checksums" (for all tensors; then live weights are compared),
    "load"}.

    `path` is a safetensors file, or a folder with several such files that together hold all weights.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @contextmanager
    def receive(self, info: Info) -> Iterator[Part]:
        """Opens the part. Raises ValueError for a file outside the weight directory."""
        path, checksums = info["path"], info.get("checksums")
        with opened(_files(path, self._worker.weight_dir), compare=checksums is not None) as part:

            def verify() -> None:
                if checksums is not None:
                    require_checksums(part.shapes, part.get, checksums)

            yield replace(
                part, load=info.get("load", True), path=str(path), origin=f"those of {path}", verify=verify
            )


@contextmanager
def opened(files: Iterable[str], *, compare: bool) -> Iterator[Part]:
    """Opens `files` (safetensors), which together hold all weights, as one part."""
    with ExitStack() as stack:
        holders: dict[str, OpenFile] = {}
        for each in files:
            file = stack.enter_context(safe_open(each, framework="pt", device="cpu"))
            holders |= dict.fromkeys(file.keys(), file)
        yield Part(
            {name: file.get_slice(name).get_shape() for name, file in holders.items()},
            lambda name: holders[name].get_tensor(name),
            load=True,
            compare=compare,
            whole=True,
        )


def _files(path: str, root: str | None) -> list[str]:
    """Returns the safetensors files that `path` names. All must be under `root`."""
    allowed = Path(allowed_path(path, root))
    if not allowed.is_dir():
        return [str(allowed)]
    found = [allowed_path(str(file), root) for file in sorted(allowed.glob("*.safetensors"))]
    if not found:
        raise ValueError(
            f"path must have a safetensors file, got {path} without one; name the folder of the weights"
        )
    return found


def allowed_path(path: str, root: str | None) -> str:
    """Returns `path` with links resolved. Raises ValueError unless the result is under `root`."""
    resolved = os.path.realpath(path)
    if not root or not resolved.startswith(os.path.realpath(root) + os.sep):
        raise ValueError(f"path must lie under {WEIGHT_DIR_VARIABLE} ({root}), got {path}")
    return resolved


def joined(of_ranks: Iterable[Digests]) -> Digests:
    """Merges the ranks' digests."""
    found: Digests = {}
    for digests in of_ranks:
        for name, of_tensor in digests.items():
            found.setdefault(name, []).extend(of_tensor)
    return found


def require_checksums(
    names: Iterable[str],
    get: Callable[[str], torch.Tensor],
    checksums: Mapping[str, Iterable[tuple[Where, str]]],
) -> None:
    """Raises ValueError unless the tensors `names` are the tensors of `checksums` and their slices have these
    digests."""
    named = set(names)
    wrong = named ^ checksums.keys()
    wrong |= {name for name in named & checksums.keys() if not _has(get(name), checksums[name])}
    if wrong:
        raise ValueError(
            f"the weight file must hold what the trainer hashed, got {len(wrong)} tensors that differ: "
            f"{', '.join(sorted(wrong)[:8])} (--check-weight-update-equal)"
        )


def _has(tensor: torch.Tensor, digests: Iterable[tuple[Where, str]]) -> bool:
    return all(
        tensor_digest(tensor[tuple(slice(start, end) for start, end in where)]) == digest
        for where, digest in digests
    )
