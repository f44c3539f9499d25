"""The index of a checkpoint with generated fields is read, or it is an error with the name of the file."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import torch
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from slime.megatron_backend.checkpoint.checkpoint_io import unreadable
from slime.megatron_backend.checkpoint.safe_reading import read_common

LEAVES = (
    st.none() | st.integers(-(2**40), 2**40) | st.text(max_size=4) | st.just("__0_0.distcp") | st.just("../x")
)
PLACES = st.builds(_StorageInfo, LEAVES, LEAVES, LEAVES)
NAMES = st.builds(MetadataIndex, LEAVES) | LEAVES
INDEXES = st.builds(
    Metadata,
    st.dictionaries(LEAVES, st.builds(BytesStorageMetadata) | LEAVES, max_size=2) | LEAVES,
    planner_data=LEAVES,
    storage_data=st.dictionaries(NAMES, PLACES | LEAVES, max_size=2) | LEAVES,
)


def test_any_index_is_read_or_refused(fuzz: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(bytes(64))

    def check(index: object) -> None:
        (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
        said = unreadable(tmp_path, (".metadata",))
        assert said is None or str(tmp_path) in said

    fuzz(check, INDEXES | LEAVES)


def test_any_records_are_read_or_refused(fuzz: Callable[..., None], tmp_path: Path) -> None:
    values = st.recursive(
        LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(LEAVES, inner, max_size=2)
    )

    def check(record: object) -> None:
        torch.save(record, tmp_path / "common.pt")
        try:
            assert read_common(tmp_path) == record
        except pickle.UnpicklingError:
            assert not isinstance(record, dict)

    fuzz(check, values)
