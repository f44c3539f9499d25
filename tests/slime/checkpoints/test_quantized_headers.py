"""Damages the files of quantised checkpoints. The flag checks name the tensor and the remedy in one line, before a run
starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from config_cases import HF_CONFIG, good_argv, write_model
from safetensors.torch import save_file

from slime.checkpoints.hf_config import check_checkpoint_shapes, read_hf_config
from slime.models.quantized.quantization import quantize, read_scheme
from slime.rules import parse_args

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
CHANNEL = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
            "targets": ["Linear"],
        }
    },
}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
            },
            "targets": ["Linear"],
        }
    },
    "ignore": ["lm_head"],
}
THREE_BITS = {"num_bits": 3, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
UP = "model.layers.1.mlp.up_proj"
SCHEMES = {"fp8": FP8, "channel": CHANNEL, "int4": INT4}


def write_quantized(folder: Path, said: dict, **changes: torch.Tensor | None) -> dict:
    """Writes a Qwen3 of 4 layers in a scheme. `changes` replace or remove tensors of UP. Returns config.json."""
    write_model(folder, quantization_config=said)
    hidden, ffn, heads = HF_CONFIG["hidden_size"], HF_CONFIG["intermediate_size"], 128
    scheme = read_scheme({"quantization_config": said})
    shapes = {"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn)}
    shapes |= {"self_attn.q_proj": (heads, hidden), "self_attn.o_proj": (hidden, heads)}
    tensors = {"model.embed_tokens.weight": torch.zeros(64, hidden, dtype=torch.bfloat16)}
    for layer in range(4):
        for module, shape in shapes.items():
            parts = quantize(torch.randn(shape), scheme)
            tensors |= {f"model.layers.{layer}.{module}.{last}": part for last, part in parts.items()}
    for last, tensor in changes.items():
        tensors[f"{UP}.{last}"] = tensor
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")
    return read_hf_config(folder)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_whole_checkpoint_passes(tmp_path, scheme):
    check_checkpoint_shapes(tmp_path, write_quantized(tmp_path, SCHEMES[scheme]))


@pytest.mark.parametrize(
    ("scheme", "changes", "message"),
    [
        (
            "fp8",
            {"weight_scale_inv": None},
            rf"a checkpoint in fp8 in blocks of 128 x 128 must have {UP}.weight_scale_inv, got none for the weight in "
            r".*model.safetensors; download it again",
        ),
        (
            "fp8",
            {"weight_scale_inv": torch.ones(2, 1)},
            rf"{UP}.weight_scale_inv must have shape \[3, 1\] for 384 x 128 in blocks of 128 x 128, got \[2, 1\]; down",
        ),
        ("fp8", {"weight": None}, rf"must have {UP}.weight, got none for the weight in"),
        ("channel", {"weight_scale": None}, rf"fp8 with a scale per row must have {UP}.weight_scale, got none"),
        ("channel", {"weight_scale": torch.ones(1, 1)}, rf"{UP}.weight_scale must have shape \[384, 1\] for 384 x 128"),
        ("int4", {"weight_scale": None}, rf"int4 in groups of 32 must have {UP}.weight_scale, got none"),
        ("int4", {"weight_shape": None}, rf"int4 in groups of 32 must have {UP}.weight_shape, got none"),
        ("int4", {"weight_packed": None}, rf"int4 in groups of 32 must have {UP}.weight_packed, got none"),
        (
            "int4",
            {"weight_scale": torch.ones(384, 3)},
            rf"{UP}.weight_scale must have shape \[384, 4\] for 384 x 128 in blocks of 1 x 32, got \[384, 3\]",
        ),
        (
            "int4",
            {"weight_packed": torch.zeros(384, 15, dtype=torch.int32)},
            rf"{UP}.weight must be a matrix whose rows are whole groups of 32, got shape \[384, 120\]; leave",
        ),
    ],
)  # fmt: skip
def test_damaged_files_are_named(tmp_path, scheme, changes, message):
    hf = write_quantized(tmp_path, SCHEMES[scheme], **changes)
    with pytest.raises(ValueError, match=message) as error:
        check_checkpoint_shapes(tmp_path, hf)
    assert "\n" not in str(error.value)


def test_a_scheme_over_plain_weights_is_an_error(tmp_path):
    write_model(tmp_path, quantization_config=FP8)
    plain = {f"model.layers.{i}.mlp.up_proj.weight": torch.zeros(384, 128) for i in range(4)}
    save_file(plain, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match="hold weights in fp8 in blocks of 128 x 128, as quantization_config"
    ) as error:
        check_checkpoint_shapes(tmp_path, read_hf_config(tmp_path))
    assert "got no tensor with the name weight_scale_inv; remove quantization_config if" in str(error.value)


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "fp8"},
        {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]},
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        {**INT4, "format": "nvfp4-pack-quantized"},
        {**INT4, "config_groups": {"group_0": {"weights": THREE_BITS}}},
        {**INT4, "config_groups": {}},
        "fp8",
    ],
)  # fmt: skip
def test_an_unknown_scheme_is_an_error_with_a_remedy(tmp_path, said):
    write_model(tmp_path, quantization_config=said)
    with pytest.raises(ValueError, match="quantization_config in config.json must be fp8") as error:
        check_checkpoint_shapes(tmp_path, read_hf_config(tmp_path))
    assert "\n" not in str(error.value)
    assert "use a checkpoint in bfloat16" in str(error.value)


REFERENCE = ("--use-kl-loss", "--kl-loss-coef", "0.1", "--ref-load")


@pytest.mark.parametrize("flag", ["--ref-load", "--load"])
@pytest.mark.parametrize(
    ("said", "changes", "message"),
    [
        (FP8, {}, ""),
        (INT4, {}, ""),
        (FP8, {"weight_scale_inv": None}, f"must have {UP}.weight_scale_inv, got none for the weight in"),
        (
            {"quant_method": "awq", "bits": 4},
            {},
            "FLAG .*: quantization_config in config.json must be fp8 .* awq; use",
        ),
    ],
    ids=["fp8", "int4", "no scales", "awq"],
)
def test_weights_beside_a_plain_checkpoint_have_a_scheme_of_their_own(tmp_path, flag, said, changes, message):
    """A plain --hf-checkpoint comes with a quantised --ref-load, or with first weights of --load."""
    argv = [
        *good_argv(tmp_path),
        *(REFERENCE if flag == "--ref-load" else ("--load",)),
        str(tmp_path / "other"),
    ]
    write_quantized(tmp_path / "other", said if not message or changes else FP8, **changes)
    write_model(tmp_path / "other", quantization_config=said)
    if not message:
        assert parse_args(argv).rollout.hf_checkpoint == str(tmp_path / "model")
        return
    with pytest.raises(ValueError, match=message.replace("FLAG", flag)) as error:
        parse_args(argv)
    assert "\n" not in str(error.value)


def test_plain_reference_weights_come_with_a_quantized_checkpoint(tmp_path):
    argv = [*good_argv(tmp_path), *REFERENCE, str(tmp_path / "plain")]
    write_quantized(tmp_path / "model", FP8)
    write_model(tmp_path / "plain")
    plain = {f"model.layers.{i}.mlp.up_proj.weight": torch.zeros(384, 128) for i in range(4)}
    save_file(plain, tmp_path / "plain" / "model.safetensors")
    assert parse_args(argv).checkpoint.ref_load == str(tmp_path / "plain")
