"""gpt-oss checkpoints in MXFP4 are read as transformers reads them, and written again in bfloat16."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from dequantize import dequantize_checkpoint
from megatron_cases import hf_logits, make_config, packed_logits, sequences, tiny_checkpoint
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from slime.megatron_backend.checkpoint.weights import load_hf
from slime.megatron_backend.model.gpt import build_model
from slime.megatron_backend.model.model_config import check_hf_config, load_hf_config
from slime.models.quantized.mxfp4 import dequantized

pytestmark = pytest.mark.usefixtures("single_rank")

HIDDEN, WIDTH, EXPERTS = 64, 32, 6


def quantized(shape, seed):
    """Returns random codes and scales of a weight [E, outputs, inputs]."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape[:-1], shape[-1] // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(119, 124, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
    return blocks, scales


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Returns (directory with MXFP4 experts, the transformers model with the same weights)."""
    folder = tmp_path_factory.mktemp("mxfp4")
    tiny_checkpoint(folder, "gpt_oss", tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    plain = {}
    for layer in (0, 1):
        for name, shape in (
            ("gate_up_proj", (EXPERTS, 2 * WIDTH, HIDDEN)),
            ("down_proj", (EXPERTS, HIDDEN, WIDTH)),
        ):
            path = f"model.layers.{layer}.mlp.experts.{name}"
            blocks, scales = quantized(shape, layer)
            plain[path] = convert_moe_packed_tensors(blocks, scales).float()
            assert plain[path].shape == tensors.pop(path).shape
            tensors |= {f"{path}_blocks": blocks, f"{path}_scales": scales}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    hf = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    hf.load_state_dict({n: x for n, x in tensors.items() if "_proj_" not in n or "bias" in n} | plain)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, hf.eval()


def test_every_code_and_scale():
    """Code 2 is 1, code 15 is -6, and scale 126 is a half."""
    blocks = torch.tensor([[[0xF2] * 16, [0x21] * 16]], dtype=torch.uint8)
    values = dequantized(blocks, torch.tensor([[126, 128]], dtype=torch.uint8))
    assert values.dtype == torch.bfloat16
    assert values.tolist() == [[0.5, -3.0] * 16 + [1.0, 2.0] * 16]
    every = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16)
    scales = torch.arange(100, 116, dtype=torch.uint8).view(1, 16, 1)
    theirs = convert_moe_packed_tensors(every, scales).transpose(1, 2)
    assert torch.equal(dequantized(every, scales), theirs)


def test_the_trainer_reads_them_as_transformers_does(checkpoints):
    folder, hf = checkpoints
    model = build_model(load_hf_config(folder), make_config())
    load_hf(model, folder)
    with torch.no_grad():
        got = packed_logits(model, sequences(0))
    torch.testing.assert_close(got, hf_logits(hf, sequences(0)), rtol=0, atol=1e-5)


def test_a_copy_in_bfloat16_is_an_ordinary_checkpoint(checkpoints, tmp_path):
    folder, hf = checkpoints
    dequantize_checkpoint(folder, tmp_path / "plain")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    assert not hasattr(again.config, "quantization_config")
    for name, tensor in hf.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    with pytest.raises(ValueError, match="DIR must hold a quantised checkpoint"):
        dequantize_checkpoint(tmp_path / "plain", tmp_path / "twice")


def test_another_quantization_is_an_error(checkpoints):
    config = load_hf_config(checkpoints[0]) | {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(ValueError, match="quant_method in config.json must be mxfp4"):
        check_hf_config(config)
