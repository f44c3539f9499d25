"""Two workers of a real vLLM on CPUs share a quantised checkpoint, by tensor parallelism or by expert parallelism. They
keep its scheme, take updates and deltas in this scheme, and compare their live weights with the updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_engine import TOKENS, train, versions_of
from offline_engine import offline_engine
from rank_processes import on_ranks
from test_engine_quantized import AGREES, FP8_INPUTS, MOE, ROUNDED, check_deltas, quantized_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SHAPE: dict[str, Any] = MOE | {"head_dim": 128}
"""A rank has whole blocks of fp8 in each matrix, except in the experts' matrices: there it has half of a block."""


def local_experts(worker: Any) -> tuple[int, ...]:
    """Returns the shape of a rank's first matrices of experts."""
    experts = worker.model_runner.model.model.layers[1].mlp.experts.routed_experts
    weight = getattr(experts, "w13_weight", None)
    return tuple((experts.w13_weight_packed if weight is None else weight).shape)


def damage(worker: Any) -> None:
    """Changes one scale of an expert on the second rank."""
    experts = worker.model_runner.model.model.layers[1].mlp.experts.routed_experts
    scales = getattr(experts, "w2_weight_scale_inv", None)
    if worker.rank == 1:
        (experts.w2_weight_scale if scales is None else scales).data[1, 0, 0] *= 2


@pytest.mark.parametrize(
    ("scheme", "by_experts", "local"),
    [
        ("fp8", False, (8, 128, 128)),
        ("fp8", True, (4, 256, 128)),
        ("int4", False, (8, 128, 16)),
        ("int4", True, (4, 256, 16)),
    ],
)
def test_two_ranks_share_a_quantized_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, by_experts: bool, local: tuple[int, ...]
) -> None:
    quantized_checkpoint(tmp_path / "tiny", "qwen3_moe", scheme, SHAPE)
    on_ranks(train, tmp_path, ["tiny"], "float32", True, ranks=1)
    (before, first), (after, second) = versions_of(
        (tmp_path, torch.load(tmp_path / "trained.pt", weights_only=False)), "tiny"
    )
    weights = tmp_path / "tiny-weights"
    parallel: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": by_experts}
    with offline_engine(tmp_path / "tiny", weights, monkeypatch, dtype="bfloat16", **parallel) as engine:
        assert engine.on_workers(local_experts) == [local, local]
        start, agrees = engine.log_probs(TOKENS), AGREES if scheme == "int4" else FP8_INPUTS
        assert (start - before).abs().mean() < agrees
        for update, expected, bound in ((first, before, agrees), (second, after, ROUNDED[scheme])):
            engine.take(update)
            assert (engine.log_probs(TOKENS) - expected).abs().mean() < bound
        check_deltas(engine, weights, first, second)
        engine.take(first)
        assert (engine.log_probs(TOKENS) - start).abs().max() < agrees
        engine.on_workers(damage)
        differs = "live weights must equal the trainer's, got 1 that differ: model.layers.1.mlp.experts"
        with pytest.raises(Exception, match=differs):
            engine.take(first, load=False)
