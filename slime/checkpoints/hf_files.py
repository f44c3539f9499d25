"""Reads and writes the tensors of a directory of safetensors files, one tensor at a time."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from slime.checkpoints.checkpoint_dir import HF_INDEX, HF_SINGLE
from slime.checkpoints.hf_config import MAPPED_BYTES, OpenFile, Slices, open_tensor, open_weights, read_index
from slime.models.slices import Stored, Where
from slime.records.errors import FlagError


class Files:
    """The tensors of a safetensors checkpoint. The first read of a tensor opens its file.

    `read_bytes` is the number of bytes that were read. Tensors share memory with the mapped files, whose pages count as
    memory of the process. So the files are closed after `MAPPED_BYTES` were read.
    """

    def __init__(self, checkpoint_dir: Path) -> None:
        self._files = _find_files(checkpoint_dir)
        self._handles: dict[Path, OpenFile] = {}
        self._mapped, self._keep = 0, False
        self.read_bytes = 0

    def names(self) -> set[str]:
        return set(self._files)

    def get(self, name: str) -> Stored:
        if self._mapped > MAPPED_BYTES and not self._keep:
            self._handles.clear()
            self._mapped = 0
        file = self._files[name]
        if file not in self._handles:
            self._handles[file] = open_weights(file, "pt")
        return _InFile(self, open_tensor(self._handles[file], name, file))

    def open(self, names: Iterable[str]) -> None:
        """Opens the files of `names` now, and keeps all files open from then on."""
        self._keep = True
        for file in {self._files[name] for name in names}:
            self._handles[file] = open_weights(file, "pt")

    def find_file(self, name: str) -> str:
        return str(self._files[name])

    def count(self, read: Tensor) -> Tensor:
        self.read_bytes += read.nbytes
        self._mapped += read.nbytes
        return read


class _InFile:
    """A tensor of a file (slime.models.slices.Stored)."""

    def __init__(self, files: Files, stored: Slices) -> None:
        self._files, self._stored = files, stored

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._stored.get_shape())

    def __getitem__(self, where: Where) -> Tensor:
        return self._files.count(self._stored[where])


def _find_files(checkpoint_dir: Path) -> dict[str, Path]:
    """Returns HF tensor name -> the safetensors file that holds the tensor."""
    if (index := read_index(checkpoint_dir)) is not None:
        return {name: checkpoint_dir / file for name, file in index.items()}
    single = checkpoint_dir / HF_SINGLE
    if not single.is_file():
        raise FlagError("--hf-checkpoint", f"hold {HF_SINGLE} or {HF_INDEX}", f"neither in {checkpoint_dir}")
    with open_weights(single, "pt") as file:
        return dict.fromkeys(file.keys(), single)


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes one safetensors file, with the mode that the umask allows. safetensors itself makes files that only their
    owner can read."""
    save_file(dict(tensors), path, metadata={"format": "pt"})
    with open(path.with_name(path.name + ".mode"), "xb") as like:
        mode = os.fstat(like.fileno()).st_mode
        os.unlink(like.name)
    path.chmod(stat.S_IMODE(mode))


def write_shards(tensors: Iterator[tuple[str, Tensor]], out_dir: Path, max_shard_bytes: int) -> None:
    """Writes tensors to safetensors files of at most `max_shard_bytes`, with an index if there are several files."""
    for old in [*out_dir.glob("*.safetensors"), out_dir / HF_INDEX]:
        old.unlink(missing_ok=True)
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = pending_bytes = 0

    def flush() -> None:
        write_tensors(pending, out_dir / f"part-{len(shards):05d}.safetensors")
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if pending and pending_bytes + tensor.nbytes > max_shard_bytes:
            flush()
            pending_bytes = 0
        pending[name] = tensor.cpu().contiguous()
        pending_bytes += tensor.nbytes
        total += tensor.nbytes
    flush()
    if len(shards) == 1:
        (out_dir / "part-00000.safetensors").rename(out_dir / HF_SINGLE)
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (out_dir / f"part-{i:05d}.safetensors").rename(out_dir / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out_dir / HF_INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
