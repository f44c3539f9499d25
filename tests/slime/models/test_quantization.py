"""Tests the record of a checkpoint's quantisation, and the functions that quantise and dequantise a weight."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from quantization_cases import FP8, FP8_ROWS, INT4, KIMI_IGNORED, with_fp8, with_int4

from slime.models.quantized.int4 import unpack
from slime.models.quantized.quantization import (
    QuantizationScheme,
    block_maxima,
    dequantize,
    pack,
    quantize,
    quantized_names,
    read_scheme,
    scales_from,
    to_fp8,
)


def scheme(said: dict[str, object]) -> QuantizationScheme:
    found = read_scheme({"quantization_config": said})
    assert found is not None
    return found


def weight(rows: int = 200, columns: int = 320, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) / 50


def test_published_configs_are_read() -> None:
    assert read_scheme({}) is None
    deepseek, qwen = (
        scheme(FP8),
        scheme(FP8 | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]}),
    )
    assert (deepseek.block, deepseek.scale, deepseek.names) == (
        (128, 128),
        "weight_scale_inv",
        ("weight", "weight_scale_inv"),
    )
    assert qwen.ignored == ("lm_head", "model.layers.0.mlp.gate")
    kimi = scheme(INT4)
    assert (kimi.kind, kimi.block, kimi.names) == (
        "int4",
        (1, 32),
        ("weight_packed", "weight_scale", "weight_shape"),
    )
    assert kimi.bytes_per_weight == 0.5 + 2 / 32 and deepseek.bytes_per_weight == 1 + 4 / 128**2
    rows = scheme(FP8_ROWS)
    assert (rows.kind, rows.block, rows.names) == ("float8_e4m3fn", (1, 0), ("weight", "weight_scale"))
    assert scheme(FP8 | {"scale_fmt": "ue8m0"}).power_of_two


@pytest.mark.parametrize(
    ("module", "fp8", "int4"),
    [
        ("model.layers.3.mlp.experts.7.up_proj", True, True),
        ("model.layers.3.self_attn.o_proj", True, False),
        ("model.layers.0.mlp.up_proj", True, False),
        ("model.layers.3.mlp.shared_experts.up_proj", False, False),
        ("model.layers.3.mlp.gate", False, False),
        ("lm_head", False, False),
    ],
)
def test_modules_that_are_left_out(module: str, fp8: bool, int4: bool) -> None:
    given = scheme(FP8 | {"modules_to_not_convert": ["model.layers.3.mlp.shared_experts"]})
    assert given.converts(module) is fp8
    assert scheme(INT4 | {"ignore": KIMI_IGNORED}).converts(module) is int4


@pytest.mark.parametrize(
    ("said", "got"),
    [
        ({"quant_method": "awq", "bits": 4}, "got awq;"),
        ({"quant_method": "fp8"}, "got fp8;"),
        (FP8 | {"fmt": "e5m2"}, "got fp8;"),
        (FP8 | {"weight_block_size": [128, 0]}, "got fp8;"),
        ("fp8", "got fp8;"),
        (with_int4(num_bits=8), "got compressed-tensors pack-quantized;"),
        (with_int4(symmetric=False), "got compressed-tensors pack-quantized;"),
        (with_int4(actorder="group"), "got compressed-tensors pack-quantized;"),
        (INT4 | {"format": "nvfp4-pack-quantized"}, "got compressed-tensors nvfp4-pack-quantized;"),
        (INT4 | {"config_groups": {}}, "got compressed-tensors pack-quantized;"),
        (FP8 | {"activation_scheme": "static"}, "got fp8;"),
        (with_fp8(strategy="group", group_size=128), "got compressed-tensors float-quantized;"),
    ],
)
def test_unknown_schemes_are_errors(said: object, got: str) -> None:
    with pytest.raises(ValueError, match=f"quantization_config in config.json must be fp8 .*{got} use a"):
        read_scheme({"quantization_config": said})


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (
            FP8 | {"modules_to_not_convert": "lm_head"},
            "modules_to_not_convert of .* must be a list .* got lm_head;",
        ),
        (INT4 | {"ignore": ["lm_head", 3]}, "ignore of quantization_config .* must be a list of names"),
        (INT4 | {"ignore": ["re:.*(self_attn"]}, r"got re:\.\*\(self_attn; correct the entry"),
        (FP8 | {"ignored_layers": {"a": 1}}, "ignored_layers of quantization_config"),
    ],
)
def test_lists_of_modules_with_a_wrong_entry_are_errors(form: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_scheme({"quantization_config": form})


def test_a_list_may_name_the_layers_of_an_engine() -> None:
    form = scheme(INT4 | {"ignore": ["re:.*qkv_proj", "model.layers.0.mlp.gate_up_proj"]})
    left_out = ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    assert not any(form.converts(f"model.layers.0.{module}") for module in left_out)
    assert form.converts("model.layers.0.mlp.down_proj") and form.converts("model.layers.1.mlp.up_proj")


def test_packing_equals_that_of_compressed_tensors() -> None:
    codes = torch.randint(-8, 8, (6, 64), generator=torch.Generator().manual_seed(0))
    assert torch.equal(pack(codes), pack_to_int32(codes.to(torch.int8), 4))
    assert torch.equal(unpack(pack(codes), 64), codes)
    assert torch.equal(unpack_from_int32(pack(codes), 4, codes.shape), codes.to(torch.int8))


@pytest.mark.parametrize("steps", [7, 7.5, 8], ids=["symmetric", "compressed-tensors", "full range"])
def test_published_int4_weights_come_back(steps: float) -> None:
    """Checkpoints choose their scales by one of these rules. Without training, an update must bring them again."""
    groups = weight().unflatten(1, (-1, 32))
    scales = (groups.abs().amax(-1) / steps).bfloat16()
    codes = (groups / scales[..., None]).round().clamp(-8, 7).flatten(1)
    again = quantize(
        dequantize(
            {
                "weight_packed": pack(codes),
                "weight_scale": scales,
                "weight_shape": torch.tensor(codes.shape),
            },
            scheme(INT4),
        ),
        scheme(INT4),
    )
    assert again["weight_shape"].tolist() == [200, 320] and again["weight_scale"].dtype == torch.bfloat16
    differing = (again["weight_scale"] != scales) | (unpack(again["weight_packed"], 320) != codes).unflatten(
        1, (-1, 32)
    ).any(-1)
    assert differing.float().mean() < 2e-3
    found = dequantize(quantize(weight(), scheme(INT4)), scheme(INT4)).float()
    published = codes.unflatten(1, (-1, 32)) * scales[..., None]
    assert (found - weight()).square().mean() < (published.flatten(1) - weight()).square().mean()


@pytest.mark.parametrize(
    "said", [FP8, FP8_ROWS, FP8 | {"scale_fmt": "ue8m0"}], ids=["blocks", "rows", "ue8m0"]
)
def test_fp8_weights_are_the_nearest(said: dict[str, object]) -> None:
    """The largest relative error of a normal e4m3 number is 1/16, and of the rounding to bfloat16 1/256."""
    given = scheme(said)
    stored = quantize(weight(), given)
    assert stored["weight"].dtype == torch.float8_e4m3fn
    found = dequantize(stored, given).float()
    allowed = weight().abs() * (1 / 16 + 1 / 200) + stored[given.scale].float().max() * 2.0**-9
    assert ((found - weight()).abs() <= allowed).all()
    again = quantize(found.bfloat16(), given)
    assert torch.equal(again["weight"].float(), stored["weight"].float())
    assert (again[given.scale].float() / stored[given.scale].float() - 1).abs().max() < 2**-7


def test_slices_inside_a_block_have_its_scale() -> None:
    given, whole = scheme(FP8), weight()
    expected = quantize(whole, given)
    parts = [(0, 100), (100, 200)]
    maxima = torch.zeros(2, 3)
    for start, end in parts:
        found = block_maxima(whole[start:end], given, (start % 128, 0))
        row = start // 128
        maxima[row : row + len(found)] = torch.maximum(maxima[row : row + len(found)], found)
    scales = scales_from(maxima, given)
    assert torch.equal(scales, expected["weight_scale_inv"])
    codes = [to_fp8(whole[a:b], scales[a // 128 :], given, (a % 128, 0)) for a, b in parts]
    assert torch.equal(torch.cat(codes).float(), expected["weight"].float())


@pytest.mark.parametrize("said", [FP8, INT4], ids=["fp8", "int4"])
def test_zeros_stay_zeros(said: dict[str, object]) -> None:
    stored = quantize(torch.zeros(64, 64), scheme(said))
    assert not dequantize(stored, scheme(said)).any()
    assert stored[scheme(said).scale].float().isfinite().all()


def test_groups_that_do_not_divide_are_named() -> None:
    expected = r"a.weight must be a matrix whose rows are whole groups of 32, got shape \[4, 48\]"
    with pytest.raises(ValueError, match=expected):
        quantize(torch.ones(4, 48), scheme(INT4), name="a.weight")
    with pytest.raises(ValueError, match=r"a.weight must be a matrix to have scales, got shape \[4\]"):
        quantize(torch.ones(4), scheme(FP8), name="a.weight")


def test_missing_tensors_are_named() -> None:
    stored = quantize(weight(), scheme(INT4))
    del stored["weight_scale"]
    with pytest.raises(
        ValueError, match="int4 in groups of 32 must have up.weight_scale, got none; download it again"
    ):
        dequantize(stored, scheme(INT4), name="up.weight")


def test_names_of_files_decide() -> None:
    names = {"a.weight", "a.weight_scale_inv", "norm.weight"}
    assert list(quantized_names(names, scheme(FP8))) == ["a.weight"]
