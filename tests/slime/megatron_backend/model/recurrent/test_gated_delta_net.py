"""Tests gated delta net layers: the delta rule by its definition, dtypes, kernels and errors."""

from __future__ import annotations

import pytest
import torch
from family_cases import CASES
from megatron_cases import (
    make_config,
    packed_logits,
    tiny_checkpoint,
)

from slime.data.token_slice import token_slice
from slime.megatron_backend.checkpoint.weights import export_hf, load_hf
from slime.megatron_backend.model.attention import packed_layout
from slime.megatron_backend.model.gpt import build_model, output_weight, unwrap
from slime.megatron_backend.model.model_config import load_hf_config, transformer_config
from slime.megatron_backend.model.recurrent.gated_delta_net import (
    CHUNK,
    PLAIN,
    gpu_functions,
    padded_delta_rule,
)
from slime.megatron_backend.model.recurrent.packed_rows import convolved
from slime.models import FAMILIES
from slime.system import delta_nets

pytestmark = pytest.mark.usefixtures("single_rank")

LENGTHS = [3, CHUNK + 9, 1, 2 * CHUNK, 20]
HEADS, VALUES, K, V = 2, 4, 8, 6


def columns(tokens: int) -> list[torch.Tensor]:
    """Returns q, k, v, the logarithm of the decay, and beta."""
    generator = torch.Generator().manual_seed(0)
    random = [
        torch.randn(tokens, *shape, generator=generator) for shape in ((HEADS, K), (HEADS, K), (VALUES, V))
    ]
    decay, beta = torch.rand(2, tokens, VALUES, generator=generator)
    return [x.requires_grad_() for x in (*random, -decay, beta)]


def by_definition(query, key, value, decay, beta) -> torch.Tensor:
    """Computes one token after the other, in float64."""
    query, key, value, decay, beta = (x.double() for x in (query, key, value, decay, beta))
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    query, key = (x.repeat_interleave(VALUES // HEADS, 1) for x in (query * K**-0.5, key))
    state, outputs = torch.zeros(VALUES, K, V, dtype=torch.float64), []
    for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
        state = state * g.exp()[:, None, None]
        held = torch.einsum("hk,hkv->hv", k, state)
        state = state + torch.einsum("hk,hv->hkv", k, b[:, None] * (v - held))
        outputs.append(torch.einsum("hk,hkv->hv", q, state))
    return torch.stack(outputs)


def test_delta_rule_is_its_definition():
    """The test compares values and gradients of a packed row, whose sequences have several chunks or a single token."""
    layout, inputs = packed_layout(token_slice(LENGTHS), "cpu"), columns(sum(LENGTHS))
    got = padded_delta_rule(*inputs, layout)
    wanted = torch.cat(
        [by_definition(*parts) for parts in zip(*(x.split(LENGTHS) for x in inputs), strict=True)]
    )
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-6)
    upstream = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad(got, inputs, upstream)
    theirs = torch.autograd.grad(wanted, inputs, upstream.double())
    for mine, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-4, atol=1e-5)


def test_convolution_begins_anew_with_each_sequence():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(sum(LENGTHS), 5, generator=generator), torch.randn(5, 1, 4, generator=generator)
    alone = [
        torch.nn.functional.conv1d(part.T[None], weight, padding=3, groups=5)[0, :, : len(part)].T
        for part in x.split(LENGTHS)
    ]
    got = convolved(x, weight, packed_layout(token_slice(LENGTHS), "cpu"))
    torch.testing.assert_close(got, torch.nn.functional.silu(torch.cat(alone)), rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    case, directory = CASES["qwen3-next"], tmp_path_factory.mktemp("hf")
    tiny_checkpoint(directory, case.kind, **case.shape)
    return directory


def model_of(directory, **settings):
    model = build_model(load_hf_config(directory), make_config(**settings))
    load_hf(model, directory)
    return model


def test_the_rate_of_decay_stays_in_float32(tiny):
    """The other parameters have the model's dtype. An optimizer step changes both kinds."""
    model = model_of(tiny, params_dtype="bfloat16")
    exported = dict(export_hf(model))
    assert {n for n, x in exported.items() if x.dtype == torch.float32} == {
        f"model.layers.{i}.linear_attn.A_log" for i in (0, 2)
    }
    packed_logits(model, [torch.arange(20)]).float().log_softmax(-1).mean().backward()
    assert output_weight(model).dtype == torch.bfloat16
    for name, parameter in unwrap(model).named_parameters():
        assert name.endswith("shared_experts.gate_weight") or parameter.main_grad.abs().max() > 0, name


def test_sizes_that_do_not_fit_are_named(tiny):
    hf = load_hf_config(tiny)
    read = FAMILIES["qwen3_next"].read
    with pytest.raises(ValueError, match=r"linear_num_key_heads .* got 3: 4 / 3 = 1.333"):
        read({**hf, "linear_num_key_heads": 3})
    with pytest.raises(ValueError, match="layer_types in config.json must give .* each of the 4 layers"):
        read({**hf, "layer_types": ["full_attention"] * 3})
    for layout, got in (
        ({"tensor_model_parallel_size": 4}, "2 num_key_value_heads .* got 4: 2 / 4 = 0.500"),
        (
            {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
            "2 linear_num_key_heads, got 2 x 2: 2 / 4 = 0.500",
        ),
    ):
        with pytest.raises(ValueError, match=got):
            transformer_config(hf, make_config(**layout))
    with pytest.raises(ValueError, match="linear_conv_kernel_dim in config.json must be at least 1, got 0"):
        read({**hf, "linear_conv_kernel_dim": 0})


def test_gpus_without_the_kernels_use_plain_pytorch(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """The kernels of fla-core are not installed here. The warning has the reason and the command that installs them."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    gpu_functions.cache_clear()
    assert gpu_functions() == PLAIN
    assert "fla-core is not installed" in caplog.text and "pip install fla-core" in caplog.text
    gpu_functions.cache_clear()
    monkeypatch.setattr(delta_nets, "local_obstacle", lambda *, hopper: None)
    with pytest.raises(
        ValueError, match="fla-core must be importable on GPUs, got No module named 'fla'; install"
    ):
        gpu_functions()
