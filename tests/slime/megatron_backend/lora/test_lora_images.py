"""Compares adapters of models with vision tower with PEFT, and merged adapters with transformers, on samples with
images. The tower is frozen."""

from __future__ import annotations

from functools import partial

import peft
import pytest
import torch
from family_cases import CASES
from megatron_cases import make_config, tiny_checkpoint
from tower_cases import KEYS, image_hidden, image_logits, make_samples, read_vision

from slime.megatron_backend.checkpoint.merged import merged
from slime.megatron_backend.checkpoint.peft import save_peft
from slime.megatron_backend.checkpoint.weights import live, load_hf, save_hf
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


def adapted(root, name):
    """Returns transformers' model, this project's model with random adapters, and samples with images."""
    case = CASES[name]
    hf = tiny_checkpoint(root / "hf", case.kind, **case.shape)
    config = make_config(multimodal_keys=KEYS, lora_rank=4)
    adapt = partial(add_adapters, lora=Lora.of(config), seed=0)
    model = build_model(load_hf_config(root / "hf"), config, adapt=adapt)
    load_hf(model, root / "hf")
    note_base(unwrapped(model))
    trained = [name for name, p in unwrap(model).named_parameters() if p.requires_grad]
    assert trained and all(name.startswith(PREFIX) for name in trained)
    generator = torch.Generator().manual_seed(1)
    for _, adapter in find_adapters(unwrap(model)):
        for parameter in adapter.parameters():
            parameter.data.normal_(std=0.05, generator=generator)
    return hf, model, make_samples(read_vision(root / "hf"))


@torch.no_grad()
def compare(root, hf, model, data, adapted_hf):
    """Compares the logits of adapters with those of transformers, which differ from those of the base."""
    got = (image_hidden(model, data, read_vision(root / "hf")) @ output_weight(model).T)[:, :99]
    torch.testing.assert_close(got, image_logits(adapted_hf, data), rtol=0, atol=1e-5)
    assert (got - image_logits(hf, data)).abs().max() > 0.1


@pytest.mark.parametrize("name", ["qwen2-5-vl", "qwen3-vl", "qwen3-5", "gemma3-vl"])
def test_adapters_with_images_are_those_of_peft(tmp_path, name):
    hf, model, data = adapted(tmp_path, name)
    save_peft(model, tmp_path / "peft", str(tmp_path / "hf"))
    base = type(hf).from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    compare(tmp_path, hf, model, data, peft.PeftModel.from_pretrained(base, tmp_path / "peft"))


@pytest.mark.parametrize("name", ["qwen3-vl-moe", "qwen3-5-moe", "gemma3-vl"])
def test_merged_adapters_with_images_compute_what_the_adapters_do(tmp_path, name):
    """PEFT has no adapters of stacked experts."""
    hf, model, data = adapted(tmp_path, name)
    save_hf(model, tmp_path / "hf", tmp_path / "merged", read=merged(model, live))
    compare(
        tmp_path, hf, model, data, type(hf).from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    )
