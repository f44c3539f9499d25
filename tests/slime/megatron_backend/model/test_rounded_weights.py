"""Tests --round-weights: the trainer computes with the weights in INT4, as the engines do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import loaded, packed_logits, sequences, sum_loss, tiny_checkpoint
from quantize import find_routers, quantization_config, quantize_checkpoint
from safetensors.torch import save_file

from slime.checkpoints.quantized_files import read_quantized_weights
from slime.megatron_backend.checkpoint.weights import export_hf, save_hf
from slime.megatron_backend.model.gpt import unwrap
from slime.models.quantized.int4 import round_groups
from slime.models.quantized.quantization import dequantize, quantize, read_scheme, rounded
from slime.models.quantized.quantized_checkpoint import QuantizedWeights

pytestmark = pytest.mark.usefixtures("single_rank")

WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "dense": ("qwen3", WIDE, ()),
    "experts": ("qwen3_moe", WIDE | {"moe_intermediate_size": 64}, ("experts only",)),
    "latent": ("deepseek_v3", WIDE | LATENT | {"moe_intermediate_size": 64}, ()),
    # the trainer joins q, k and v in one weight, and the files have one of them in plain form
    "partly": ("qwen3", WIDE, ("re:.*k_proj",)),
}
"""Kind, shape, and modules that stay plain."""


def write_checkpoint(folder: Path, case: str) -> Path:
    kind, shape, plain = CASES[case]
    tiny_checkpoint(folder / "plain", kind, **shape)
    said = quantization_config(
        "int4", experts_only="experts only" in plain, routers=find_routers(folder / "plain")
    )
    said["ignore"] += [name for name in plain if name.startswith("re:")]
    quantize_checkpoint(folder / "plain", folder / "int4", said)
    return folder / "int4"


@pytest.fixture(params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, request.param)


def load_rounded(checkpoint: Path) -> torch.nn.Module:
    return loaded(checkpoint, round_weights=True, hf_checkpoint=str(checkpoint))


def read_weights(checkpoint: Path) -> QuantizedWeights:
    weights = read_quantized_weights(str(checkpoint))
    assert weights is not None
    return weights


def train(model: torch.nn.Module) -> None:
    """Moves the weights between the values of INT4."""
    generator = torch.Generator().manual_seed(1)
    for weight in unwrap(model).parameters():
        weight.data += 0.02 * torch.randn(weight.shape, generator=generator)


def load_engines_weights(model: torch.nn.Module, checkpoint: Path, folder: Path) -> torch.nn.Module:
    """Returns a model without rounding, with the weights that an engine has after an update from `model`."""
    weights = read_weights(checkpoint)
    hf = json.loads((checkpoint / "config.json").read_text())
    hf.pop("quantization_config")
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    (folder / "config.json").write_text(json.dumps(hf))
    tensors = {}
    for name, tensor in export_hf(model):
        stored = weights.quantize(name, tensor)
        if len(stored) > 1:
            parts = {part.rpartition(".")[2]: value for part, value in stored.items()}
            tensor = dequantize(parts, weights.scheme, name=name)
        tensors[name] = tensor.float().contiguous()
    save_file(tensors, folder / "model.safetensors")
    return loaded(folder)


def test_forward_and_gradients_are_those_of_the_engines_weights(checkpoint: Path, tmp_path: Path) -> None:
    """The gradient of a weight is that of its rounded weight (straight-through estimator)."""
    batch, model, plain = sequences(1), load_rounded(checkpoint), loaded(checkpoint)
    for each in (model, plain):
        train(each)
    engines = load_engines_weights(model, checkpoint, tmp_path / "engine")
    unrounded, found, wanted = (packed_logits(each, batch) for each in (plain, model, engines))
    assert torch.equal(found, wanted)
    assert (unrounded - wanted).abs().max() > 1e-3
    for logits in (found, wanted):
        sum_loss(logits, batch).backward()
    for ours, theirs in zip(unwrap(model).parameters(), unwrap(engines).parameters(), strict=True):
        assert torch.equal(ours.main_grad, theirs.main_grad)
        assert ours.main_grad.abs().max() > 0 or ours.dim() == 2


def test_updates_and_files_quantise_the_weights_that_the_optimizer_left(tmp_path: Path) -> None:
    """`--save-hf-format checkpoint` writes the codes of the trained weights, once quantised."""
    checkpoint = write_checkpoint(tmp_path, "dense")
    model, weights = load_rounded(checkpoint), read_weights(checkpoint)
    train(model)
    trained = {name: tensor.clone() for name, tensor in export_hf(model)}
    changed = [
        name
        for name in weights.names
        if not torch.equal(rounded(trained[name], weights.scheme), trained[name])
    ]
    assert len(changed) == len(weights.names) == 14
    save_hf(model, checkpoint, tmp_path / "saved", form="checkpoint")
    again = loaded(tmp_path / "saved")
    stored = dict(export_hf(again))
    for name in weights.names:
        assert torch.equal(stored[name], rounded(trained[name], weights.scheme))
    assert torch.equal(packed_logits(model, sequences(3)), packed_logits(again, sequences(3)))


def test_the_weights_of_the_checkpoint_stay_nearly_the_same(checkpoint: Path) -> None:
    batch = sequences(2)
    found = packed_logits(load_rounded(checkpoint), batch)
    torch.testing.assert_close(found, packed_logits(loaded(checkpoint), batch), rtol=0, atol=1e-3)


def test_rounded_weights_are_not_kept_for_the_backward(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "dense")
    model, kept = load_rounded(checkpoint), []
    weights = {tuple(weight.shape) for weight in unwrap(model).parameters() if weight.dim() == 2}
    own = {weight.untyped_storage().data_ptr() for weight in unwrap(model).parameters()}

    def keep(saved: torch.Tensor) -> torch.Tensor:
        if tuple(saved.shape) in weights and saved.untyped_storage().data_ptr() not in own:
            kept.append(tuple(saved.shape))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        packed_logits(model, sequences(1))
    assert kept == []


def test_a_weight_outside_the_linear_layers_is_an_error(tmp_path: Path) -> None:
    shape = WIDE | {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    tiny_checkpoint(tmp_path / "plain", "qwen2_moe", **shape)
    routers = find_routers(tmp_path / "plain")
    quantize_checkpoint(tmp_path / "plain", tmp_path / "int4", quantization_config("int4", routers=routers))
    with pytest.raises(
        ValueError, match="shared_expert_gate.weight must be a weight that the trainer can round"
    ):
        load_rounded(tmp_path / "int4")


def test_rounding_is_a_checkpoints_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = read_scheme({"quantization_config": quantization_config("int4")})
    assert scheme is not None
    weight = torch.randn(12, 96)
    wanted = dequantize(quantize(weight, scheme), scheme).float()
    assert torch.equal(rounded(weight, scheme), wanted)
    monkeypatch.setattr("slime.models.quantized.int4._CHUNK", 96 * 5)
    assert torch.equal(rounded(weight, scheme), wanted)
    assert rounded(weight.bfloat16(), scheme).dtype == torch.bfloat16
    scales = quantize(weight, scheme, scale_dtype="float32")
    found = rounded(weight, scheme, scale_dtype="float32")
    assert torch.equal(found, dequantize(scales, scheme).float())
    assert torch.equal(round_groups(weight, 32, torch.bfloat16), wanted)
    with pytest.raises(ValueError, match="rows are whole groups of 32"):
        rounded(torch.randn(12, 40), scheme)
