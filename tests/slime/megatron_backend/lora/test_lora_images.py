"""Compares adapters of models with vision tower with PEFT on samples with images. The tower is frozen."""

from __future__ import annotations

from functools import partial

import peft
import pytest
import torch
from family_cases import CASES
from megatron_cases import make_config, tiny_checkpoint
from tower_cases import KEYS, image_hidden, image_logits, make_samples, read_vision

from slime.megatron_backend.checkpoint.peft import save_peft
from slime.megatron_backend.checkpoint.weights import load_hf
from slime.megatron_backend.lora.base import note_base
from slime.megatron_backend.lora.install import add_adapters, find_adapters
from slime.megatron_backend.model.gpt import build_model, output_weight, unwrap, unwrapped
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.models.lora import PREFIX, Lora


@pytest.fixture(scope="module", autouse=True)
def single_rank(tmp_path_factory):
    init_parallel(0, 1, make_config(), init_method=f"file://{tmp_path_factory.mktemp('init')}/store")
    yield
    destroy_parallel()


@pytest.mark.parametrize("name", ["qwen2-5-vl", "qwen3-vl"])
def test_adapters_with_images_are_those_of_peft(tmp_path, name):
    case = CASES[name]
    hf = tiny_checkpoint(tmp_path / "hf", case.kind, **case.shape)
    config = make_config(multimodal_keys=KEYS, lora_rank=4)
    adapt = partial(add_adapters, lora=Lora.of(config), seed=0)
    model = build_model(load_hf_config(tmp_path / "hf"), config, adapt=adapt)
    load_hf(model, tmp_path / "hf")
    note_base(unwrapped(model))
    trained = [name for name, p in unwrap(model).named_parameters() if p.requires_grad]
    assert trained and all(name.startswith(PREFIX) for name in trained)
    generator = torch.Generator().manual_seed(1)
    for _, adapter in find_adapters(unwrap(model)):
        for parameter in adapter.parameters():
            parameter.data.normal_(std=0.05, generator=generator)
    save_peft(model, tmp_path / "peft", str(tmp_path / "hf"))
    vision = read_vision(tmp_path / "hf")
    data = make_samples(vision)
    with torch.no_grad():
        base = image_logits(hf, data)
        wanted = image_logits(peft.PeftModel.from_pretrained(hf, tmp_path / "peft"), data)
        got = (image_hidden(model, data, vision) @ output_weight(model).T)[:, :99]
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    assert (wanted - base).abs().max() > 0.1
