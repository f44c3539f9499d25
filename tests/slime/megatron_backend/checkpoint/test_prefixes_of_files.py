"""Reads a Gemma 3 from files of published models and of two versions of transformers, whose prefixes of tensors differ,
and from a config.json with few fields."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from megatron_cases import make_config, tiny_checkpoint
from safetensors.torch import load_file, save_file
from tower_cases import KEYS

from slime.checkpoints.hf_config import check_checkpoint_shapes, read_hf_config
from slime.megatron_backend.checkpoint.weights import export_hf, load_hf, save_hf
from slime.megatron_backend.model.gpt import build_model
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.models import FAMILIES, read_decoder
from slime.models.families.gemma3 import DEFAULTS

VERSION_4 = {
    "language_model.model.": "model.language_model.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}
VERSION_5 = {"vision_tower.vision_model.": "vision_tower."}


@pytest.fixture(scope="module", autouse=True)
def single_rank(tmp_path_factory):
    init_parallel(0, 1, make_config(), init_method=f"file://{tmp_path_factory.mktemp('init')}/store")
    yield
    destroy_parallel()


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma")
    tiny_checkpoint(folder, "gemma3")
    return folder


def renamed(name, prefixes):
    prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
    return prefixes[prefix] + name.removeprefix(prefix) if prefix else name


@pytest.mark.parametrize("prefixes", [VERSION_4, VERSION_5], ids=["version 4", "version 5"])
@pytest.mark.parametrize("images", [True, False], ids=["images", "text"])
def test_files_with_other_prefixes(published, tmp_path, prefixes, images):
    """An export has the prefixes of published files, also for a run of text, which copies the tower."""
    wanted = load_file(published / "model.safetensors")
    files = {renamed(name, prefixes): tensor for name, tensor in wanted.items()}
    assert files.keys() != wanted.keys()
    save_file(files, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((published / "config.json").read_text())
    hf = load_hf_config(tmp_path)
    check_checkpoint_shapes(tmp_path, hf)
    model = build_model(hf, make_config(**({"multimodal_keys": KEYS} if images else {})))
    load_hf(model, tmp_path)
    exported = dict(export_hf(model))
    tower = {name for name in wanted if name.startswith(read_decoder(hf).vision.files)}
    assert exported.keys() == wanted.keys() - (set() if images else tower)
    assert all(torch.equal(exported[name], wanted[name]) for name in exported)
    for form in (None, "checkpoint"):
        save_hf(model, tmp_path, tmp_path / "out", form=form)
        written = load_file(tmp_path / "out" / "model.safetensors")
        assert written.keys() == wanted.keys()
        assert all(torch.equal(written[name], wanted[name]) for name in wanted)


def test_fields_that_a_config_leaves_out(tmp_path):
    """The published config.json of the 4B model leaves out heads, vocabulary and more. transformers has the values."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    tower = {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "num_attention_heads": 16}
    tower |= {"num_hidden_layers": 27, "patch_size": 14, "model_type": "siglip_vision_model"}
    content = {
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": tower | {"vision_use_head": False},
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    few = read_hf_config(tmp_path)
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    whole = read_hf_config(tmp_path)
    assert len(few) < len(whole)
    read, wanted = read_decoder(few), read_decoder(whole)
    for decoder in (read, wanted):
        vars(decoder.vision)["settings"] = {}
    assert read == wanted
    assert (read.vocab, read.heads, read.groups, read.head_dim) == (262208, 8, 4, 256)
    assert (read.vision.image_id, read.vision.tokens_per_image, read.vision.merge) == (262144, 256, 4)
    assert read.ropes[0].settings["factor"] == 8.0 and read.ropes[0].kind == "linear"
    assert read.layers[5].window is None and read.layers[4].window == 1024


def test_default_values_are_those_of_transformers():
    whole, text = transformers.Gemma3Config(), transformers.Gemma3TextConfig()
    for name, value in DEFAULTS.items():
        assert getattr(text if hasattr(text, name) else whole, name) == value, name
    assert FAMILIES["gemma3"].defaults == DEFAULTS


@pytest.mark.parametrize("tokens", [0, 10, 25])
def test_images_have_a_square_of_tokens(published, tokens):
    hf = read_hf_config(published) | {"mm_tokens_per_image": tokens}
    with pytest.raises(
        ValueError, match=f"mm_tokens_per_image .* the square of a divisor of 6, .* got {tokens}; "
    ):
        read_decoder(hf)
