"""Reads the files of checkpoints without running code in them. No other code in this project unpickles a checkpoint.

torch and Megatron unpickle a checkpoint's index (`.metadata`) and its objects in full. A person who can write the
folder could therefore run code as the user. `MetadataReader` reads the index with only the classes of an index.
`SafePlanner` reads objects with only plain values and tensors. `read_common` reads the records of `common.pt`. `safely`
makes Megatron's own functions use them.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.strategies import torch as strategies
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from slime import bridges
from slime.bridges.megatron import SAFE_READING

COMMON_FILE = "common.pt"
"""File with the records without tensors in this project's checkpoints."""

_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "ChunkStorageMetadata", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(str(x).removeprefix("torch.") for x in vars(torch).values() if isinstance(x, torch.dtype))},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "Path"},
    "collections": {"OrderedDict"},
}  # fmt: skip
"""Classes in the index of tensors. Any other name in its pickle could run code."""


class _NotRead:
    """Replaces any other object in the index, such as the plans that Megatron saves with it."""

    def __new__(cls, *unused: Any, **also_unused: Any) -> _NotRead:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, item: Any) -> None: ...


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = name in _METADATA_CLASSES.get(module, ())
        return super().find_class(module, name) if known else _NotRead


class MetadataReader(dcp.FileSystemReader):
    """torch's reader, but its index cannot run code, and the tensors are read in the order of the files."""

    def read_metadata(self, *unused: Any, **also_unused: Any) -> Metadata:
        """Returns the index, which is read once: a model is also read parameter by parameter."""
        return self._metadata

    @cached_property
    def _metadata(self) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata) or not is_index(metadata):
            raise pickle.UnpicklingError("it is no index of tensors")
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def prepare_local_plan(self, plan: dcp.LoadPlan) -> dcp.LoadPlan:
        def locate(item: Any) -> tuple[str, int]:
            stored = self.storage_data[item.storage_index]
            return stored.relative_path, stored.offset

        plan.items.sort(key=locate)
        return plan


def is_index(metadata: Metadata) -> bool:
    """Returns whether an index has the fields that readers use, with their types."""
    tensors, locations = metadata.state_dict_metadata, metadata.storage_data
    return (
        isinstance(tensors, dict)
        and all(
            isinstance(name, str) and isinstance(stored, TensorStorageMetadata | BytesStorageMetadata)
            for name, stored in tensors.items()
        )
        and isinstance(locations, dict)
        and all(
            isinstance(index, MetadataIndex) and _is_location(location)
            for index, location in locations.items()
        )
    )


def _is_location(location: object) -> bool:
    """Returns whether `location` names bytes of a file in the folder of the checkpoint."""
    numbers = (getattr(location, "offset", None), getattr(location, "length", None))
    name = getattr(location, "relative_path", None)
    return (
        all(isinstance(number, int) and number >= 0 for number in numbers)
        and isinstance(name, str)
        and Path(name).name == name
    )


class SafePlanner(strategies.MCoreLoadPlanner):  # type: ignore[misc]  # megatron-core has no types
    """Megatron's planner, but it loads only objects of plain values and tensors."""

    def load_bytes(self, read_item: object, value: io.BytesIO) -> None:
        torch.load(value, map_location="cpu", weights_only=True)  # ok: raises before code could run
        value.seek(0)
        super().load_bytes(read_item, value)


def read_common(path: Path) -> dict[str, Any]:
    """Returns the records of `common.pt` in the folder `path`. Raises any error for a file that is damaged or could run
    code."""
    found = torch.load(path / COMMON_FILE, map_location="cpu", weights_only=True)  # ok: runs no code
    if not isinstance(found, dict):
        raise pickle.UnpicklingError("it is no record of a checkpoint")
    return found


_of_megatron = threading.Lock()


@contextmanager
def safely() -> Iterator[None]:
    """Makes Megatron's functions read checkpoints with the classes of this file in the block. Both names that it
    replaces exist in the versions 0.16 to 0.19."""
    with _of_megatron, bridges.applied(*SAFE_READING):
        yield


def metadata_reader(_: object) -> Callable[..., MetadataReader]:
    """Replaces Megatron's function that creates a reader of a folder."""
    return lambda path, *unused, **also_unused: MetadataReader(path)


def safe_planner(_: object) -> type[SafePlanner]:
    """Replaces Megatron's planner."""
    return SafePlanner
