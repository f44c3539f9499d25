"""Tests --round-expert-weights: the trainer computes with the experts' weights in int4, as the engines do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from megatron_cases import loaded, packed_logits, sequences, sum_loss, tiny_checkpoint
from quantize import find_routers, quantization_config, quantize_checkpoint

from slime.checkpoints.hf_config import read_hf_config
from slime.megatron_backend.checkpoint.weights import export_hf
from slime.megatron_backend.model.gpt import unwrap
from slime.models.quantization import dequantize, quantize, read_scheme, rounded

pytestmark = pytest.mark.usefixtures("single_rank")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tiny_checkpoint(tmp_path / "plain", "qwen3_moe", hidden_size=128, moe_intermediate_size=64, head_dim=64)
    routers = find_routers(tmp_path / "plain")
    said = quantization_config("int4", experts_only=True, routers=routers)
    quantize_checkpoint(tmp_path / "plain", tmp_path / "int4", said)
    shutil.rmtree(tmp_path / "plain")
    return tmp_path / "int4"


def experts(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [weight for name, weight in unwrap(model).named_parameters() if ".local_experts." in name]


def train(model: torch.nn.Module) -> None:
    """Moves the experts' weights between the values of int4."""
    generator = torch.Generator().manual_seed(1)
    for weight in experts(model):
        weight.data += 0.02 * torch.randn(weight.shape, generator=generator)


def test_forward_and_gradients_are_those_of_the_engines_weights(checkpoint):
    """The gradient of a weight is that of its rounded weight (straight-through estimator)."""
    scheme, batch = read_scheme(read_hf_config(checkpoint)), sequences(1)
    assert scheme is not None
    model, plain = loaded(checkpoint, round_expert_weights=True), loaded(checkpoint)
    for each in (model, plain):
        train(each)
    unrounded = packed_logits(plain, batch)
    for weight in experts(plain):
        weight.data = dequantize(quantize(weight.data, scheme), scheme).float()
    found, wanted = packed_logits(model, batch), packed_logits(plain, batch)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    assert (unrounded - wanted).abs().max() > 1e-4
    for logits in (found, wanted):
        sum_loss(logits, batch).backward()
    for ours, theirs in zip(unwrap(model).parameters(), unwrap(plain).parameters(), strict=True):
        torch.testing.assert_close(ours.main_grad, theirs.main_grad, rtol=1e-4, atol=1e-6)


def test_the_stored_weights_are_not_rounded(checkpoint):
    """An update and a saved checkpoint have the trained weights. Quantising these gives the values of the forward
    pass."""
    scheme = read_scheme(read_hf_config(checkpoint))
    assert scheme is not None
    model = loaded(checkpoint, round_expert_weights=True)
    train(model)
    weights = {name: tensor for name, tensor in export_hf(model) if ".experts." in name}
    changed = [name for name, tensor in weights.items() if not torch.equal(rounded(tensor, scheme), tensor)]
    assert len(changed) == len(weights) > 0


def test_the_weights_of_the_checkpoint_stay_nearly_the_same(checkpoint):
    batch = sequences(2)
    found = packed_logits(loaded(checkpoint, round_expert_weights=True), batch)
    torch.testing.assert_close(found, packed_logits(loaded(checkpoint), batch), rtol=0, atol=1e-3)


def test_rounding_is_a_checkpoints_round_trip():
    said = quantization_config("int4")
    scheme = read_scheme({"quantization_config": said})
    assert scheme is not None
    weight = torch.randn(12, 96)
    assert torch.equal(rounded(weight, scheme), dequantize(quantize(weight, scheme), scheme).float())
    assert rounded(weight.bfloat16(), scheme).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="rows are whole groups of 32"):
        rounded(torch.randn(12, 40), scheme)
