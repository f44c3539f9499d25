"""Publishes a tiny Qwen3-MoE to a real vLLM, whose log-probs must equal those of transformers with the new weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_fixtures import publish_checkpoint
from offline_engine import OfflineEngine, offline_engine
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from slime.protocols import WeightUpdate

pytestmark = pytest.mark.e2e

TOKENS = [3, 7, 50, 21, 9, 88, 40, 2, 11]


def make_experts(path: Path, seed: int) -> nn.Module:
    config = Qwen3MoeConfig(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(path)
    return model


def of_transformers(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]


def check_each_live_tensor(engine: OfflineEngine, update: WeightUpdate) -> None:
    """The comparison finds one changed element of the router or of an expert, in the layout of the kernel, and names
    it."""
    layer = engine.worker.model_runner.model.model.layers[1].mlp
    w13, w2 = layer.experts.routed_experts.w13_weight.data, layer.experts.routed_experts.w2_weight.data
    # In the kernel's order, element 2 of an expert is in row 2 of the gate, and the rows of up start at the middle.
    places = {"2.gate": w13[2].flatten()[2:3], "0.up": w13[0].flatten()[-1:], "3.down": w2[3].flatten()[:1]}
    for name, place in places.items():
        before = place.clone()
        place.copy_(torch.nextafter(before, torch.tensor(9.0)))
        with pytest.raises(
            RuntimeError, match=rf"got 1 that differ: model\.layers\.1\.mlp\.experts\.{name}_proj"
        ):
            engine.take(update, load=False)
        place.copy_(before)
    engine.take(update, load=False)
    packed = layer.gate.cpu_linear
    layer.gate.cpu_linear = lambda x, weight, bias: packed(x, weight, bias) + 1
    with pytest.raises(RuntimeError, match=r"got 1 that differ: model\.layers\.1\.mlp\.gate\.weight"):
        engine.take(update, load=False)
    layer.gate.cpu_linear = packed


def test_published_experts_are_computed_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [make_experts(tmp_path / str(seed), seed) for seed in (0, 1)]
    expected = [of_transformers(model) for model in models]
    assert (expected[0] - expected[1]).abs().max() > 0.1
    with offline_engine(tmp_path / "0", tmp_path / "weights", monkeypatch) as engine:
        torch.testing.assert_close(engine.log_probs(TOKENS), expected[0], rtol=0, atol=1e-5)
        for version, model in ((1, 1), (2, 0)):
            update = publish_checkpoint(tmp_path / str(model), tmp_path / "weights", version, checksums=True)
            engine.take(update)
            torch.testing.assert_close(engine.log_probs(TOKENS), expected[model], rtol=0, atol=1e-5)
        check_each_live_tensor(engine, update)
