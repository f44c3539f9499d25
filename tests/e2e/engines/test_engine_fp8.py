"""A real vLLM on CPUs keeps its weights in blocks of fp8 and accepts plain float32 weights from a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from family_engine import TOKENS, trained_models, versions_of
from offline_engine import OfflineEngine, offline_engine
from safetensors.torch import load_file

from slime.protocols import WeightUpdate
from slime.weight_sync.channel import Export, TrainerSettings
from slime.weight_sync.delta.refusals import refusals
from slime.weight_sync.delta.snapshot import Snapshot
from slime.weight_sync.publisher import Publisher

pytestmark = pytest.mark.e2e

ROUNDING = 0.1
"""Largest mean difference over tokens, in nats. The same engine in bfloat16 differs by less than 0.02, and an update
moves the log-probs by 1.7."""


def check_deltas(
    engine: OfflineEngine, weight_dir: Path, updates: Sequence[WeightUpdate], expected: Sequence[torch.Tensor]
) -> None:
    """Sends the same weights as a whole set and as a delta from the other set, with every live tensor compared. Both
    give log-probs that are equal to the bit."""
    whole = []
    for update in updates:
        engine.take(update)
        whole.append(engine.log_probs(TOKENS))
    place, tensors = (
        TrainerSettings(weight_dir / "series", 1 << 20, torch.device("cpu"), 60.0),
        dict[str, torch.Tensor](),
    )
    given = Publisher.of(
        *("disk", place, Export(tensors.items)),
        compare=True,
        snapshot=Snapshot("xor", "sha256"),
    )
    for version, of in enumerate((0, 1, 0)):
        tensors.update(load_file(updates[of].info["path"]))
        part = given.next(version, {"engine-0": 1})
        assert part is not None and part.weights.kind == ("delta" if version else "full")
        assert given.next(version, {"engine-0": 1}) is None
        engine.take(part)
        assert not refusals(part)
        found = engine.log_probs(TOKENS)
        assert (found - expected[of]).abs().mean() < ROUNDING
        assert torch.equal(found, whole[of])
    engine.take(updates[1])


def test_updates_are_quantized_on_arrival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The live weights are the trainer's weights rounded to fp8, with their own scales: before an update, after it,
    and after the first weights again. The log-probs follow. Blocks are ragged here: 128 x 128 of 256 x 128, 192 x
    128 and 128 x 96."""
    trained = trained_models(tmp_path, ["llama"])
    (before, first), (after, second) = versions_of(trained, "llama")
    monkeypatch.setattr(torch._dynamo.config, "disable", True)  # vLLM compiles its quantisation
    settings = {"dtype": "bfloat16", "quantization": "fp8_per_block"}
    with offline_engine(tmp_path / "llama", tmp_path / "llama-weights", monkeypatch, **settings) as engine:
        model = engine.worker.model_runner.model
        layer = model.model.layers[0]
        for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj):
            assert linear.weight.dtype == torch.float8_e4m3fn
        assert model.lm_head.weight.dtype == torch.bfloat16
        assert (engine.log_probs(TOKENS) - before).abs().mean() < ROUNDING
        for update, expected, old in ((second, after, before), (first, before, after)):
            scales = layer.mlp.gate_up_proj.weight_scale_inv.clone()
            engine.take(update)  # with checksums, this compares every live tensor
            assert (engine.log_probs(TOKENS) - expected).abs().mean() < ROUNDING
            assert (engine.log_probs(TOKENS) - old).abs().mean() > 10 * ROUNDING
            assert not torch.equal(layer.mlp.gate_up_proj.weight_scale_inv, scales)
        check_deltas(engine, tmp_path / "llama-weights", (first, second), (before, after))
        with pytest.raises(RuntimeError, match="live weights must equal .*proj.weight"):
            engine.take(first, load=False)
        engine.take(first)
        with pytest.raises(RuntimeError, match="live weights must equal .*proj.weight"):
            engine.take(second, load=False)
        layer.mlp.down_proj.weight_scale_inv.mul_(4)
        with pytest.raises(RuntimeError, match="got 1 that differ: model.layers.0.mlp.down_proj.weight"):
            engine.take(first, load=False)
