"""Compares a tiny Qwen3-MoE and a tiny GLM-4.5 in Megatron with transformers: logits, log-probs, gradients, and the
bytes of their checkpoints."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from megatron_cases import (
    VOCAB,
    hf_gradients,
    hf_logits,
    hidden_of,
    loaded,
    make_config,
    packed_logits,
    sequences,
    sum_loss,
    tiny_checkpoint,
    train_step,
)
from safetensors.torch import load_file

import rl_kernel
from slime.checkpoints.hf_config import read_hf_config
from slime.megatron_backend.checkpoint.distributed import load_checkpoint, save_checkpoint
from slime.megatron_backend.checkpoint.weights import export_hf, save_hf
from slime.megatron_backend.model.gpt import output_weight, unwrap, vocab_range
from slime.megatron_backend.model.model_config import transformer_config
from slime.megatron_backend.model.moe.experts import GatedExperts
from slime.megatron_backend.model.optimizer import build_optimizer
from slime.models.reading import sparse_layers

pytestmark = pytest.mark.usefixtures("single_rank")

SHAPES = {
    "all-layers": {},
    "untied": {"tie_word_embeddings": False},
    "not-normalised": {"norm_topk_prob": False},
    "one-expert-a-token": {"norm_topk_prob": False, "num_experts_per_tok": 1},
    "every-second-layer": {"decoder_sparse_step": 2, "num_hidden_layers": 3},
    "first-layer-dense": {"mlp_only_layers": [0]},
    "glm": {"tie_word_embeddings": False},
    "glm-with-qk-norm": {"use_qk_norm": True, "attention_bias": False, "first_k_dense_replace": 2},
    "glm-two-shared-experts-scaled": {"n_shared_experts": 2, "routed_scaling_factor": 2.5},
    "glm-groups": {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
    "glm-one-expert-a-token": {"norm_topk_prob": False, "num_experts_per_tok": 1},
}


@pytest.fixture(params=SHAPES)
def checkpoint(request, tmp_path):
    kind = "glm4_moe" if request.param.startswith("glm") else "qwen3_moe"
    return tmp_path, tiny_checkpoint(tmp_path, kind, **SHAPES[request.param])


def test_logits_equal_hf_on_a_packed_row(checkpoint):
    directory, hf = checkpoint
    batch = [*sequences(0), torch.randint(0, VOCAB, (300,)), torch.tensor([5])]
    expected = hf_logits(hf, batch)
    torch.testing.assert_close(packed_logits(loaded(directory), batch), expected, rtol=0, atol=1e-5)


def test_log_probs_equal_hf(checkpoint):
    directory, hf = checkpoint
    model, batch = loaded(directory, ddp=False), sequences(4)
    targets = torch.cat([tokens.roll(-1) for tokens in batch])
    start, size = vocab_range(model)
    weight = output_weight(model)
    ours = rl_kernel.linear_logp(hidden_of(model, batch), weight, targets, vocab_start=start, vocab_size=size)
    theirs = hf_logits(hf, batch).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_gradients_equal_hf(checkpoint, tmp_path):
    directory, hf = checkpoint
    model, batch = loaded(directory), sequences(1)
    sum_loss(packed_logits(model, batch), batch).backward()
    sum_loss(torch.cat([hf(tokens[None]).logits[0] for tokens in batch]), batch).backward()
    wanted = hf_gradients(hf, tmp_path / "gradients")
    for parameter in unwrap(model).parameters():
        parameter.data = parameter.main_grad  # the export then lists gradients
    exported = {name: x for name, x in export_hf(model) if not name.endswith("e_score_correction_bias")}
    wanted = {name: x for name, x in wanted.items() if not name.endswith("e_score_correction_bias")}
    assert set(exported) == set(wanted)
    for name, gradient in exported.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6, msg=name)


def test_routers_learn_and_full_recomputation_changes_nothing(tmp_path):
    tiny_checkpoint(tmp_path, "qwen3_moe")
    batch, grads = sequences(2), []
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    selective = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    for overrides in ({}, recompute, selective):
        model = loaded(tmp_path, overrides=overrides)
        sum_loss(packed_logits(model, batch), batch).backward()
        grads.append(model.buffers[0].grad_data.clone())
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])
    routers = [p.main_grad for n, p in unwrap(model).named_parameters() if n.endswith("router.weight")]
    assert len(routers) == 2 and all(gradient.abs().max() > 1e-5 for gradient in routers)


def test_export_is_bitwise_what_was_loaded(checkpoint):
    directory, _ = checkpoint
    exported = dict(export_hf(loaded(directory)))
    original = load_file(directory / "model.safetensors")
    assert exported.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(exported[name], tensor), name


def test_saved_directory_loads_in_transformers_with_the_same_logits(checkpoint, tmp_path):
    directory, hf = checkpoint
    out = tmp_path / "out"
    save_hf(loaded(directory), directory, out, max_shard_bytes=60_000)
    again = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(hf_logits(again, sequences(3)), hf_logits(hf, sequences(3)))
    assert torch.equal(
        packed_logits(loaded(out), sequences(3)), packed_logits(loaded(directory), sequences(3))
    )


def test_training_steps_lower_the_loss_and_a_checkpoint_goes_on_from_there(tmp_path):
    """Adam trains dense and sparse layers; the saved state continues with equal bits."""
    tiny_checkpoint(tmp_path / "hf", "qwen3_moe", mlp_only_layers=[1])
    config = make_config(lr=3e-3, lr_decay_style="constant", weight_decay=0.0)
    batch, losses = sequences(5), []
    model = loaded(tmp_path / "hf")
    optimizer, scheduler = build_optimizer(model, config, total_steps=10)
    for step in range(6):
        if step == 4:
            save_checkpoint(tmp_path / "saved", 4, model, optimizer, scheduler)
        losses.append(train_step(model, optimizer, scheduler, batch))
    assert losses[-1][0] < 0.8 * losses[0][0]
    resumed = loaded(tmp_path / "hf")
    optimizer, scheduler = build_optimizer(resumed, config, total_steps=10)
    load_checkpoint(tmp_path / "saved", resumed, optimizer, scheduler)
    assert [train_step(resumed, optimizer, scheduler, batch) for _ in range(2)] == losses[4:]
    for (name, got), (_, want) in zip(export_hf(resumed), export_hf(model), strict=True):
        assert torch.equal(got, want), name


def test_published_and_transformers_spelling_are_one(tmp_path):
    tiny_checkpoint(tmp_path, "qwen3_moe", decoder_sparse_step=2, num_hidden_layers=4, mlp_only_layers=[3])
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["num_local_experts"] == 6 and "num_experts" not in written
    published = {k: v for k, v in written.items() if k != "num_local_experts"} | {"num_experts": 6}
    cores = [transformer_config(hf, make_config()) for hf in (written, published)]
    for core, hf in zip(cores, (written, published), strict=True):
        assert (core.num_moe_experts, core.moe_router_topk, core.moe_ffn_hidden_size) == (6, 2, 48)
        assert core.moe_layer_freq == [0, 1, 0, 0] == [int(s) for s in sparse_layers(hf)]
        assert (core.moe_router_pre_softmax, core.moe_router_dtype) == (False, "fp32")
        assert core.moe_aux_loss_coeff == 0.0 and core.moe_token_dispatcher_type == "alltoall"
    kinds = [type(m.mlp).__name__ for m in unwrap(loaded(tmp_path)).decoder.layers]
    assert kinds == ["GatedMLP", "ExpertLayer", "GatedMLP", "GatedMLP"]
    experts = [m for m in unwrap(loaded(tmp_path)).modules() if isinstance(m, GatedExperts)]
    assert [len(m.local_experts) for m in experts] == [6]


@pytest.mark.parametrize(
    ("shape", "config", "message"),
    [
        ({"num_experts_per_tok": 7}, {}, r"num_experts_per_tok in config.json must lie in \[1, 6\]"),
        ({"num_experts_per_tok": 1}, {}, "norm_topk_prob in config.json must be False with"),
        ({"norm_topk_prob": None}, {}, "config.json must give norm_topk_prob"),
        ({}, {"tensor_model_parallel_size": 2}, "--sequence-parallel must be given for experts"),
        ({}, {"overrides": {"transformer_impl": "transformer_engine"}}, "--transformer-impl must be local"),
        ({}, {"overrides": {"moe_aux_loss_coeff": 0.01}}, "--moe-aux-loss-coeff must be left out, got 0.01"),
        ({}, {"overrides": {"moe_expert_capacity_factor": 1.0}}, "a dropped token is not what the engine"),
        ({}, {"overrides": {"moe_expert_capacity_factor": 0.0}}, "a dropped token is not what the engine"),
        ({}, {"overrides": {"moe_router_pre_softmax": True}}, "--moe-router-pre-softmax must be False, as"),
        ({}, {"overrides": {"moe_router_topk_scaling_factor": 2.0}}, "-scaling-factor must be None, as the"),
    ],
)
def test_what_would_be_another_model_is_refused(tmp_path, shape, config, message):
    tiny_checkpoint(tmp_path, "qwen3_moe")
    changed = read_hf_config(tmp_path) | shape
    hf_config = {key: value for key, value in changed.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        transformer_config(hf_config, make_config(**config))
