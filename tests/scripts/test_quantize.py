"""Tests quantize.py, and --quantize of make_model.py: the copy has the published form, and dequantize.py undoes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from dequantize import dequantize_checkpoint
from make_model import main as make_model
from quantize import main as quantize
from safetensors.torch import load_file

UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("scheme", "parts", "error"),
    [
        ("fp8", {"weight", "weight_scale_inv"}, 1 / 16),
        ("int4", {"weight_packed", "weight_scale", "weight_shape"}, 1 / 2),
    ],
)
def test_a_copy_has_the_published_form(tmp_path: Path, scheme: str, parts: set[str], error: float) -> None:
    plain, copy, back = tmp_path / "plain", tmp_path / "copy", tmp_path / "back"
    make_model(["--arch", "qwen3-tiny", "--random", str(plain)])
    quantize(["--scheme", scheme, str(plain), str(copy)])
    before, stored = (load_file(folder / "model.safetensors") for folder in (plain, copy))
    assert {name.removeprefix(f"{UP}.") for name in stored if name.startswith(UP)} == parts
    assert stored.keys() >= {"model.embed_tokens.weight", "model.norm.weight"}
    assert "quantization_config" in json.loads((copy / "config.json").read_text())
    dequantize_checkpoint(copy, back)
    after = load_file(back / "model.safetensors")
    assert after.keys() == before.keys()
    weight = before[f"{UP}.weight"]
    assert 0 < (after[f"{UP}.weight"] - weight).abs().max() < error * weight.abs().max()
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"])
    with pytest.raises(ValueError, match="DIR must hold plain weights, got quantised weights"):
        quantize(["--scheme", scheme, str(copy), str(tmp_path / "again")])


def test_a_random_model_is_quantized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(
        ["--arch", "qwen3-tiny", "--random", "--arithmetic", "--quantize", "fp8", str(tmp_path / "tiny")]
    )
    assert any((tmp_path / "tiny" / "arithmetic").iterdir())
    assert f"{UP}.weight_scale_inv" in load_file(tmp_path / "tiny" / "model.safetensors")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["tiny"]
    with pytest.raises(SystemExit):
        make_model(["--arch", "qwen3-tiny", "--no-weights", "--quantize", "fp8", str(tmp_path / "none")])
    assert "--quantize must be given with --random" in capsys.readouterr().err
