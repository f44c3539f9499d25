"""Tests where the buckets of the IPC channel are allocated. tests/gpu/test_ipc_gpu.py maps them in another process."""

from __future__ import annotations

import pytest
import torch

from slime.weight_sync.ipc_channel import ALLOCATOR_VARIABLES, plain_segments


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, []),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, []),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, []),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512,expandable_segments: true"},
            [
                "max_split_size_mb:512,expandable_segments:False",
                "max_split_size_mb:512,expandable_segments: true",
            ],
        ),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            ["expandable_segments:False", "expandable_segments:True"],
        ),
        (
            {
                "PYTORCH_ALLOC_CONF": "max_split_size_mb:512",
                "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            },
            [],
        ),
    ],
)
def test_buckets_are_not_in_expandable_segments(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: list[str]
) -> None:
    """Other settings stay, and an error in the block does not keep the setting off."""
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    with pytest.raises(KeyError), plain_segments():
        assert settings == expected[:1]
        raise KeyError
    assert settings == expected
