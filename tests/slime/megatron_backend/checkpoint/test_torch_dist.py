"""Tests checkpoints of slime's converter and of Megatron: read on one rank, rejected with errors, and written."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from megatron_cases import VOCAB, make_config, sequences, tiny_checkpoint, train_step
from safetensors.torch import load_file
from torch_dist_cases import convert, megatron_tensors, release, stacked, write_torch_dist

from slime.megatron_backend.checkpoint.distributed import load_checkpoint, save_checkpoint
from slime.megatron_backend.checkpoint.torch_dist import load_torch_dist
from slime.megatron_backend.checkpoint.torch_dist_save import save_torch_dist
from slime.megatron_backend.checkpoint.weights import export_hf, load_hf, load_weights
from slime.megatron_backend.model.gpt import build_model, unwrap
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.model.optimizer import build_optimizer

pytestmark = pytest.mark.usefixtures("single_rank")

KINDS = {
    "qwen2": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False, "dtype": "bfloat16"},
    "qwen3_moe": {"tie_word_embeddings": False},
    "glm4_moe": {"tie_word_embeddings": False},
}


@pytest.fixture(scope="module")
def hf_dirs(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")
    for kind, shape in KINDS.items():
        tiny_checkpoint(root / kind, kind, **shape)
    return root


def empty_model(hf_dir, **config):
    """Returns a model in which every value is wrong."""
    model = build_model(load_hf_config(hf_dir), make_config(**config), ddp=False)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(3.0)
    return model


def assert_holds(model, hf):
    exported = dict(export_hf(model))
    assert exported.keys() == hf.keys() - ({"lm_head.weight"} if "lm_head.weight" not in exported else set())
    for name, tensor in exported.items():
        assert torch.equal(tensor, hf[name].to(tensor.dtype)), name
    inner = unwrap(model)
    for module in (inner.embedding.word_embeddings, inner.output_layer):
        if module.weight is not None:
            assert not module.weight[VOCAB:].any()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen2", {"stack": True, "vocab_rows": 128}),
        ("qwen2", {"vocab_rows": VOCAB + 1, "cut": 3}),
        ("qwen3", {"stack": True, "vocab_rows": 256, "cut": 2}),
        ("qwen3", {"cut": 4, "trained": True}),
        ("qwen3_moe", {"vocab_rows": 128}),
        ("qwen3_moe", {"stack": True, "cut": 2, "trained": True}),
        ("glm4_moe", {"vocab_rows": 128, "cut": 2}),
    ],
)
def test_every_tensor_equals_the_hugging_face_one(hf_dirs, tmp_path, kind, options):
    """Layers are stacked or numbered, and split as several ranks save them. Padded vocabularies are smaller and
    larger."""
    hf = convert(hf_dirs / kind, release(tmp_path), **options)
    model = empty_model(hf_dirs / kind)
    load_weights(model, str(tmp_path))
    assert_holds(model, hf)


def test_norms_of_local_layers_are_read_under_their_own_names(hf_dirs, tmp_path):
    """In local layers, norms are separate modules, because the layers do not fuse them."""
    hf = load_file(hf_dirs / "qwen2" / "model.safetensors")
    tensors = megatron_tensors(
        hf, {**json.loads((hf_dirs / "qwen2/config.json").read_text()), "head_dim": 16}
    )
    names = {
        "self_attention.linear_qkv.layer_norm": "input_layernorm.",
        "mlp.linear_fc1.layer_norm": "pre_mlp_layernorm.",
    }
    for old, new in names.items():
        tensors = {name.replace(f"{old}_", new): tensor for name, tensor in tensors.items()}
    write_torch_dist(tmp_path / "release", stacked(tensors, 2))
    model = empty_model(hf_dirs / "qwen2")
    load_torch_dist(model, tmp_path / "release")
    assert_holds(model, hf)


def test_values_are_cast_to_the_models_dtype(hf_dirs, tmp_path):
    hf = convert(hf_dirs / "qwen2", release(tmp_path))
    model = empty_model(hf_dirs / "qwen2", params_dtype="bfloat16")
    load_weights(model, str(tmp_path))
    assert_holds(model, hf)


def test_all_tensors_that_do_not_fit_are_named_at_once(hf_dirs, tmp_path):
    hf = load_file(hf_dirs / "qwen3" / "model.safetensors")
    tensors = megatron_tensors(hf, json.loads((hf_dirs / "qwen3/config.json").read_text()))
    del tensors["decoder.layers.1.mlp.linear_fc2.weight"]
    tensors["decoder.layers.2.mlp.linear_fc2.weight"] = torch.zeros(4)
    tensors["decoder.layers.0.mlp.linear_fc2.weight"] = torch.zeros(64, 95)
    tensors["decoder.final_layernorm.weight"] = torch.zeros(64, dtype=torch.int8)
    tensors["output_layer.weight"] = torch.zeros(98, 64)
    write_torch_dist(tmp_path / "release", tensors)
    model = empty_model(hf_dirs / "qwen3")
    before = {name: tensor.clone() for name, tensor in export_hf(model)}
    with pytest.raises(ValueError) as error:
        load_torch_dist(model, tmp_path / "release")
    text = str(error.value)
    assert text.startswith(
        f"the tensors of {tmp_path}/release must match config.json of --hf-checkpoint, got 5 that do not: "
    )
    for said in (
        "decoder.layers.1.mlp.linear_fc2.weight is missing",
        "decoder.layers.2.mlp.linear_fc2.weight is unexpected",
        "decoder.layers.0.mlp.linear_fc2.weight has shape [64, 95] instead of [64, 96]",
        "decoder.final_layernorm.weight has dtype torch.int8",
        "output_layer.weight has shape [98, 64] instead of [99, 64]",
    ):
        assert said in text
    assert all(torch.equal(tensor, before[name]) for name, tensor in export_hf(model))


def _truncate(path: Path) -> None:
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1000])


class _Attack:
    def __reduce__(self):
        return os.mkdir, ("attacked",)


def _foreign_pickle(path: Path) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(_Attack()))


def _empty(path: Path) -> None:
    (path / ".metadata").write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_empty, r"release/\.metadata must be there as it was saved, got EOFError"),
        (".metadata", r"must be next to release/"),
        ("metadata.json", r"release/metadata.json must be there as it was saved, got no such"),
        (_truncate, r"release/__0_0.distcp must have \d+ bytes as it was saved, got \d+"),
        ("__0_0.distcp", r"release/__0_0.distcp must be there as it was saved, got no such"),
        (_foreign_pickle, r"release/\.metadata must be there as .*, got UnpicklingError: it is no index"),
    ],
    ids=["empty index", "no index", "no end", "cut off", "no tensors", "attack"],
)
def test_a_damaged_folder_is_an_error_of_one_line_with_the_file(hf_dirs, tmp_path, damage, said, monkeypatch):
    monkeypatch.chdir(tmp_path)
    convert(hf_dirs / "qwen2", release(tmp_path))
    if isinstance(damage, str):
        (tmp_path / "release" / damage).unlink()
    else:
        damage(tmp_path / "release")
    with pytest.raises(ValueError, match=said) as error:
        load_weights(empty_model(hf_dirs / "qwen2"), str(tmp_path))
    assert "\n" not in str(error.value) and "convert the model again" in str(error.value)
    assert not Path("attacked").exists()


def test_an_iteration_of_slime_gives_weights_and_number_and_its_optimizer_starts_anew(
    hf_dirs, tmp_path, caplog
):
    hf = convert(hf_dirs / "qwen2", tmp_path / "iter_0000100", stack=True, trained=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    config = make_config(lr=1e-3)
    model = build_model(load_hf_config(hf_dirs / "qwen2"), config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3.0)
    parts = (model, *build_optimizer(model, config, total_steps=10))
    assert load_checkpoint(tmp_path, *parts) == {"rollout_id": 100}
    assert "was saved by slime or Megatron: its weights are taken" in caplog.text
    assert_holds(model, hf)
    twin = build_model(load_hf_config(hf_dirs / "qwen2"), config)
    load_hf(twin, hf_dirs / "qwen2")
    twin = (twin, *build_optimizer(twin, config, total_steps=10))
    assert train_step(*parts, sequences(0)) == train_step(*twin, sequences(0))
    for (name, a), (_, b) in zip(export_hf(parts[0]), export_hf(twin[0]), strict=True):
        assert torch.equal(a, b), name  # a step starts from the loaded weights
    save_checkpoint(tmp_path, 101, *parts, extra={"rollout_id": 101})
    # This project's checkpoint is in the same folder.
    assert load_checkpoint(tmp_path, *parts) == {"rollout_id": 101}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_has_the_converters_names_and_reads_back(hf_dirs, tmp_path, kind):
    """A hand-written mapping has the same names, shapes and values: stacked dense layers, numbered layers with
    experts."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    model = empty_model(hf_dirs / kind)
    load_hf(model, hf_dirs / kind)
    path = save_torch_dist(model, tmp_path, str(hf_dirs / kind))
    assert path == tmp_path / "release"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert not list(tmp_path.glob(".*"))
    hf = load_file(hf_dirs / kind / "model.safetensors")
    expected = megatron_tensors(hf, json.loads((hf_dirs / kind / "config.json").read_text()))
    if "moe" not in kind:
        expected = stacked(expected, 2)
    index = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    found = {k: torch.empty(v.size) for k, v in index.items() if isinstance(v, TensorStorageMetadata)}
    assert found.keys() == expected.keys()
    dcp.load(found, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    for name, tensor in expected.items():
        rows = len(tensor) if ".layers." not in name else None
        assert torch.equal(found[name][:rows], tensor.float()), name
    layer = "decoder.layers.1.self_attention.core_attention._extra_state/shard_0_1"
    assert (
        layer if "moe" in kind else "decoder.layers.self_attention.core_attention._extra_state/shard_1_2"
    ) in index
    common = torch.load(path / "common.pt", weights_only=False)
    assert (common["checkpoint_version"], common["args"].num_layers) == (3.0, 2)
    again = empty_model(hf_dirs / kind)
    load_weights(again, str(tmp_path))
    assert_holds(again, hf)
