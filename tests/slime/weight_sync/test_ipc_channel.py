"""Tests where the buckets of the IPC channel are allocated. tests/gpu/test_ipc_gpu.py maps them in another process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from slime.weight_sync.ipc_channel import plain_segments

read, write = torch._C._accelerator_getAllocatorSettings, torch._C._accelerator_setAllocatorSettings


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = read()
    yield
    write(before)


@pytest.mark.parametrize(
    ("settings", "inside"),
    [
        ("", ""),
        ("max_split_size_mb:512", "max_split_size_mb:512"),
        ("expandable_segments:False", "expandable_segments:False"),
        ("expandable_segments:True", "expandable_segments:False"),
        (
            "max_split_size_mb:512,expandable_segments : True,garbage_collection_threshold:0.8",
            "max_split_size_mb:512,expandable_segments:False,garbage_collection_threshold:0.8",
        ),
    ],
)
def test_buckets_are_not_in_expandable_segments(settings: str, inside: str) -> None:
    """Other settings stay, and an error in the block does not keep the setting off."""
    write(settings)
    with pytest.raises(KeyError), plain_segments():
        assert read() == inside
        raise KeyError
    assert read() == settings
