"""Tests dithered weights: they round to the same values, do not depend on slices, and follow small changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import make_config, packed_logits, sequences, tiny_checkpoint
from quantize import FP8, INT4, quantize_checkpoint

from slime.checkpoints.hf_files import Files
from slime.megatron_backend.checkpoint.weights import export_hf, load_hf, save_hf
from slime.megatron_backend.model.gpt import build_model
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.step.models import build_frozen
from slime.models import family_for
from slime.models.quantized import quantized_checkpoint
from slime.models.quantized.dither import dither
from slime.models.quantized.quantization import DITHERS, QuantizationScheme, dequantize, quantize
from slime.roles import REFERENCE, TEACHER

BLOCKS = QuantizationScheme("fp8", "float8_e4m3fn", (128, 128), "float32")
SCHEMES = {
    "blocks": BLOCKS,
    "powers": QuantizationScheme("fp8", "float8_e4m3fn", (128, 128), "float32", power_of_two=True),
    "rows": QuantizationScheme("compressed-tensors", "float8_e4m3fn", (1, 0), "bfloat16"),
    "int4": QuantizationScheme("compressed-tensors", "int4", (1, 32), "bfloat16"),
}
LEAST = {"blocks": 0.95, "powers": 0.8, "rows": 0.95, "int4": 0.6}
"""Least part of a change of 1e-4 that remains after rounding."""
NAME = "model.layers.0.mlp.up_proj.weight"


def start(scheme: QuantizationScheme) -> torch.Tensor:
    """Returns a dequantised weight [256, 512] with zeros and a block of zeros."""
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[:, 7], weight[128:, 256:384] = 0, 0
    return dequantize(quantize(weight, scheme), scheme)


def dithered(weight: torch.Tensor, scheme: QuantizationScheme, corner=(0, 0), name=NAME) -> torch.Tensor:
    return dither(weight, scheme, getattr(torch, scheme.scale_dtype), name, corner, 512)


def follows(weight: torch.Tensor, scheme: QuantizationScheme) -> float:
    """Returns the part of a random change of 1e-4 that the rounded weights follow."""
    change = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 1e-4
    before, after = (
        dequantize(quantize(x, scheme), scheme).float() for x in (weight.float(), weight.float() + change)
    )
    return float(((after - before) * change).sum() / change.square().sum())


@pytest.mark.parametrize("kind", SCHEMES)
def test_dithered_weights_round_to_the_same_values_and_follow_changes(kind: str) -> None:
    scheme = SCHEMES[kind]
    weight = start(scheme)
    made = dithered(weight, scheme)
    assert made.dtype == torch.bfloat16 and (made != weight).float().mean() > 0.6
    wanted, got = (quantize(x, scheme) for x in (weight, made))
    assert all(torch.equal(got[part].view(torch.uint8), wanted[part].view(torch.uint8)) for part in wanted)
    assert torch.equal(made[weight == 0], weight[weight == 0])
    assert follows(weight, scheme) < 0.3 and follows(made, scheme) > LEAST[kind]


@pytest.mark.parametrize("kind", SCHEMES)
def test_a_slice_has_the_values_of_the_whole_weight(kind: str) -> None:
    """Each slice has whole blocks, as the reader of a file has."""
    scheme = SCHEMES[kind]
    weight = start(scheme)
    rows, columns = slice(128, 256), slice(0, 512) if kind == "rows" else slice(128, 384)
    part = dithered(weight[rows, columns], scheme, (128, columns.start))
    assert torch.equal(part, dithered(weight, scheme)[rows, columns])
    assert not torch.equal(dithered(weight, scheme, name="other"), dithered(weight, scheme))


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_a_model_with_dithered_weights_is_written_with_the_same_bytes(
    tmp_path: Path, kind: str, single_rank: None
) -> None:
    """Engines get the form in which the model is written."""
    tiny_checkpoint(tmp_path / "plain", "qwen3", hidden_size=64, intermediate_size=128)
    block = {"fp8": FP8 | {"weight_block_size": [16, 16]}, "int4": INT4}[kind]
    quantize_checkpoint(tmp_path / "plain", tmp_path / "rounded", block)
    config, models = make_config(), {}
    for dithers in (False, True):
        models[dithers] = build_model(load_hf_config(tmp_path / "rounded"), config, ddp=False)
        load_hf(models[dithers], tmp_path / "rounded", dithers=dithers)
    values = {dithers: dict(export_hf(model)) for dithers, model in models.items()}
    assert not torch.equal(values[True][NAME], values[False][NAME])
    assert torch.equal(values[True]["model.norm.weight"], values[False]["model.norm.weight"])
    written = []
    for dithers, model in models.items():
        save_hf(model, tmp_path / "rounded", tmp_path / str(dithers), form="checkpoint")
        written.append(Files(tmp_path / str(dithers)))
    assert written[0].names() == written[1].names()
    for each in written[0].names():
        before, after = (x.get(each)[...].contiguous().view(torch.uint8) for x in written)
        assert torch.equal(after, before), each


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_a_trainer_that_rounds_computes_the_same_bits(tmp_path: Path, kind: str, single_rank: None) -> None:
    """The shape has whole blocks in each fused matrix of the trainer, as published models with heads of 128 have."""
    tiny_checkpoint(tmp_path / "plain", "qwen3", hidden_size=128, intermediate_size=256, head_dim=128)
    quantize_checkpoint(tmp_path / "plain", tmp_path / "rounded", {"fp8": FP8, "int4": INT4}[kind])
    rounding: dict[str, Any] = {"overrides": {"fp8": "e4m3", "fp8_recipe": "blockwise"}}
    if kind == "int4":
        rounding = {"round_weights": True, "hf_checkpoint": str(tmp_path / "rounded")}
    batch, logits = sequences(0), []
    for dithers in (False, True):
        model = build_model(load_hf_config(tmp_path / "rounded"), make_config(**rounding), ddp=False)
        load_hf(model, tmp_path / "rounded", dithers=dithers)
        logits.append(packed_logits(model, batch))
    assert torch.equal(*logits)


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_a_weight_that_is_read_in_parts_has_the_same_values(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part is a row of blocks here, and the last one is not whole."""
    tiny_checkpoint(tmp_path / "plain", "qwen3", hidden_size=128, intermediate_size=224)
    quantize_checkpoint(tmp_path / "plain", tmp_path / "rounded", {"fp8": FP8, "int4": INT4}[kind])
    hf = load_hf_config(tmp_path / "rounded")
    found = []
    for dithers in ({}, {DITHERS: True}):
        described = {**hf, "quantization_config": hf["quantization_config"] | dithers}
        stored = family_for(hf).open(Files(tmp_path / "rounded"), described).get(NAME)
        whole = stored[...]
        with monkeypatch.context() as patch:
            patch.setattr(quantized_checkpoint, "_PART", 1)
            assert torch.equal(stored[...], whole)
            assert torch.equal(stored[130:190, 32:96], whole[130:190, 32:96])
        found.append(whole)
    assert not torch.equal(*found)


def test_a_reference_is_dithered_as_the_policy_and_a_teacher_is_not(
    tmp_path: Path, single_rank: None
) -> None:
    tiny_checkpoint(tmp_path / "plain", "qwen3", hidden_size=64, intermediate_size=128)
    for name in ("policy", "teacher"):
        quantize_checkpoint(tmp_path / "plain", tmp_path / name, INT4)
    config = make_config(
        hf_checkpoint=str(tmp_path / "policy"),
        opd_teacher_load=str(tmp_path / "teacher"),
        opd_type="megatron",
        dither_weights=True,
    )
    policy = build_model(load_hf_config(tmp_path / "policy"), config, ddp=False)
    values = []
    for dithers in (True, False):
        load_hf(policy, tmp_path / "policy", dithers=dithers)
        values.append(dict(export_hf(policy))[NAME].clone())
    frozen = [dict(export_hf(build_frozen(role, config)))[NAME] for role in (REFERENCE, TEACHER)]
    assert torch.equal(frozen[0], values[0]) and torch.equal(frozen[1], values[1])
    assert not torch.equal(*frozen)
