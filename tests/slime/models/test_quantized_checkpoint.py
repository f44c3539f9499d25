"""Tests checkpoints in fp8 and int4: it quantises a tiny DeepSeek-V3, which loads as its dequantised weights."""

from __future__ import annotations

import json

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from megatron_cases import make_config, tiny_checkpoint
from safetensors.torch import load_file, save_file

from slime.checkpoints.hf_files import Files
from slime.megatron_backend.checkpoint.weights import export_hf, load_hf, save_hf
from slime.megatron_backend.model.gpt import build_model
from slime.megatron_backend.model.model_config import load_hf_config
from slime.models.quantized.quantized_checkpoint import dequantized

pytestmark = pytest.mark.usefixtures("single_rank")

FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16], "fmt": "e4m3"}
INT4_GROUP = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 8}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": INT4_GROUP}},
}
EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"
PREDICTION = "model.layers.2.eh_proj.weight"


def in_fp8(name, weight):
    """Makes blocks of 16 x 16 whose largest element is at the end of the range. Published files have blocks of 128 x
    128."""
    rows, columns = (-(-size // 16) for size in weight.shape)
    padded = torch.zeros(16 * rows, 16 * columns)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(rows, 16, columns, 16)
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).view_as(padded)[: weight.shape[0], : weight.shape[1]]
    codes = codes.to(torch.float8_e4m3fn).contiguous()
    height, width = weight.shape
    wanted = codes.float() * scales.repeat_interleave(16, 0)[:height].repeat_interleave(16, 1)[:, :width]
    return {name: codes, f"{name}_scale_inv": scales}, wanted.to(torch.bfloat16).float()


def in_int4(name, weight):
    """Makes groups of eight columns, packed by compressed-tensors."""
    groups = weight.unflatten(1, (-1, 8))
    scales = (groups.abs().amax(-1) / 7).to(torch.bfloat16)
    codes = (groups / scales[..., None].float()).round().clamp(-8, 7)
    stored = {
        f"{name}_packed": pack_to_int32(codes.flatten(1).to(torch.int8), 4),
        f"{name}_scale": scales,
        f"{name}_shape": torch.tensor(weight.shape),
    }
    return stored, (codes * scales[..., None].float()).flatten(1).to(torch.bfloat16).float()


def per_expert(tensors):
    """Returns one tensor per expert and projection, as in published files. transformers may write one tensor per
    layer."""
    found = {}
    for name, tensor in tensors.items():
        layer, stacked, part = name.rpartition(".experts.")
        if not stacked or tensor.dim() != 3:
            found[name] = tensor
            continue
        for expert, one in enumerate(tensor):
            halves = zip(("gate_proj", "up_proj"), one.chunk(2), strict=True)
            parts = dict(halves) if part == "gate_up_proj" else {"down_proj": one}
            found |= {f"{layer}.experts.{expert}.{p}.weight": x.contiguous() for p, x in parts.items()}
    return found


def quantize(directory, said, form, kind="deepseek_v3"):
    """Stores the routed experts, one latent projection, two of the indexer's and the prediction layer of a tiny model
    in `form`. Returns the dequantised weights."""
    tiny_checkpoint(directory, kind)
    file = directory / "model.safetensors"
    stored, wanted = {}, {}
    for name, tensor in per_expert(load_file(file)).items():
        indexer = name.endswith(("indexer.wq_b.weight", "indexer.wk.weight"))
        if ".experts." in name or "q_a_proj" in name or indexer or name == PREDICTION:
            more, wanted[name] = form(name, tensor)
            stored |= more
        else:
            stored[name] = wanted[name] = tensor
    save_file(stored, file, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return stored, wanted


def loaded(directory):
    model = build_model(load_hf_config(directory), make_config(), ddp=False)
    load_hf(model, directory)
    return model


@pytest.mark.parametrize(("said", "form"), [(FP8, in_fp8), (INT4, in_int4)], ids=["fp8", "int4"])
def test_quantized_weights_are_loaded_and_written_plain(tmp_path, said, form):
    _, wanted = quantize(tmp_path / "hf", said, form)
    model = loaded(tmp_path / "hf")
    exported = dict(export_hf(model))
    assert exported.keys() == wanted.keys() - {PREDICTION}
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in exported.items())
    save_hf(model, tmp_path / "hf", tmp_path / "plain")
    written = load_file(tmp_path / "plain" / "model.safetensors")
    assert written.keys() == wanted.keys()
    assert torch.equal(written[PREDICTION].float(), wanted[PREDICTION])
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert all(torch.equal(x, exported[name]) for name, x in export_hf(loaded(tmp_path / "plain")))
    for described, files in (("hf", "plain"), ("plain", "hf")):  # --hf-checkpoint and --ref-load of a run
        other = build_model(load_hf_config(tmp_path / described), make_config(), ddp=False)
        load_hf(other, tmp_path / files)
        assert all(torch.equal(x, exported[name]) for name, x in export_hf(other))


@pytest.mark.parametrize("kind", ["glm_moe_dsa", "deepseek_v32"])
def test_an_indexer_in_fp8(tmp_path, kind):
    """Published files of DeepSeek-V3.2 have two matrices of an indexer in fp8, and the rest in bfloat16."""
    stored, wanted = quantize(tmp_path / "hf", FP8, in_fp8, kind)
    assert "model.layers.0.self_attn.indexer.wk.weight_scale_inv" in stored
    model = loaded(tmp_path / "hf")
    exported = dict(export_hf(model))
    assert exported.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in exported.items())
    save_hf(model, tmp_path / "hf", tmp_path / "same", form="checkpoint")
    written = load_file(tmp_path / "same" / "model.safetensors")
    shapes = {name: (x.dtype, x.shape) for name, x in stored.items()}
    assert {name: (x.dtype, x.shape) for name, x in written.items()} == shapes


@pytest.mark.parametrize(("said", "form"), [(FP8, in_fp8), (INT4, in_int4)], ids=["fp8", "int4"])
def test_a_slice_needs_only_its_blocks(tmp_path, said, form):
    """A rank reads the codes and scales of the blocks that its slice touches: 16 or 8 of 48 columns, of 64 rows."""
    quantize(tmp_path, said, form)
    files = Files(tmp_path)
    stored = dequantized(files, {"quantization_config": said}).get(EXPERT)
    whole = stored[...]
    assert stored.shape == whole.shape == (64, 48)
    for where in [(slice(5, 23),), (slice(None), slice(18, 31)), (slice(63, 64), slice(0, 48)), ...]:
        assert torch.equal(stored[where], whole[where])
    before = files.read_bytes
    assert torch.equal(stored[:, 40:48], whole[:, 40:48])
    codes, scales = (64 * 16, 4 * 4) if said is FP8 else (64 * 4, 64 * 2)
    assert files.read_bytes - before == codes + scales


@pytest.mark.parametrize(("said", "form"), [(FP8, in_fp8), (INT4, in_int4)], ids=["fp8", "int4"])
def test_weights_are_written_in_the_scheme_of_the_checkpoint(tmp_path, said, form):
    """The scales are computed again, from values that were rounded to bfloat16. Tensors that are not quantised, and the
    prediction layer that the model does not have, are the same bits."""
    stored, wanted = quantize(tmp_path / "hf", said, form)
    model = loaded(tmp_path / "hf")
    save_hf(model, tmp_path / "hf", tmp_path / "same", form="checkpoint", max_shard_bytes=100_000)
    assert len(list((tmp_path / "same").glob("*.safetensors"))) > 2
    written = {n: t for file in (tmp_path / "same").glob("*.safetensors") for n, t in load_file(file).items()}
    assert written.keys() == stored.keys()
    for name, tensor in stored.items():
        assert (written[name].dtype, written[name].shape) == (tensor.dtype, tensor.shape), name
        plain = name in wanted and tensor.dtype != torch.float8_e4m3fn
        if plain or name.startswith(PREDICTION):
            assert torch.equal(written[name], tensor), name
    texts = [(tmp_path / folder / "config.json").read_text() for folder in ("hf", "same")]
    assert json.loads(texts[0]) == json.loads(texts[1])
    before, after = dict(export_hf(model)), dict(export_hf(loaded(tmp_path / "same")))
    for name, tensor in before.items():
        error = (after[name] - tensor).abs().max() / tensor.abs().max()
        assert error < (2**-7 if form is in_int4 else 2**-4), name


def test_a_directory_in_bfloat16_from_a_trainer_in_float32(tmp_path):
    _, wanted = quantize(tmp_path / "hf", FP8, in_fp8)
    save_hf(loaded(tmp_path / "hf"), tmp_path / "hf", tmp_path / "out", form="bf16")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for name, tensor in written.items() if "bias" not in name} == {torch.bfloat16}
    assert torch.equal(written[EXPERT].float(), wanted[EXPERT])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"


def test_scales_that_are_missing_or_of_another_shape_are_named(tmp_path):
    stored, _ = quantize(tmp_path, FP8, in_fp8)
    scales = stored.pop(f"{EXPERT}_scale_inv")
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"must have {EXPERT}_scale_inv, got none"):
        loaded(tmp_path)
    stored[f"{EXPERT}_scale_inv"] = scales[:-1].contiguous()
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=rf"{EXPERT}_scale_inv must have shape \[4, 3\] for 64 x 48 in blocks"
    ):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("said", "got"),
    [
        ({"quant_method": "fp8"}, "got fp8;"),
        ({"quant_method": "awq"}, "got awq;"),
        (
            INT4 | {"config_groups": {"group_0": {"weights": INT4_GROUP | {"num_bits": 8}}}},
            "got compressed-tensors pack-quantized;",
        ),
    ],
)
def test_other_quantizations_are_errors(tmp_path, said, got):
    quantize(tmp_path, said, in_int4)
    with pytest.raises(ValueError, match=rf"quantization_config in config.json must be fp8 .*{got}"):
        load_hf_config(tmp_path)
