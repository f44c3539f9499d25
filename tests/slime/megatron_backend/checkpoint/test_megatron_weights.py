"""Loads HF checkpoints into the Megatron model and writes them: same logits, same bytes, clear errors."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
import transformers
from megatron_cases import VOCAB, hf_logits, make_config, packed_logits, sequences, sum_loss, tiny_checkpoint
from safetensors.torch import load_file, save_file

from slime.data.token_slice import token_slice
from slime.megatron_backend.checkpoint.weights import export_hf, load_hf, save_hf
from slime.megatron_backend.model.attention import packed_layout
from slime.megatron_backend.model.gpt import build_model, output_weight, stage_output, unwrap, vocab_range
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.models.layouts import Direct, GateUp, GroupedQkv, Sizes, Vocab


@pytest.fixture(scope="module", autouse=True)
def single_rank(tmp_path_factory):
    info = init_parallel(0, 1, make_config(), init_method=f"file://{tmp_path_factory.mktemp('init')}/store")
    assert (info.tp_size, info.dp_size, info.device.type) == (1, 1, "cpu")
    yield
    destroy_parallel()


@pytest.fixture(params=["qwen3-tied", "qwen3-untied", "qwen2-tied", "qwen2-untied"])
def checkpoint(request, tmp_path):
    kind, head = request.param.split("-")
    return tmp_path, tiny_checkpoint(tmp_path, kind, tie_word_embeddings=head == "tied")


def loaded(directory, **config):
    model = build_model(load_hf_config(directory), make_config(**config))
    load_hf(model, directory)
    return model


def test_a_file_that_was_cut_off_is_named(tmp_path):
    """The error also names cut-off files of --load and --ref-load, which only the trainer reads."""
    tiny_checkpoint(tmp_path / "hf")
    model = build_model(load_hf_config(tmp_path / "hf"), make_config())
    os.truncate(file := tmp_path / "hf/model.safetensors", 9999)
    with pytest.raises(ValueError, match=f"^{file} must be a whole safetensors file, got 9999 bytes: "):
        load_hf(model, tmp_path / "hf")


def test_logits_equal_hf_on_a_packed_row(checkpoint):
    directory, hf = checkpoint
    batch = [*sequences(0), torch.randint(0, VOCAB, (300,)), torch.tensor([5])]
    expected = hf_logits(hf, batch)
    torch.testing.assert_close(packed_logits(loaded(directory), batch), expected, rtol=0, atol=1e-5)


def test_gradients_equal_hf(checkpoint):
    directory, hf = checkpoint
    model, batch = loaded(directory), sequences(1)
    sum_loss(packed_logits(model, batch), batch).backward()
    sum_loss(torch.cat([hf(tokens[None]).logits[0] for tokens in batch]), batch).backward()
    wanted = dict(hf.named_parameters())
    for parameter in unwrap(model).parameters():
        parameter.data = parameter.main_grad  # the export then lists gradients
    for name, gradient in export_hf(model):
        torch.testing.assert_close(gradient, wanted[name].grad, rtol=1e-4, atol=1e-6, msg=name)


def test_full_recomputation_changes_nothing(tmp_path):
    tiny_checkpoint(tmp_path)
    batch, grads = sequences(2), []
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    for overrides in (
        {},
        recompute,
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    ):
        model = loaded(tmp_path, overrides=overrides)
        sum_loss(packed_logits(model, batch), batch).backward()
        grads.append(model.buffers[0].grad_data.clone())
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


def test_export_is_bitwise_what_was_loaded(checkpoint):
    directory, _ = checkpoint
    exported = dict(export_hf(loaded(directory)))
    original = load_file(directory / "model.safetensors")
    assert exported.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(exported[name], tensor), name


@pytest.mark.parametrize("max_shard_bytes", [2**30, 60_000])
def test_saved_directory_loads_in_transformers_with_the_same_logits(checkpoint, tmp_path, max_shard_bytes):
    directory, hf = checkpoint
    (directory / "tokenizer.json").write_text("{}")
    out = tmp_path / "out"
    save_hf(loaded(directory), directory, out, max_shard_bytes=max_shard_bytes)
    files = sorted(out.glob("*.safetensors"))
    assert (len(files) == 1) == (max_shard_bytes == 2**30)
    assert (out / "tokenizer.json").read_text() == "{}"
    again = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(hf_logits(again, sequences(3)), hf_logits(hf, sequences(3)))
    reloaded = loaded(out)  # this project's reader also loads it, sharded or not
    assert torch.equal(packed_logits(reloaded, sequences(3)), packed_logits(loaded(directory), sequences(3)))


def test_bfloat16_is_cast_on_load_and_named_on_save(tmp_path):
    hf = tiny_checkpoint(tmp_path / "in")
    model = loaded(tmp_path / "in", params_dtype="bfloat16")
    weight = hf.state_dict()["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(dict(export_hf(model))["model.layers.1.mlp.down_proj.weight"], weight.bfloat16())
    assert {p.dtype for p in unwrap(model).parameters()} == {torch.bfloat16}
    save_hf(model, tmp_path / "in", tmp_path / "out")
    assert load_hf_config(tmp_path / "out")["dtype"] == "bfloat16"
    close = packed_logits(model, sequences(0)).float() - hf_logits(hf, sequences(0))
    assert close.abs().max() < 0.1


def test_padding_rows_are_zero_and_excluded(tmp_path):
    tiny_checkpoint(tmp_path)
    model = loaded(tmp_path)
    assert vocab_range(model) == (0, VOCAB)
    assert output_weight(model).shape == (128, 64)
    assert output_weight(model)[VOCAB:].abs().sum() == 0


def test_reference_model_holds_no_gradients(tmp_path):
    tiny_checkpoint(tmp_path)
    model = build_model(load_hf_config(tmp_path), make_config(), ddp=False)
    load_hf(model, tmp_path)
    assert not any(p.requires_grad for p in model.parameters())
    assert not packed_logits(model, sequences(0)).requires_grad


def edit(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"got 1 missing from .*: model.norm.weight"),
        (lambda t: t.update(extra=torch.ones(1)), r"got 1 unexpected in .*: extra"),
        (
            lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": torch.ones(32, 64)}),
            r"k_proj.weight must have shape \[64, 64\] as in config.json, got \[32, 64\]",
        ),
        (
            lambda t: t.update({"model.embed_tokens.weight": torch.ones(VOCAB + 1, 64)}),
            r"embed_tokens.weight must have shape \[99, 64\] as in config.json, got \[100, 64\]",
        ),
    ],
)
def test_wrong_tensors_are_named(tmp_path, change, message):
    tiny_checkpoint(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        loaded(tmp_path)


def test_a_tied_checkpoint_may_store_its_head_again(tmp_path):
    hf = tiny_checkpoint(tmp_path)
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    logits = packed_logits(loaded(tmp_path), sequences(0))
    torch.testing.assert_close(logits, hf_logits(hf, sequences(0)), rtol=0, atol=1e-5)


def test_absent_weights_are_an_error(tmp_path):
    tiny_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="--hf-checkpoint must hold model.safetensors"):
        loaded(tmp_path)


def test_tokens_must_fit_the_layout(tmp_path):
    tiny_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"tokens must be \[5\] as in the layout, got \[4\]"):
        stage_output(
            loaded(tmp_path), torch.zeros(4, dtype=torch.long), packed_layout(token_slice([2, 3]), "cpu")
        )


SIZES = Sizes(groups=2, head_dim=3, vocab=5, padded_vocab=8)


@pytest.mark.parametrize(
    ("layout", "shapes"),
    [
        (Direct(), [(4, 6)]),
        (Direct(axis=1), [(4, 6)]),
        (Vocab(), [(5, 4)]),
        (GroupedQkv(), [(12, 4), (6, 4), (6, 4)]),
        (GroupedQkv(), [(12,), (6,), (6,)]),
        (GateUp(), [(6, 4), (6, 4)]),
    ],
)
def test_layouts_invert_over_any_number_of_ranks(layout, shapes):
    parts = [torch.randn(shape) for shape in shapes]
    full = layout.join(parts, SIZES)
    for ranks in (1, 2):
        merged = layout.merge([layout.shard(full, rank, ranks) for rank in range(ranks)])
        for got, want in zip(layout.split(merged, SIZES), parts, strict=True):
            assert torch.equal(got, want)


def test_qkv_and_gate_up_order_by_hand():
    """Two groups of two query heads, head size 1: q0 q1 k0 v0 | q2 q3 k1 v1; a rank of two holds one group."""
    sizes = Sizes(groups=2, head_dim=1, vocab=5, padded_vocab=8)
    q, k, v = torch.tensor([0.0, 1, 2, 3]), torch.tensor([10.0, 11]), torch.tensor([20.0, 21])
    full = GroupedQkv().join([q, k, v], sizes)
    assert full.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert GroupedQkv().shard(full, 1, 2).tolist() == [2, 3, 11, 21]
    full = GateUp().join([q, q + 100], sizes)
    assert GateUp().shard(full, 1, 2).tolist() == [2, 3, 102, 103]


def test_interrupted_save_leaves_no_config(tmp_path):
    """config.json is written last, so an incomplete directory is not mistaken for a checkpoint."""
    tiny_checkpoint(tmp_path / "in")
    out = tmp_path / "out"
    shutil.copytree(tmp_path / "in", out)
    model = loaded(tmp_path / "in")
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    save_hf(model, tmp_path / "in", out)  # this replaces an older save with other shards
    assert not (out / "model.safetensors.index.json").exists()
    assert torch.equal(packed_logits(loaded(out), sequences(0)), packed_logits(model, sequences(0)))
