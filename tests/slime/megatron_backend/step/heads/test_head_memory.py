"""Compares the estimate of a head's memory with the allocations of a real training step on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from allocations import peak_bytes
from megatron_cases import tiny_checkpoint
from trainer_cases import make_config, rank_data

from slime.megatron_backend.step.trainer import MegatronTrainer
from slime.types import Sample

VOCAB, TOKENS, EACH = 8192, 32, 8
"""Samples of 32 tokens, in which all but the first belong to the response; 8 samples are one micro-batch."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("head")
    tiny_checkpoint(root / "policy", vocab_size=VOCAB, hidden_size=16, intermediate_size=16, head_dim=8)
    return root


@pytest.mark.parametrize(
    ("flags", "each"),
    [
        ({}, 16),
        ({"fp32": False}, 16),
        ({"rollout_temperature": 0.7}, 20),
        ({"entropy_coef": 0.1}, 24),
        ({"loss_type": "sft_loss", "fp32": False}, 8),
    ],
)
def test_native_logits(root: Path, tmp_path: Path, flags: dict[str, Any], each: int) -> None:
    config = make_config(root, rlk_fast="off", max_tokens_per_gpu=TOKENS * EACH, **flags)
    trainer = MegatronTrainer(config, 0, 1, init_method=f"file://{tmp_path}/store")
    samples = [
        Sample(
            index=i,
            group_index=i // 2,
            tokens=[(31 * i + 7 * t) % VOCAB for t in range(TOKENS)],
            response_length=TOKENS - 1,
            rollout_log_probs=[-9.0] * (TOKENS - 1),
            reward=float(i % 2),
            status=Sample.Status.COMPLETED,
        )
        for i in range(EACH)
    ]
    data = rank_data(config, samples)
    assert len(data["micro_batch_indices"]) == 1
    try:
        peak = peak_bytes(lambda: trainer.train(0, data), tmp_path / "trace.json")
        (head,) = (item for item in trainer.models.estimate.work if item.name == "head and loss")
    finally:
        trainer.close()
    assert f"x {each} B" in head.arithmetic
    responses = (TOKENS - 1) / TOKENS
    assert peak == pytest.approx(head.bytes * responses, rel=0.06)
