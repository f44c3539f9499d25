"""The parts that only latent attention has: the softmax scale, the norm of latent vectors, heads over ranks, context
parallelism, memory and FLOPs of published shapes, and errors."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from family_cases import OLD, YARN
from megatron_cases import hf_logits, make_config, packed_logits, sequences, tiny_checkpoint
from published_sizes import DEEPSEEK
from rank_processes import on_ranks
from safetensors.torch import load_file, save_file

from slime.data.token_slice import token_slice
from slime.megatron_backend.checkpoint.weights import export_hf, load_hf
from slime.megatron_backend.model.attention import packed_layout
from slime.megatron_backend.model.gpt import build_model, stage_output, unwrap
from slime.megatron_backend.model.model_config import load_hf_config, transformer_config
from slime.megatron_backend.model.optimizer import finish_grads
from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.models import read_decoder
from slime.plan.flops import ForwardFlops
from slime.plan.model_shape import Shape

BATCH = sequences(3)


@pytest.fixture
def single_rank(tmp_path):
    init_parallel(0, 1, make_config(), init_method=f"file://{tmp_path}/store")
    yield
    destroy_parallel()


def loaded(directory, **config):
    model = build_model(load_hf_config(directory), make_config(**config))
    load_hf(model, directory)
    return model


def test_the_published_deepseek_is_read():
    decoder = read_decoder(DEEPSEEK)
    attention = decoder.layers[0].attention
    assert (attention.q_rank, attention.kv_rank, attention.plain, attention.turned, attention.value) == (
        *(1536, 512, 128, 64, 128),
    )
    assert attention.scale == pytest.approx((0.1 * math.log(40) + 1) ** 2 / math.sqrt(192))
    assert decoder.ropes[0].amplitude == 1 and decoder.ropes[0].interleaved
    assert decoder.experts.groups == (8, 4) and decoder.sparse == (False,) * 3 + (True,) * 58
    shape = Shape.of(DEEPSEEK)
    # The report has 671.0 B parameters, 37 B per token with the embedding (2412.19437, abstract).
    assert shape.params == pytest.approx(671.0e9, rel=1e-3)
    assert shape.active + 2 * shape.hidden * shape.vocab == pytest.approx(37.5e9, rel=0.01)
    assert shape.cache == 61 * 576
    pairs = 61 * 2 * 128 * (192 + 128)
    grown = ForwardFlops(DEEPSEEK)(2, 0) - 2 * ForwardFlops(DEEPSEEK)(1, 0)
    assert grown == pairs  # three pairs for two tokens, one pair for one token


def test_the_norm_of_latent_vectors_has_the_engines_eps(tmp_path, single_rank):
    """transformers takes 1e-6 for these norms whatever config.json has. vLLM and megatron-core take rms_norm_eps."""
    hf = tiny_checkpoint(tmp_path / "hf", "deepseek_v3", rms_norm_eps=1e-3)
    model = loaded(tmp_path / "hf")
    with torch.no_grad():
        assert (packed_logits(model, BATCH) - hf_logits(hf, BATCH)).abs().max() > 1e-4
        for layer in hf.model.layers:
            layer.self_attn.q_a_layernorm.variance_epsilon = 1e-3
            layer.self_attn.kv_a_layernorm.variance_epsilon = 1e-3
        torch.testing.assert_close(packed_logits(model, BATCH), hf_logits(hf, BATCH), rtol=0, atol=1e-5)


def test_full_recomputation_has_the_same_gradients(tmp_path, single_rank):
    tiny_checkpoint(tmp_path / "hf", "deepseek_v3")
    found = []
    full = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    for overrides in ({}, full):
        model = loaded(tmp_path / "hf", overrides=overrides)
        unwrap(model).train()
        packed_logits(model, BATCH).square().mean().backward()
        found.append([x.main_grad.clone() for x in unwrap(model).parameters()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def of_a_rank(rank, root):
    config = make_config(context_parallel_size=2, use_distributed_optimizer=False)
    info = init_parallel(rank, 2, config, init_method=f"file://{root}/store", local_rank=rank)
    model = build_model(load_hf_config(root / "hf"), config)
    load_hf(model, root / "hf")
    part = token_slice([len(x) for x in BATCH], rank=rank, size=2)
    row = torch.zeros(part.rows, dtype=torch.int64)
    row[: len(part.tokens)] = torch.cat(BATCH)[part.tokens]
    output = stage_output(model, row, packed_layout(part, "cpu", info.cp_group))[: len(part.tokens), 0]
    (output.square().sum() / 29).backward()
    finish_grads(model)
    for parameter in unwrap(model).parameters():
        parameter.data = parameter.main_grad
    torch.save((part.tokens, output.detach(), dict(export_hf(model))), root / f"rank{rank}.pt")
    destroy_parallel()


def test_context_parallelism_computes_the_same(tmp_path):
    """Two ranks that share every sequence have the hidden states and gradients of a single rank."""
    tiny_checkpoint(tmp_path / "hf", "deepseek_v3")
    on_ranks(of_a_rank, tmp_path, ranks=2)
    init_parallel(0, 1, make_config(), init_method=f"file://{tmp_path}/one")
    try:
        model = loaded(tmp_path / "hf")
        whole = token_slice([len(x) for x in BATCH])
        expected = stage_output(model, torch.cat(BATCH), packed_layout(whole, "cpu"))[:, 0]
        (expected.square().sum() / 29).backward()
        for parameter in unwrap(model).parameters():
            parameter.data = parameter.main_grad
        wanted = dict(export_hf(model))
    finally:
        destroy_parallel()
    for rank in (0, 1):
        tokens, output, gradients = torch.load(tmp_path / f"rank{rank}.pt")
        torch.testing.assert_close(output, expected.detach()[tokens], rtol=0, atol=1e-5)
        for name in wanted.keys() - {"lm_head.weight"}:
            torch.testing.assert_close(gradients[name], wanted[name], rtol=1e-4, atol=1e-5)


def test_heads_that_ranks_cannot_share():
    few = DEEPSEEK | {"num_attention_heads": 20, "num_key_value_heads": 20}
    with pytest.raises(ValueError, match=r"must divide the 20 num_attention_heads, got 8: 20 / 8 = 2.500"):
        transformer_config(few, make_config(tensor_model_parallel_size=8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lora_rank": None}, "must give kv_lora_rank"),
        ({"scoring_func": "softmax"}, "scoring_func in config.json must be sigmoid, got softmax"),
        ({"topk_method": "greedy"}, "topk_method in config.json must be noaux_tc, got greedy"),
        ({"rope_interleave": False}, "rope_interleave in config.json must be True, got False"),
        ({"num_key_value_heads": 64}, "num_key_value_heads in config.json must be 128, got 64"),
        ({"topk_group": 2}, "must be twice topk_group .* got 8 and 2"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type in config.json must be one of"),
    ],
)
def test_what_is_not_computed_is_an_error(change, message):
    with pytest.raises(ValueError, match=message):
        transformer_config(DEEPSEEK | change, make_config())


def test_mlp_layer_types_of_another_depth():
    flash = {**DEEPSEEK, "model_type": "glm4_moe_lite", "num_hidden_layers": 3}
    assert read_decoder(flash | {"mlp_layer_types": ["dense", "sparse", "sparse"]}).sparse == (
        False,
        True,
        True,
    )
    with pytest.raises(ValueError, match="mlp_layer_types .* for each of the 3 layers, got .'dense'.; the"):
        read_decoder(flash | {"mlp_layer_types": ["dense"]})


def test_a_missing_tensor_is_named(tmp_path, single_rank):
    tiny_checkpoint(tmp_path / "hf", "deepseek_v3")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"1 missing from .*: model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    ):
        loaded(tmp_path / "hf")


def test_yarn_without_a_factor_for_all_dimensions_leaves_the_scale():
    scaled = {"rope_parameters": YARN | OLD, "rope_scaling": None}
    layer = read_decoder(DEEPSEEK | scaled).layers[0]
    assert layer.attention.scale == pytest.approx(192**-0.5)
    assert replace(layer.attention, scale=0.0).key == 192
