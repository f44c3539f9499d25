"""Compares every family with transformers on a tiny random model: logits, log-probs, gradients, and the bytes of
weights."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial

import family_record
import pytest
import torch
import transformers
from family_cases import CASES, TINY
from megatron_cases import (
    VOCAB,
    assert_gradients_equal,
    become_gradients,
    hf_gradients,
    hf_logits,
    hidden_of,
    make_config,
    packed_logits,
    sequences,
    sum_loss,
    tiny_checkpoint,
    trained,
)
from safetensors.torch import load_file, save_file

import rl_kernel
from slime.megatron_backend.checkpoint.weights import export_hf, load_hf, save_hf
from slime.megatron_backend.model.gpt import build_model, logit_cap, output_weight, vocab_range
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.models import FAMILIES, family_for, read_decoder

BATCH = [
    *sequences(0),
    torch.randint(0, VOCAB, (70,), generator=torch.Generator().manual_seed(9)),
    torch.tensor([5]),
]


@pytest.fixture(scope="module", autouse=True)
def single_rank(tmp_path_factory):
    init_parallel(0, 1, make_config(), init_method=f"file://{tmp_path_factory.mktemp('init')}/store")
    yield
    destroy_parallel()


@pytest.fixture(scope="module", params=CASES)
def tiny(request, tmp_path_factory):
    """Returns (directory, transformers' model, this project's model) for one tiny model."""
    case, directory = CASES[request.param], tmp_path_factory.mktemp("hf")
    hf = tiny_checkpoint(directory, case.kind, **case.shape)
    return directory, hf, loaded(directory)


@pytest.fixture
def note(request):
    """Returns a function that records a measured number of the tiny model."""
    return partial(family_record.note, request.node.callspec.params["tiny"])


def loaded(directory):
    model = build_model(load_hf_config(directory), make_config())
    load_hf(model, directory)
    return model


def test_every_family_has_a_tiny_model():
    assert {case.kind for case in CASES.values()} == FAMILIES.keys() == TINY.keys()


def test_logits_and_log_probs(tiny, note):
    _, hf, model = tiny
    with torch.no_grad():
        expected, got = hf_logits(hf, BATCH), packed_logits(model, BATCH)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
        targets = torch.cat([tokens.roll(-1) for tokens in BATCH])
        start, size = vocab_range(model)
        hidden, weight = hidden_of(model, BATCH), output_weight(model)
        shard = {"vocab_start": start, "vocab_size": size, "logit_cap": logit_cap(model)}
        ours = rl_kernel.linear_logp(hidden, weight, targets, **shard)
    theirs = expected.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    note("logits", (got - expected).abs().max())
    note("log_probs", (ours - theirs).abs().max())


def test_weights_are_exported_as_they_were_loaded(tiny, note, tmp_path):
    directory, hf, model = tiny
    original, exported = load_file(directory / "model.safetensors"), dict(export_hf(model))
    kept = set(trained(original, directory))
    assert exported.keys() == kept
    assert all(torch.equal(exported[name], original[name]) for name in kept)
    note("one_bits", 1)
    save_hf(model, directory, tmp_path)
    known = json.loads((tmp_path / "config.json").read_text())["model_type"] in transformers.CONFIG_MAPPING
    again = type(hf).from_pretrained(
        tmp_path,
        config=None if known else hf.config,
        attn_implementation=hf.config._attn_implementation,
    )
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], original[name]) for name in original)
    # The bits differ, because a product may depend on the address at which a weight begins.
    torch.testing.assert_close(hf_logits(again, sequences(3)), hf_logits(hf, sequences(3)), rtol=0, atol=1e-6)


def test_bad_files_are_named(tiny, tmp_path):
    """The files have an unknown rotary setting, a missing tensor, or a tensor of another shape."""
    directory, _, model = tiny
    hf = load_hf_config(directory)
    rotary = hf.get("rope_parameters") or {"rope_theta": 1e4}
    both = rotary.get("full_attention")
    for odd, message in (
        ()
        if not read_decoder(hf).ropes
        else (
            (
                {"rope_type": "spiral"},
                "rope_type in config.json must be one of .* got 'spiral'; it is not known",
            ),
            (
                {"warp": 3},
                "rotary settings in config.json must be among .* got warp; what they change is not kn",
            ),
        )
    ):
        changed = {**rotary, "full_attention": both | odd} if both else rotary | odd
        with pytest.raises(ValueError, match=message):
            family_for(hf).read({**hf, "rope_parameters": changed})
    shutil.copytree(directory, tmp_path / "bad")
    file = tmp_path / "bad" / "model.safetensors"
    tensors = load_file(file)
    name = min(
        n for n in tensors if n.endswith(("layers.1.post_attention_layernorm.weight", "layers.1.norm.weight"))
    )
    whole = tensors.pop(name)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"got 1 missing from .*: {re.escape(name)}; check"):
        load_hf(model, tmp_path / "bad")
    save_file({**tensors, name: whole[:-1].clone()}, file, metadata={"format": "pt"})
    message = (
        rf"{re.escape(name)} must have shape \[{len(whole)}\] as in config.json, got \[{len(whole) - 1}\] in"
    )
    with pytest.raises(ValueError, match=message):
        load_hf(model, tmp_path / "bad")


def test_gradients(tiny, note, tmp_path):
    """The model's gradients equal transformers'. The test is the last for a model, because its parameters become
    gradients."""
    directory, hf, model = tiny
    sum_loss(packed_logits(model, BATCH), BATCH).backward()
    sum_loss(torch.cat([hf(tokens[None]).logits[0] for tokens in BATCH]), BATCH).backward()
    become_gradients(model)
    got = {name: x for name, x in export_hf(model) if not name.endswith("e_score_correction_bias")}
    wanted = {
        n: x for n, x in hf_gradients(hf, tmp_path).items() if not n.endswith("e_score_correction_bias")
    }
    wanted = trained(wanted, directory)
    assert got.keys() == wanted.keys()
    note(
        "gradients",
        max(assert_gradients_equal(gradient, wanted[name], name) for name, gradient in got.items()),
    )
