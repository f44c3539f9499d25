"""The ranks of an engine on CPUs share the experts. Log-probs equal those of transformers before and after updates of
live weights, and each rank compares its own experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fixtures import publish_checkpoint
from offline_engine import offline_engine
from test_engine_experts import TOKENS, make_experts, of_transformers

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def experts_of_a_layer(worker: Any) -> int:
    experts = worker.model_runner.model.model.layers[1].mlp.experts.routed_experts
    return int(experts.w13_weight.shape[0])


def test_two_ranks_share_the_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [make_experts(tmp_path / str(seed), seed) for seed in (0, 1)]
    expected = [of_transformers(model) for model in models]
    weights = tmp_path / "weights"
    with offline_engine(
        tmp_path / "0", weights, monkeypatch, tensor_parallel_size=2, enable_expert_parallel=True
    ) as engine:
        assert engine.on_workers(experts_of_a_layer) == [2, 2]
        torch.testing.assert_close(engine.log_probs(TOKENS), expected[0], rtol=0, atol=1e-5)
        for version, model in ((1, 1), (2, 0)):
            engine.take(publish_checkpoint(tmp_path / str(model), weights, version, checksums=True))
            torch.testing.assert_close(engine.log_probs(TOKENS), expected[model], rtol=0, atol=1e-5)
        update = publish_checkpoint(tmp_path / "1", weights, 3, checksums=True)
        with pytest.raises(Exception, match="live weights must equal"):
            engine.take(update, load=False)
