"""Compares the operators of rl_kernel.invariant on a host with float64, alone and among other rows, and their
gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import rl_kernel.invariant as invariant
from rl_kernel.invariant import exact, layers, selfcheck

ROWS, WIDTH, OUTPUTS, SIZE = 41, 72, 51, 16


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("ours", "low", "high", "error"),
    [
        (exact.exp, -690.0, 690.0, lambda found, true: ((found - true) / true).abs()),
        (exact.log, 1e-3, 1e6, lambda found, true: (found - true).abs()),
        (lambda x: exact.cos_and_sin(x)[0], -1e5, 1e5, lambda found, true: (found - true).abs()),
        (lambda x: exact.cos_and_sin(x)[1], -1e5, 1e5, lambda found, true: (found - true).abs()),
    ],
    ids=["exp", "log", "cos", "sin"],
)
def test_functions_are_right_in_float64(ours, low, high, error, request):
    x = torch.empty(20_000, dtype=torch.float64).uniform_(low, high)
    true = getattr(torch, request.node.callspec.id)(x)
    assert error(ours(x), true).max() < 5e-15


def test_functions_at_their_ends():
    assert exact.exp(torch.tensor([-math.inf, -1e4, 0.0], dtype=torch.float64)).tolist() == [0.0, 0.0, 1.0]
    assert exact.exp(torch.tensor([math.nan], dtype=torch.float64)).isnan().all()
    assert exact.log(torch.tensor([1.0], dtype=torch.float64)).item() == 0.0
    assert exact.log(torch.tensor([0.0, math.nan], dtype=torch.float64)).isnan().all()


def operators() -> dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]]:
    """Returns name -> (ours, plain PyTorch, inputs); the first input has rows."""
    weight, bias, gain = torch.randn(OUTPUTS, WIDTH), torch.randn(OUTPUTS), torch.randn(WIDTH)
    rows = torch.randn(ROWS, WIDTH) * torch.randn(ROWS, 1).exp()
    return {
        "linear": (invariant.linear, functional.linear, (rows, weight, bias)),
        "rms_norm": (
            lambda x, w: invariant.rms_norm(x, w, 1e-6),
            lambda x, w: functional.rms_norm(x, (WIDTH,), w, 1e-6),
            (rows, gain),
        ),
        "swiglu": (
            invariant.swiglu,
            lambda x: functional.silu(x[:, : WIDTH // 2]) * x[:, WIDTH // 2 :],
            (rows,),
        ),
        "log_softmax": (invariant.log_softmax, lambda x: x.log_softmax(-1), (rows * 5,)),
    }


@pytest.mark.parametrize("name", ["linear", "rms_norm", "swiglu", "log_softmax"])
def test_a_row_alone_has_the_bits_of_the_row_among_others(name, threads):
    ours, plain, (x, *others) = operators()[name]
    together = ours(x, *others)
    assert torch.equal(together, torch.cat([ours(x[i : i + 1], *others) for i in range(ROWS)]))
    order = torch.randperm(ROWS)
    assert torch.equal(together[order], ours(x[order], *others))
    true = plain(x.double(), *(other.double() for other in others))
    assert (together - true).abs().max() <= 2e-7 * true.abs().max()


@pytest.mark.parametrize("name", ["linear", "rms_norm", "swiglu"])
def test_gradients_are_those_of_the_plain_operator(name):
    ours, plain, inputs = operators()[name]
    gradients = []
    for operator in (ours, plain):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = operator(*leaves)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)


def test_a_frozen_weight_gets_no_gradient():
    x, weight = torch.randn(3, WIDTH, requires_grad=True), torch.randn(OUTPUTS, WIDTH)
    invariant.linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, -1))


@pytest.mark.parametrize("length", [1, 7, 40])
def test_a_query_has_the_same_bits_with_any_padding(length, threads):
    """The queries are a whole padded prompt, and one query over its own keys as in an engine's decode."""
    query, keys = torch.randn(2, 4, 40, SIZE), torch.randn(2, 2, 2, 40, SIZE)
    place = torch.arange(40)
    seen = (place[:, None] >= place).expand(2, 1, 40, 40)
    whole = invariant.attention(query, keys[0], keys[1], seen, 0.25)
    i = length - 1
    padded = torch.cat((keys[:, :1, :, :length], torch.full((2, 1, 2, 5, SIZE), 1e30)), 3)
    mask = (torch.arange(length + 5) < length).view(1, 1, 1, -1)
    alone = invariant.attention(query[:1, :, i : i + 1], padded[0], padded[1], mask, 0.25)
    assert torch.equal(whole[:1, :, i : i + 1], alone)
    true = functional.scaled_dot_product_attention(
        query.double(), *keys.double(), is_causal=True, scale=0.25, enable_gqa=True
    )
    assert (whole - true).abs().max() < 3e-7


def test_attention_by_pieces_has_the_bits_of_attention_at_once(monkeypatch):
    query, key, value = torch.randn(2, 4, 40, SIZE), torch.randn(2, 2, 40, SIZE), torch.randn(2, 2, 40, SIZE)
    seen = (torch.arange(40)[:, None] >= torch.arange(40)).expand(2, 1, 40, 40)
    whole = invariant.attention(query, key, value, seen, 0.25)
    monkeypatch.setattr("rl_kernel.invariant.causal._SCORES", 1000)
    assert torch.equal(whole, invariant.attention(query, key, value, seen, 0.25))


def test_a_query_without_keys_gives_zeros_and_finite_gradients():
    query, key = (
        torch.randn(1, 2, 3, SIZE, requires_grad=True),
        torch.randn(1, 2, 4, SIZE, requires_grad=True),
    )
    seen = torch.tensor([[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]]).bool()[None, None]
    out = invariant.attention(query, key, key, seen, 0.25)
    assert not out[:, :, 1].any() and out[:, :, 0].any()
    out[:, :, ::2].sum().backward()
    assert query.grad.isfinite().all() and key.grad.isfinite().all() and not query.grad[:, :, 1].any()


def test_columns_without_probability_change_no_bit():
    logits = torch.randn(5, 100)
    wide = torch.cat((torch.full((5, 9), -math.inf), logits, torch.full((5, 3), -math.inf)), 1)
    assert torch.equal(invariant.log_softmax(wide)[:, 9:-3], invariant.log_softmax(logits))
    assert (invariant.log_softmax(wide)[:, :9] == -math.inf).all()


def test_what_is_not_finite_stays_visible():
    x, weight = torch.randn(3, WIDTH), torch.randn(4, WIDTH)
    x[1, 5] = math.inf
    out = invariant.linear(x, weight)
    assert out[1].isnan().all() and out[::2].isfinite().all()
    assert invariant.rms_norm(x, torch.ones(WIDTH), 1e-6)[1].isnan().any()


def test_sums_that_might_be_rounded_are_errors():
    with pytest.raises(ValueError, match=f"products of one sum must be at most {2**16}, got {2**16 + 1}"):
        exact.product(torch.ones(1, 2**16 + 1), torch.ones(1, 2**16 + 1))
    with pytest.raises(ValueError, match=f"terms must be at most {2**18}, got {2**18 + 1}"):
        exact.sum_fractions(torch.ones(1, 2**18 + 1, dtype=torch.float64))


def test_the_operators_keep_their_promise_here():
    assert invariant.broken("cpu", torch.float32) == []


def test_an_operator_that_looks_at_other_rows_is_named(monkeypatch):
    monkeypatch.setattr(layers, "swiglu", lambda x: x - x.mean())
    monkeypatch.setattr(layers, "linear", lambda x, w: functional.linear(x, w) * len(x))
    assert invariant.broken("cpu", torch.float32) == ["linear", "swiglu"]


@pytest.mark.parametrize(
    ("machine", "shared", "reason"),
    [
        (None, 227, None),
        (None, 163, "a program has 163 KiB of the GPU's shared memory and the kernels need 227"),
        ("the GPU has compute capability 7.5 and the kernels need 8.0", 227, "compute capability 7.5"),
    ],
    ids=["H100", "A100", "T4"],
)
def test_a_card_without_the_kernels_is_refused(monkeypatch, machine, shared, reason):
    pytest.importorskip("triton")
    there = SimpleNamespace(shared_memory_per_block_optin=shared * 1024)
    monkeypatch.setattr(selfcheck, "machine_refusal", lambda device_type: machine)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: there)
    found = invariant.refusal("cuda")
    assert found is None if reason is None else reason in found
    assert invariant.refusal("cpu") is None
