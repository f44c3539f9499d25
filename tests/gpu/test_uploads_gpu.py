"""Tests that the host queues the inputs of a micro-batch without waiting for a GPU."""

from __future__ import annotations

import pytest
import torch

from slime.data.packing import pack
from slime.megatron_backend.model.attention import packed_layout
from slime.types import TrainData

pytestmark = pytest.mark.gpu


def test_the_host_does_not_wait_for_a_packed_micro_batch() -> None:
    lengths, responses = [700, 300, 24], [200, 100, 8]
    data: TrainData = {
        "tokens": [torch.arange(length) for length in lengths],
        "response_lengths": responses,
        "loss_masks": [torch.ones(length, device="cuda") for length in responses],
    }
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = pack(data, [0, 1, 2], ["loss_masks"], device=torch.device("cuda"))
        layout = packed_layout(batch.part, batch.tokens.device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert batch.tokens.tolist() == [token for length in lengths for token in range(length)]
    assert layout.cu_seqlens_q.tolist() == [0, 700, 1000, 1024]
    assert layout.positions.tolist() == batch.tokens.tolist()
