"""The parts that only GLM-4.5 has: the correction bias, rotation of half a head, the layer of multi-token
prediction."""

from __future__ import annotations

import pytest
import torch
import transformers
from megatron_cases import (
    hf_logits,
    make_config,
    packed_logits,
    sequences,
    sum_loss,
    tiny_checkpoint,
    train_step,
)
from safetensors.torch import load_file, save_file

from slime.checkpoints.hf_config import check_checkpoint_shapes, read_hf_config
from slime.data.token_slice import token_slice
from slime.megatron_backend.checkpoint.distributed import load_checkpoint, save_checkpoint
from slime.megatron_backend.checkpoint.weights import export_hf, load_hf, save_hf
from slime.megatron_backend.model.attention import RotaryAngles, packed_layout, rotated
from slime.megatron_backend.model.gpt import build_model, unwrap
from slime.megatron_backend.model.model_config import check_hf_config, transformer_config
from slime.megatron_backend.model.optimizer import build_optimizer
from slime.models import family_for, read_decoder
from slime.models.reading import sparse_layers

pytestmark = pytest.mark.usefixtures("single_rank")

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture
def checkpoint(tmp_path):
    return tmp_path / "hf", tiny_checkpoint(tmp_path / "hf", "glm4_moe", tie_word_embeddings=False)


def loaded(directory, *, ddp=True, **config):
    hf_config = read_hf_config(directory)
    check_hf_config(hf_config)
    model = build_model(hf_config, make_config(**config), ddp=ddp)
    load_hf(model, directory)
    return model


def router_of(model):
    return unwrap(model).decoder.layers[1].mlp.router


def test_the_bias_chooses_and_does_not_weigh(checkpoint):
    """The scores [T, E] come from the router's own logits. A token's experts have the best score + bias, and their
    weights come from the scores alone."""
    directory, _ = checkpoint
    model = loaded(directory, ddp=False)
    router, x = router_of(model), torch.randn(64, 1, 64)
    with torch.no_grad():
        weights, chosen = router(x)
        scores = router.gating(x)[:, 0].sigmoid()
    best = (scores + router.expert_bias).topk(2).indices
    assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, best, True))
    own = scores.gather(1, best)
    torch.testing.assert_close(weights.gather(1, best), own / own.sum(1, keepdim=True), rtol=1e-6, atol=0)
    changed = (chosen != torch.zeros_like(chosen).scatter(1, scores.topk(2).indices, True)).any(1)
    assert changed.float().mean() > 0.2  # otherwise the bias would decide nothing


def test_equal_biases_change_nothing_and_others_do(checkpoint):
    directory, hf = checkpoint
    model, batch = loaded(directory, ddp=False), sequences(7)
    expected = hf_logits(hf, batch)
    router_of(model).expert_bias.add_(0.5)
    torch.testing.assert_close(packed_logits(model, batch), expected, rtol=0, atol=1e-5)
    router_of(model).expert_bias.zero_()
    assert (packed_logits(model, batch) - expected).abs().max() > 1e-2


def test_training_leaves_the_bias_and_a_checkpoint_brings_it(checkpoint, tmp_path):
    directory, _ = checkpoint
    config = make_config(lr=3e-3, lr_decay_style="constant", weight_decay=0.0)
    model, batch = loaded(directory), sequences(5)
    parts = build_optimizer(model, config, total_steps=10)
    losses = [train_step(model, *parts, batch)[0] for _ in range(4)]
    assert losses[-1] < 0.9 * losses[0]
    original = load_file(directory / "model.safetensors")
    after = dict(export_hf(model))
    assert after.keys() == original.keys() and after[BIAS].abs().min() > 0
    same = [name for name, tensor in after.items() if torch.equal(tensor, original[name])]
    assert same == [BIAS]
    save_checkpoint(tmp_path / "saved", 4, model, *parts)
    again = loaded(directory)
    router_of(again).expert_bias.fill_(7.0)
    load_checkpoint(tmp_path / "saved", again, *build_optimizer(again, config, total_steps=10))
    assert all(torch.equal(tensor, after[name]) for name, tensor in export_hf(again))


def test_recomputation_changes_nothing(checkpoint):
    directory, _ = checkpoint
    batch, grads = sequences(2), []
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    for modules in (None, ["moe"], ["shared_experts"], "full"):
        selective = {"recompute_granularity": "selective", "recompute_modules": modules}
        overrides = full if modules == "full" else selective if modules else {}
        model = loaded(directory, overrides=overrides)
        sum_loss(packed_logits(model, batch), batch).backward()
        grads.append(model.buffers[0].grad_data.clone())
        assert router_of(model).weight.main_grad.abs().max() > 1e-5
    assert all(torch.equal(grads[0], other) for other in grads[1:])


def test_in_bfloat16_the_bias_keeps_its_bits(checkpoint, tmp_path):
    directory, _ = checkpoint
    model = loaded(directory, params_dtype="bfloat16")
    original = load_file(directory / "model.safetensors")
    packed_logits(model, sequences(1))
    save_checkpoint(tmp_path / "saved", 1, model)
    router_of(model).expert_bias.zero_()
    load_checkpoint(tmp_path / "saved", model)
    save_hf(model, directory, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == original.keys()
    for name, tensor in written.items():
        assert tensor.dtype == (torch.float32 if name == BIAS else torch.bfloat16), name
        assert torch.equal(tensor, original[name].to(tensor.dtype)), name
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert torch.equal(again.model.layers[1].mlp.gate.e_score_correction_bias, original[BIAS])


def test_half_of_a_head_is_rotated():
    """Dimensions k and k + R/2 of the first R turn by the angle `position * theta ** (-2 k / R)`, the others do not."""
    layout = packed_layout(token_slice([5]), "cpu")
    angles = torch.arange(5.0)[:, None, None] * torch.tensor([1.0, 0.1])
    layout.rotary = [RotaryAngles(angles.cos(), angles.sin())]
    x = torch.randn(5, 3, 8)
    pairs = torch.complex(x[..., 0:2], x[..., 2:4]) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(rotated(x, layout), torch.cat([pairs.real, pairs.imag, x[..., 4:]], -1))


def test_published_config_of_glm_is_understood(checkpoint):
    """zai-org's config.json has rotary settings at the top. If it lacks the half, the family's default is the half."""
    directory, _ = checkpoint
    written = read_hf_config(directory)
    top = {k: v for k, v in written.items() if k != "rope_parameters"} | {"rope_theta": 1e6}
    assert top["partial_rotary_factor"] == 0.5 and top["rope_theta"] == 1e6
    silent = {k: v for k, v in top.items() if k != "partial_rotary_factor"}
    assert [read_decoder(hf).ropes[0].size for hf in (written, top | {"rope_scaling": None}, silent)] == [
        16,
        16,
        16,
    ]
    with pytest.raises(
        ValueError, match="must leave an even part of a head to rotate, got 0.1 of head_dim 32"
    ):
        check_hf_config(top | {"partial_rotary_factor": 0.1})
    for hf in (written, top):
        core = transformer_config(hf, make_config())
        assert core.add_qkv_bias and not core.qk_layernorm and core.moe_layer_freq == [0, 1]
        assert (core.moe_router_score_function, core.moe_router_bias_update_rate) == ("sigmoid", 0.0)
        assert (core.moe_router_num_groups, core.moe_router_group_topk) == (None, None)
        assert (core.moe_shared_expert_intermediate_size, core.moe_router_topk_scaling_factor) == (48, 1.0)
    deep = {"num_hidden_layers": 5, "first_k_dense_replace": 3, "n_routed_experts": 6}
    assert sparse_layers(deep) == (False, False, False, True, True)


def with_prediction_layer(directory, number):
    """Adds a few tensors after the last layer, as in a published checkpoint."""
    file = directory / "model.safetensors"
    more = {
        f"model.layers.{number}.eh_proj.weight": torch.randn(64, 128),
        f"model.layers.{number}.shared_head.head.weight": torch.randn(99, 64),
        f"model.layers.{number}.mlp.gate.e_score_correction_bias": torch.randn(6),
    }
    save_file(load_file(file) | more, file, metadata={"format": "pt"})
    return more


@pytest.mark.parametrize("in_place", [False, True])
def test_prediction_layer_is_saved_and_not_published(checkpoint, tmp_path, in_place):
    directory, hf = checkpoint
    more = with_prediction_layer(directory, 2)
    assert family_for(read_hf_config(directory)).predicted(read_hf_config(directory)) == ("model.layers.2.",)
    check_checkpoint_shapes(directory, read_hf_config(directory))
    model = loaded(directory)
    published = dict(export_hf(model))
    assert not published.keys() & more.keys()
    out = directory if in_place else tmp_path / "out"
    save_hf(model, directory, out, max_shard_bytes=60_000)
    files = [load_file(file) for file in out.glob("*.safetensors")]
    written = {name: tensor for file in files for name, tensor in file.items()}
    assert len(files) > 1 and written.keys() == published.keys() | more.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in more.items())
    assert torch.equal(packed_logits(loaded(out), sequences(3)), packed_logits(model, sequences(3)))
    again = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(hf_logits(again, sequences(3)), hf_logits(hf, sequences(3)))


def test_other_layers_are_not_taken_for_it(checkpoint):
    directory, _ = checkpoint
    with_prediction_layer(directory, 3)
    with pytest.raises(ValueError, match=r"got 3 unexpected in .* model\.layers\.3\.eh_proj\.weight"):
        loaded(directory)
    with pytest.raises(ValueError, match="--hf-checkpoint must hold 2 layers, .* got 3"):
        check_checkpoint_shapes(directory, read_hf_config(directory))


@pytest.mark.parametrize(
    ("shape", "overrides", "message"),
    [
        ({"norm_topk_prob": False}, {}, "norm_topk_prob in config.json must be True with sigmoid scores"),
        (
            {"n_group": 2, "topk_group": 2},
            {},
            "num_experts_per_tok in config.json must be twice topk_group where n_group is above 1, got 2 and 2",
        ),
        ({"routed_scaling_factor": 0}, {}, "routed_scaling_factor in config.json must be above 0, got 0"),
        ({"n_group": None}, {}, "config.json must give n_group, got none"),
        (
            {},
            {"moe_router_bias_update_rate": 1e-3},
            "--moe-router-bias-update-rate must be left out, got 0.001",
        ),
        (
            {},
            {"moe_shared_expert_intermediate_size": 64},
            "--moe-shared-expert-intermediate-size must be 48, as the checkpoint has it, got 64",
        ),
        ({}, {"moe_router_score_function": "softmax"}, "--moe-router-score-function must be sigmoid"),
    ],
)
def test_what_would_be_another_model_is_refused(checkpoint, shape, overrides, message):
    changed = read_hf_config(checkpoint[0]) | shape
    hf_config = {key: value for key, value in changed.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        transformer_config(hf_config, make_config(overrides=overrides))


def test_flags_that_say_what_the_checkpoint_says_are_taken(checkpoint):
    said = {
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_shared_expert_intermediate_size": 48,
        "moe_router_topk_scaling_factor": 1.0,
    }
    core = transformer_config(read_hf_config(checkpoint[0]), make_config(overrides=said))
    assert {name: getattr(core, name) for name in said} == said
