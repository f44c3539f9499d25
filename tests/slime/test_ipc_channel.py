"""How weights are dealt into buckets; the memory itself crosses between processes in tests/gpu/test_ipc_gpu.py."""

from __future__ import annotations

import torch

from slime.weight_sync.ipc_channel import ALIGNMENT, _grouped


def named(*sizes: int) -> list[tuple[str, torch.Tensor]]:
    return [(f"w{i}", torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate(sizes)]


def names(sizes: tuple[int, ...], limit: int) -> list[list[str]]:
    return [[name for name, _ in group] for group in _grouped(named(*sizes), limit)]


def test_groups_stay_below_the_limit_in_order():
    assert names((256, 256, 256), 512) == [["w0", "w1"], ["w2"]]
    assert names((300, 200), 512) == [["w0"], ["w1"]], "each begins at a multiple of 256"
    assert names((100, 100), 2 * ALIGNMENT) == [["w0", "w1"]]
    assert names((), 512) == []


def test_a_tensor_above_the_limit_goes_alone():
    assert names((10, 4096, 10, 10), 1024) == [["w0"], ["w1"], ["w2", "w3"]]
