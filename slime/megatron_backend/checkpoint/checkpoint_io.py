"""Writes the tensor files of a checkpoint with their checksums, and names the damaged file when a checkpoint does not
load."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedWriter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

from slime.bridges.megatron_versions import common_records
from slime.checkpoints.checkpoint_dir import COMPLETE, existing
from slime.checkpoints.checkpoint_files import FileSum, SummedFile, advice, damage, read_sums, write_sums
from slime.megatron_backend.checkpoint.safe_reading import COMMON_FILE, MetadataReader, read_common, safely
from slime.system.disk_space import DiskSpaceGuard, require_free_bytes

logger = logging.getLogger(__name__)

_FILES = (COMPLETE, COMMON_FILE, ".metadata")


class _SummingFiles(FileSystem):
    """Opens files for writing as SummedFile. `written` has the checksum per closed tensor file."""

    def __init__(self, flag: str) -> None:
        self._flag = flag
        self.written: dict[str, FileSum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        file = Path(path)
        with (
            DiskSpaceGuard(self._flag, file.parent.parent, file.name),
            BufferedWriter(raw := SummedFile(file)) as stream,
        ):
            yield stream
        self.written[file.name] = raw.sum


class DirectSave(TorchDistSaveShardedStrategy):  # type: ignore[misc]  # megatron-core has no types
    """Writes Megatron's torch_dist format in the calling process, and computes the checksums while it writes.

    With a `group`, `save` only copies the tensors to the host, and `finish` writes the files later, in any thread; the
    group is for its collectives. Tensors on the host whose names begin with `fresh` have no other owner and are not
    copied. Raises ValueError if the disk has no room for all ranks' tensors.

    Megatron's own writer starts a manager and forks a process per file, even for a synchronous save. That is not safe
    in a Ray actor with many threads. The files are the same.
    """

    def __init__(
        self, flag: str = "--save", group: dist.ProcessGroup | None = None, fresh: str | None = None
    ) -> None:
        super().__init__("torch_dist", 1)
        self._flag, self._files, self._group, self._fresh = flag, _SummingFiles(flag), group, fresh

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        common = common_records(sharded_state_dict)
        if common is not None and dist.get_rank() == 0:
            torch.save(common, Path(checkpoint_dir) / COMMON_FILE)
        shards = defaultdict(list)
        for item in nested_values(sharded_state_dict):
            if is_main_replica(item.replica_id):
                shards[item.unique_key if isinstance(item, ShardedObject) else item.key].append(item)
        tensors = [
            item.data for items in shards.values() for item in items if isinstance(item, ShardedTensor)
        ]
        of_ranks = [0] * dist.get_world_size()
        dist.all_gather_object(of_ranks, sum(tensor.nbytes for tensor in tensors))
        require_free_bytes(
            self._flag, Path(checkpoint_dir).parent, sum(of_ranks), "the tensors of a checkpoint"
        )
        if self._group is not None:
            for item in (item for items in shards.values() for item in items):
                if isinstance(item, ShardedTensor) and not self._is_free(item):
                    item.data = item.data.to("cpu", copy=True)
        writer = dcp.FileSystemWriter(checkpoint_dir)
        writer.fs = self._files
        self._write = functools.partial(
            dcp.save,
            mcore_to_pyt_state_dict(shards),
            storage_writer=writer,
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=self._group,
        )
        if self._group is None:
            self._write()

    def _is_free(self, item: ShardedTensor) -> bool:
        return self._fresh is not None and item.key.startswith(self._fresh) and item.data.device.type == "cpu"

    def finish(self, path: Path) -> None:
        """Writes checksums.json for all ranks' files under `path`. With a group, it first writes these files.
        Collective."""
        if self._group is not None:
            self._write()
        of_ranks: list[Mapping[str, FileSum]] = [{}] * dist.get_world_size()
        dist.all_gather_object(of_ranks, self._files.written, group=self._group)
        if dist.get_rank() == 0:
            write_sums(path, {name: FileSum(*s) for written in of_ranks for name, s in written.items()})


def verify(directory: Path, iteration: int, choose: str) -> None:
    """Compares the iteration's files with their checksums. Collective: the ranks divide the files among themselves.

    Raises ValueError on all ranks for the first damaged file, with the newest older undamaged iteration. For `choose`,
    see `advice`. A checkpoint of an earlier version has no checksums, which is logged.
    """
    path, found = existing(directory, iteration), None
    try:
        if (sums := read_sums(path)) is None:
            logger.warning("%s has no checksums: an earlier version saved it, so nothing is verified", path)
            return
        largest_first = sorted(sums.items(), key=lambda item: -item[1].bytes)
        found = damage(path, dict(largest_first[dist.get_rank() :: dist.get_world_size()]))
    except (ValueError, OSError) as error:
        found = str(error)
    of_ranks: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, found)
    if first := next((text for text in of_ranks if text), None):
        advice_text = [advice(directory, iteration, choose) if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(advice_text)
        text = f"{first}; {advice_text[0]}"
        raise ValueError(text)


@contextmanager
def explained_reading(directory: Path, iteration: int, choose: str) -> Iterator[None]:
    """Replaces errors of Megatron and torch in the block by a ValueError with the damaged file. In the block, they run
    no code from the checkpoint.

    This is for checkpoints without checksums, whose damage shows up only when they are read.
    """
    path = existing(directory, iteration)
    try:
        with safely():
            yield
    except (Exception, CheckpointException) as error:  # torch's CheckpointException is a BaseException
        if isinstance(error, torch.OutOfMemoryError):
            raise
        if (file := unreadable(path, _FILES)) is not None:
            text = f"{file}; {advice(directory, iteration, choose)}"
            raise ValueError(text) from error
        if isinstance(error, CheckpointException | CheckpointingException | KeyError):
            advice_text = advice(directory, iteration, choose)
            text = f"{path} must hold the tensors of this model and optimizer, got {_cause(error)}; {advice_text}"
            raise ValueError(text) from error
        raise


def _cause(error: BaseException) -> str:
    """Returns one line about an error. torch's error has a traceback per rank."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def unreadable(path: Path, files: tuple[str, ...]) -> str | None:
    """Returns the first file of a checkpoint that is missing, too short or no longer readable. Returns None if all can
    be read. `files` are checked before the tensor files; the last name in it is `.metadata`."""
    file = path
    try:
        for file in (path / name for name in files):
            if file.name == COMPLETE:
                json.loads(file.read_text(encoding="utf-8"))
            elif file.name == COMMON_FILE:
                read_common(path)
        ends: dict[str, int] = {}
        for stored in MetadataReader(path).read_metadata().storage_data.values():
            end = stored.offset + stored.length
            ends[stored.relative_path] = max(end, ends.get(stored.relative_path, 0))
    except Exception as error:  # border: damaged pickles can raise any error
        advice_text = (
            "no such file" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}"
        )
        return f"{file} must be there as it was saved, got {advice_text}"
    return damage(path, {name: FileSum(end, 0) for name, end in ends.items()}, until=0.0)
