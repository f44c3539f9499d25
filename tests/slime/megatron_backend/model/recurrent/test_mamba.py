"""Tests Mamba-2 layers: the scan by its definition, dtypes, sizes and errors."""

from __future__ import annotations

import pytest
import torch
from family_cases import CASES
from megatron_cases import (
    VOCAB,
    make_config,
    tiny_checkpoint,
)

from slime.data.token_slice import token_slice
from slime.megatron_backend.checkpoint.weights import export_hf, load_hf
from slime.megatron_backend.model.attention import packed_layout
from slime.megatron_backend.model.gpt import build_model, unwrap
from slime.megatron_backend.model.model_config import load_hf_config, transformer_config
from slime.megatron_backend.model.recurrent.mamba import CHUNK, packed_scan
from slime.megatron_backend.model.recurrent.packed_rows import convolved
from slime.models import FAMILIES
from slime.models.decoder import Mamba
from slime.plan.model_shape import Shape

pytestmark = pytest.mark.usefixtures("single_rank")

LENGTHS = [3, CHUNK + 9, 1, 2 * CHUNK, 20]
GROUPS, SHARE, N, V = 2, 3, 8, 6


def columns(tokens: int) -> list[torch.Tensor]:
    """Returns C, B, values and the logarithm of the decay."""
    generator = torch.Generator().manual_seed(0)
    shapes = (GROUPS, N), (GROUPS, N), (GROUPS, SHARE, V)
    random = [torch.randn(tokens, *shape, generator=generator) for shape in shapes]
    return [x.requires_grad_() for x in (*random, -torch.rand(tokens, GROUPS, SHARE, 1, generator=generator))]


def scan_by_token(query, key, value, decay) -> torch.Tensor:
    """Computes one token after the other, in float64."""
    state, outputs = torch.zeros(GROUPS, SHARE, N, V, dtype=torch.float64), []
    for q, k, v, g in zip(*(x.double() for x in (query, key, value, decay)), strict=True):
        state = state * g[..., None].exp() + torch.einsum("gn,gsv->gsnv", k, v)
        outputs.append(torch.einsum("gn,gsnv->gsv", q, state))
    return torch.stack(outputs)


def test_the_scan_is_its_definition():
    """The test compares values and gradients of a packed row, whose sequences have several chunks or a single token."""
    layout, inputs = packed_layout(token_slice(LENGTHS), "cpu"), columns(sum(LENGTHS))
    got = packed_scan(*inputs, layout)
    parts = zip(*(x.split(LENGTHS) for x in inputs), strict=True)
    wanted = torch.cat([scan_by_token(*part) for part in parts])
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad(got, inputs, upstream)
    theirs = torch.autograd.grad(wanted, inputs, upstream.double())
    for mine, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-4, atol=1e-4)


def test_a_convolution_adds_its_bias():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(sum(LENGTHS), 5, generator=generator), torch.randn(5, 1, 4, generator=generator)
    bias = torch.randn(5, generator=generator)
    alone = [
        torch.nn.functional.conv1d(part.T[None], weight, bias, padding=3, groups=5)[0, :, : len(part)].T
        for part in x.split(LENGTHS)
    ]
    got = convolved(x, weight, packed_layout(token_slice(LENGTHS), "cpu"), bias)
    torch.testing.assert_close(got, torch.nn.functional.silu(torch.cat(alone)), rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    case, directory = CASES["nemotron-3"], tmp_path_factory.mktemp("hf")
    tiny_checkpoint(directory, case.kind, **case.shape)
    return directory


def model_of(directory, **settings):
    model = build_model(load_hf_config(directory), make_config(**settings))
    load_hf(model, directory)
    return model


def test_the_rate_of_decay_stays_in_float32(tiny):
    """The other parameters have the model's dtype."""
    exported = dict(export_hf(model_of(tiny, params_dtype="bfloat16")))
    assert {n for n, x in exported.items() if x.dtype == torch.float32} == {
        "backbone.layers.0.mixer.A_log",
        *(f"backbone.layers.{i}.mixer.gate.e_score_correction_bias" for i in (1, 3)),
    }


def test_a_plan_counts_the_parameters_of_each_layer(tiny):
    """The count has all matrices: the parameters with two dimensions."""
    hf = load_hf_config(tiny)
    shape, model = Shape.of(hf), model_of(tiny)
    matrices = [p.numel() for p in unwrap(model).parameters() if p.dim() == 2]
    padded = 2 * (unwrap(model).sizes.padded_vocab - VOCAB) * shape.hidden
    assert shape.params == sum(matrices) - padded
    mixer = Mamba(keys=2, heads=8, head_dim=24, state=16, taps=4)
    assert (shape.state, shape.newest) == (16 * 8 * 24, 3 * (8 * 24 + 2 * 2 * 16))
    assert mixer.attention(64).params == 64 * (2 * 192 + 64 + 8) + 192 * 64
    idle = 2 * 2 * 64 * 48 * (6 - 2)  # two layers whose experts have two matrices
    assert shape.active == shape.params - 2 * VOCAB * 64 - idle


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"n_groups": 3}, r"n_groups in config.json must divide the 8 mamba_num_heads, got 3: 8 / 3 = 2.667"),
        ({"conv_kernel": 0}, "conv_kernel in config.json must be at least 1, got 0"),
        ({"layers_block_type": ["conv"]}, r"layers_block_type in config.json must give .* got \['conv'\]"),
        ({"layers_block_type": None, "hybrid_override_pattern": "MX"}, r"got \['linear_attention', 'X'\]"),
        ({"moe_latent_size": 32}, "moe_latent_size in config.json must be 0, got 32; it is not supported"),
        ({"n_shared_experts": 2}, "n_shared_experts in config.json must be 1, got 2"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act in config.json must be relu2, got silu"),
        ({"time_step_limit": [0.0, 1.0]}, r"time_step_limit in config.json must be 0 to infinity, got \[0.0"),
        ({"n_routed_experts": 0}, "config.json must give num_experts for model_type nemotron_h, got none"),
    ],
)
def test_unsupported_settings_are_named(tiny, changed, message):
    with pytest.raises(ValueError, match=message):
        FAMILIES["nemotron_h"].read({**load_hf_config(tiny), **changed})


def test_a_pattern_of_letters_is_a_list_of_parts(tiny):
    hf = load_hf_config(tiny)
    read = FAMILIES["nemotron_h"].read
    assert read({**hf, "layers_block_type": None, "hybrid_override_pattern": "ME*E"}) == read(hf)


def test_ranks_must_divide_the_groups(tiny):
    layout = {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel": True}
    with pytest.raises(ValueError, match="2 n_groups of Mamba-2 layers, got 2 x 2: 2 / 4 = 0.500"):
        transformer_config(load_hf_config(tiny), make_config(**layout))
