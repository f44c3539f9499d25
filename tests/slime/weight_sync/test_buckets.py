"""Tests the distribution of weights over buckets."""

from __future__ import annotations

import torch

from slime.weight_sync.buckets import ALIGNMENT, compute_bucket_bytes, fill, grouped


def named(*sizes: int) -> list[tuple[str, torch.Tensor]]:
    return [(f"w{i}", torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate(sizes)]


def names(sizes: tuple[int, ...], limit: int) -> list[list[str]]:
    return [[name for name, _ in group] for group in grouped(named(*sizes), limit)]


def test_groups_stay_below_the_limit_in_order():
    assert names((256, 256, 256), 512) == [["w0", "w1"], ["w2"]]
    assert names((300, 200), 512) == [["w0"], ["w1"]], "each begins at a multiple of 256"
    assert names((100, 100), 2 * ALIGNMENT) == [["w0", "w1"]]
    assert names((), 512) == []


def test_a_tensor_above_the_limit_goes_alone():
    assert names((10, 4096, 10, 10), 1024) == [["w0"], ["w1"], ["w2", "w3"]]


def test_a_bucket_says_where_everything_is():
    tensors = [("a", torch.arange(3.0)), ("b", torch.ones(2, 5, dtype=torch.bfloat16))]
    assert compute_bucket_bytes(tensors) == 512
    bucket = torch.full((600,), 7, dtype=torch.uint8)
    assert fill(bucket, tensors) == [("a", "float32", [3], 0), ("b", "bfloat16", [2, 5], 256)]
    assert bucket[:12].view(torch.float32).tolist() == [0.0, 1.0, 2.0]
    assert bucket[256:276].view(torch.bfloat16).tolist() == [1.0] * 10
    assert bucket[12:256].unique().tolist() == bucket[276:].unique().tolist() == [7]
