"""Reads config.json and the headers of the weight files in its folder."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from slime.checkpoints.hf_config import check_checkpoint_shapes, read_config_json, read_hf_config

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 6,
    "hidden_size": 4,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
}


def write(folder, **changes):
    tensors = {"model.embed_tokens.weight": torch.zeros(6, 4), "model.norm.weight": torch.zeros(4)}
    for layer in range(2):
        tensors[f"model.layers.{layer}.mlp.gate_proj.weight"] = torch.zeros(8, 4)
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"] = torch.zeros(4, 8)
    save_file({**tensors, **changes}, folder / "model.safetensors")


def test_weights_that_fit(tmp_path):
    check_checkpoint_shapes(tmp_path, CONFIG)  # there is nothing to check
    write(tmp_path)
    check_checkpoint_shapes(tmp_path, CONFIG)


def test_a_shape_that_does_not_fit_is_named(tmp_path):
    write(tmp_path, **{"model.layers.1.mlp.down_proj.weight": torch.zeros(4, 7)})
    with pytest.raises(
        ValueError, match=r"model\.layers\.1\.mlp\.down_proj\.weight .* shape \[4, 8\], .* got \[4, 7\]"
    ):
        check_checkpoint_shapes(tmp_path, CONFIG)
    write(tmp_path)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight .* shape \[7, 4\], .* got \[6, 4\]"):
        check_checkpoint_shapes(tmp_path, {**CONFIG, "vocab_size": 7})


@pytest.mark.parametrize("size", [0, 4, 20, 500, -1])
def test_a_file_that_was_cut_off_is_named(tmp_path, size):
    write(tmp_path)
    file = tmp_path / "model.safetensors"
    size = size if size >= 0 else file.stat().st_size - 1
    os.truncate(file, size)
    with pytest.raises(ValueError) as error:
        check_checkpoint_shapes(tmp_path, CONFIG)
    assert str(error.value).startswith(f"{file} must be a whole safetensors file, got {size} bytes: ")
    assert str(error.value).endswith("; download or copy the checkpoint again")


def test_a_file_that_the_index_names_must_be_there(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "more.safetensors"}}))
    check_checkpoint_shapes(tmp_path, CONFIG)  # the folder has only JSON files
    write(tmp_path)
    with pytest.raises(ValueError, match=r"/more.safetensors must be a whole safetensors file, got no such"):
        check_checkpoint_shapes(tmp_path, CONFIG)
    for text in ("{", "[1]", "{}"):
        index.write_text(text)
        with pytest.raises(ValueError, match=r"index\.json must hold a valid weight_map, got .*; download"):
            check_checkpoint_shapes(tmp_path, CONFIG)


def test_a_wrong_number_of_layers(tmp_path):
    write(tmp_path)
    with pytest.raises(ValueError, match=r"must hold 3 layers, .* got 2"):
        check_checkpoint_shapes(tmp_path, {**CONFIG, "num_hidden_layers": 3})


def test_numbers_of_experts_are_not_layers(tmp_path):
    names = [f"model.layers.1.mlp.experts.{i}.down_proj.weight" for i in range(5)]
    write(tmp_path, **{name: torch.zeros(4, 2) for name in names})
    check_checkpoint_shapes(tmp_path, CONFIG)


def test_config_json_is_read_or_named(tmp_path):
    with pytest.raises(ValueError, match=r"--hf-checkpoint must be a directory with a config\.json"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="JSON object"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert read_hf_config(tmp_path) == CONFIG


def test_a_folder_of_models_is_answered_with_the_models(tmp_path):
    for name in ("step-10", "step-20", "deep/snapshot"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.json").write_text("{}")
    runs = tmp_path / "runs"
    with pytest.raises(ValueError) as error:
        read_config_json(runs)
    wanted = f"got {runs}; did you mean {runs}/step-10 or {runs}/step-20 or {runs}/deep/snapshot?"
    assert str(error.value).endswith(wanted)
    with pytest.raises(ValueError, match="check the path$"):
        read_config_json(runs / "absent")
