"""Tests an adapter in a real engine: the engine's log-probs equal the trainer's, and an update replaces the adapter
in place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_fixtures import make_checkpoint
from offline_engine import OfflineEngine, offline_engine

from slime.models.lora import Lora
from slime.protocols import CHECKPOINT, WeightSet, WeightUpdate
from slime.weight_sync.channel import Part
from slime.weight_sync.file_channel import FileChannel
from slime.weight_sync.slices import whole_slices
from vime.vllm.worker.adapter_loader import AdapterLoader

LORA = Lora(8, 12.0)
TOKENS = [5, 9, 17, 30, 22, 8, 41, 12, 3, 19]
MODULES = {
    "self_attn.q_proj": (64, 128),
    "self_attn.k_proj": (64, 64),
    "self_attn.v_proj": (64, 64),
    "self_attn.o_proj": (128, 64),
    "mlp.gate_proj": (64, 128),
    "mlp.up_proj": (64, 128),
    "mlp.down_proj": (128, 64),
}
"""Module of a layer -> its numbers of inputs and outputs."""


def adapter(seed: int, modules: dict[str, tuple[int, int]] = MODULES) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for layer in range(2):
        for module, (inputs, outputs) in modules.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            found[f"{name}.lora_A.weight"] = torch.randn(LORA.rank, inputs, generator=generator) / 8
            found[f"{name}.lora_B.weight"] = torch.randn(outputs, LORA.rank, generator=generator) / 8
    return found


def update(directory: Path, version: int, tensors: dict[str, torch.Tensor], **record: object) -> WeightUpdate:
    settings = LORA.peft("base", {name.split(".lora_")[0] for name in tensors})
    part = FileChannel(directory).publish(whole_slices(tensors.items()), version, checksums=True)
    weights = WeightSet(
        **{"kind": "adapter", "base_version": CHECKPOINT, "name": "policy", "settings": settings, **record}
    )
    return WeightUpdate(version, part.channel, part.info, weights=weights)


def merged_log_probs(checkpoint: Path, tensors: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """Returns the log-probs of transformers with `scale * B @ A` added to the weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    state = model.state_dict()
    for name, b in tensors.items():
        if ".lora_B." in name:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
            a = tensors[name.replace(".lora_B.", ".lora_A.")]
            state[f"{module}.weight"].add_(LORA.scale * (b @ a))
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]


def check_another(
    engine: OfflineEngine, weights: Path, checkpoint: Path, tokens: list[int], of_policy: torch.Tensor
) -> None:
    """The engine serves a second adapter, and the first one's log-probs keep every bit. A third adapter has no slot."""
    for version in (7, 8):
        tensors = adapter(version)
        engine.take(update(weights, version, tensors, name="other"))
        wanted = merged_log_probs(checkpoint, tensors, tokens)
        got = engine.log_probs(tokens, "other")
        assert (got - wanted).abs().max() < 1e-5 and (got - of_policy).abs().max() > 0.1
        assert torch.equal(engine.log_probs(tokens, "policy"), of_policy)
    with pytest.raises(ValueError, match="--vllm-max-loras must be at least 3 .* got 2 and third"):
        engine.take(update(weights, 9, tensors, name="third"))
    assert torch.equal(engine.log_probs(tokens, "policy"), of_policy)
    assert torch.equal(engine.log_probs(tokens, "other"), got)


@pytest.mark.slow
def test_an_update_replaces_the_adapter(tmp_path, monkeypatch):
    checkpoint, weights = make_checkpoint(tmp_path / "base"), tmp_path / "weights"
    weights.mkdir(mode=0o700)
    tokens = TOKENS
    with offline_engine(
        checkpoint, weights, monkeypatch, enable_lora=True, max_loras=2, max_lora_rank=8
    ) as engine:
        bare = engine.log_probs(tokens)
        for version in (1, 2):
            tensors = adapter(version)
            engine.take(update(weights, version, tensors))  # this compares each live tensor, too
            wanted = merged_log_probs(checkpoint, tensors, tokens)
            got = engine.log_probs(tokens, "policy")
            assert (got - wanted).abs().max() < 1e-5
            assert (got - bare).abs().max() > 0.1
            assert torch.equal(engine.log_probs(tokens), bare)
        check_another(engine, weights, checkpoint, tokens, got)
        # The live adapter is version 2, and an update with other values differs from it.
        with pytest.raises(RuntimeError, match="the live adapter must equal .* got 28 tensors that differ"):
            engine.take(update(weights, 3, adapter(3)), load=False)
        # This version has fewer modules, so the other modules of the version before must be gone.
        some = adapter(4, {"self_attn.v_proj": MODULES["self_attn.v_proj"]})
        engine.take(update(weights, 4, some))
        assert (
            engine.log_probs(tokens, "policy") - merged_log_probs(checkpoint, some, tokens)
        ).abs().max() < 1e-5

        for changed, message in (
            (
                {"base_model.model.model.layers.0.self_attn.c_attn.lora_A.weight": torch.zeros(8, 64)},
                "without its pair",
            ),
            (adapter(5, {"mlp.experts": (64, 64)}), "of a module that the engine's model does not have"),
        ):
            with pytest.raises(ValueError, match=f"an adapter must have .* {message}"):
                engine.take(update(weights, 5, changed))
        with pytest.raises(
            ValueError, match="a set of weights must be one of full, adapter, delta, got shards"
        ):
            engine.take(update(weights, 6, some, kind="shards"))
        assert (
            engine.log_probs(tokens, "policy") - merged_log_probs(checkpoint, some, tokens)
        ).abs().max() < 1e-5


@pytest.mark.slow
def test_workers_share_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers each have a part of every matrix and compare it (--check-weight-update-equal)."""
    checkpoint, weights = make_checkpoint(tmp_path / "base"), tmp_path / "weights"
    weights.mkdir(mode=0o700)
    slots = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "tensor_parallel_size": 2}
    with offline_engine(checkpoint, weights, monkeypatch, **slots) as engine:
        for version, name in ((1, "maths"), (2, "code"), (3, "maths")):
            tensors = adapter(version)
            engine.take(update(weights, version, tensors, name=name))
            wanted = merged_log_probs(checkpoint, tensors, TOKENS)
            assert (engine.log_probs(TOKENS, name) - wanted).abs().max() < 1e-5
        code = merged_log_probs(checkpoint, adapter(2), TOKENS)
        assert (engine.log_probs(TOKENS, "code") - code).abs().max() < 1e-5
        # This call is last, because vLLM drops its workers' answers when one worker fails.
        with pytest.raises(Exception, match="the live adapter must equal .* got 28 tensors that differ"):
            engine.take(update(weights, 4, adapter(3), name="code"), load=False)


def test_an_engine_without_a_slot_refuses_adapters():
    """The model of such an engine has no LoRA manager."""
    tensors = adapter(1)
    part = Part({n: list(t.shape) for n, t in tensors.items()}, tensors.__getitem__, True, False, whole=True)
    with pytest.raises(ValueError, match="must be started with --enable-lora"):
        AdapterLoader(torch.nn.Module(), torch.device("cpu")).take(part, WeightSet("adapter"))
