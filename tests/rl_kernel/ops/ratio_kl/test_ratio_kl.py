"""Compares `ratio_kl` with hand-worked numbers, the float64 formulas and numerical derivatives."""

import math

import pytest
import torch

from rl_kernel import ratio_kl
from rl_kernel.contract import CONTRACTS, max_error
from rl_kernel.ops.ratio_kl import KL_TYPES

CONTRACT = CONTRACTS["ratio_kl"]


def columns(tokens, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    base = -3 * torch.rand(tokens, generator=generator)
    shifts = torch.randn(3, tokens, generator=generator)
    return [(base + scale * shift).to(dtype) for scale, shift in zip((0, 0.3, 1), shifts, strict=True)]


def formula(log_probs, old, ref, kl_type, unbiased):
    """Computes the definition in float64."""
    log_probs, old, ref = log_probs.double(), old.double(), ref.double()
    ratio, lr = (log_probs - old).exp(), log_probs - ref
    kl = {"k1": lr, "k2": lr**2 / 2}.get(kl_type, (-lr).exp() - 1 + lr)
    kl = kl * ratio if unbiased else kl
    return ratio, kl.clamp(-10, 10) if kl_type == "low_var_kl" else kl


@pytest.mark.parametrize(
    ("kl_type", "unbiased", "want"),
    [
        # log-probs ln 1/2, old ln 1/4: ratio 2; reference ln 1/8: lr = ln 4.
        ("k1", False, math.log(4)),
        ("k2", False, math.log(4) ** 2 / 2),
        ("k3", False, 0.25 - 1 + math.log(4)),
        ("low_var_kl", False, 0.25 - 1 + math.log(4)),
        ("k1", True, 2 * math.log(4)),
        ("k3", True, 2 * (0.25 - 1 + math.log(4))),
    ],
)
def test_by_hand(kl_type, unbiased, want):
    new, old, ref = (torch.tensor([math.log(p)]) for p in (1 / 2, 1 / 4, 1 / 8))
    ratio, kl = ratio_kl(new, old, ref, None, kl_type, unbiased=unbiased)
    assert ratio.item() == pytest.approx(2.0, rel=1e-6)
    assert kl.item() == pytest.approx(want, rel=1e-6)


def test_low_var_kl_is_clamped_after_the_weight():
    # lr = -4: k3 = e^4 - 5 = 49.6 > 10; weighted by a ratio of 1/10 it is 4.96 and stays.
    new, ref = torch.tensor([-5.0, -5.0]), torch.tensor([-1.0, -1.0])
    old = torch.tensor([-5.0, -5.0 + math.log(10)])
    _, biased = ratio_kl(new, old, ref, None, "low_var_kl")
    _, unbiased = ratio_kl(new, old, ref, None, "low_var_kl", unbiased=True)
    assert biased.tolist() == [10.0, 10.0]
    assert unbiased.tolist() == pytest.approx([10.0, (math.e**4 - 5) / 10], rel=1e-5)


def test_without_reference_the_kl_is_zero():
    ratio, kl = ratio_kl(torch.tensor([0.0, -1.0]), torch.tensor([0.0, 0.0]))
    assert ratio.tolist() == pytest.approx([1.0, math.exp(-1)]) and kl.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kl_type", KL_TYPES)
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_contract(kl_type, unbiased, dtype):
    name = str(dtype).removeprefix("torch.")
    new, old, ref = columns(257, dtype)
    got_leaf, true_leaf = new.clone().requires_grad_(), new.double().requires_grad_()
    actual = ratio_kl(got_leaf, old, ref, None, kl_type, unbiased=unbiased)
    truth = formula(true_leaf, old, ref, kl_type, unbiased)
    for got, want in zip(actual, truth, strict=True):
        assert got.dtype == torch.float32
        assert max_error(got, want) <= CONTRACT.outputs[name].bound(want)
    for ratio, kl in (actual, truth):
        (ratio + 2 * kl).sum().backward()
    bound = CONTRACT.gradients[name].bound(true_leaf.grad)
    assert max_error(got_leaf.grad, true_leaf.grad) <= bound


@pytest.mark.parametrize("kl_type", KL_TYPES)
@pytest.mark.parametrize("unbiased", [False, True])
def test_gradcheck(kl_type, unbiased):
    new, old, ref = columns(9, torch.float64)
    mask = torch.arange(9) != 4

    def op(new):
        return ratio_kl(new, old, ref, mask, kl_type, unbiased=unbiased)

    assert torch.autograd.gradcheck(op, [new.requires_grad_()])


@pytest.mark.parametrize("kl_type", KL_TYPES)
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int32, torch.float32], ids=str)
def test_masked_entries_hold_one_and_zero_whatever_stands_there(kl_type, mask_dtype):
    new = torch.tensor([math.nan, -1.0, math.inf], requires_grad=True)
    old, ref = torch.tensor([0.0, -1.0, math.nan]), torch.tensor([-math.inf, -1.0, 0.0])
    mask = torch.tensor([0, 1, 0]).to(mask_dtype)
    ratio, kl = ratio_kl(new, old, ref, mask, kl_type, unbiased=True)
    assert ratio.tolist() == [1.0, 1.0, 1.0] and kl.tolist() == [0.0, 0.0, 0.0]
    (ratio + kl).sum().backward()
    assert new.grad[0].item() == 0.0 and new.grad[2].item() == 0.0 and new.grad[1].isfinite()


def test_extreme_log_ratios_stay_finite():
    new = torch.tensor([0.0, -500.0], requires_grad=True)
    ratio, kl = ratio_kl(new, torch.tensor([-500.0, 0.0]), torch.tensor([0.0, 0.0]), None, "low_var_kl")
    assert ratio[0].item() == pytest.approx(math.exp(80), rel=1e-5) and ratio[1].item() == 0.0
    assert kl.tolist() == [0.0, 10.0]
    (ratio + kl).sum().backward()
    assert new.grad.tolist() == [0.0, 0.0]


def test_no_tokens():
    ratio, kl = ratio_kl(*(torch.zeros(0) for _ in range(3)), torch.zeros(0, dtype=torch.bool))
    assert ratio.shape == kl.shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_probs": torch.zeros(2, 2)}, r"log_probs must have shape \[N\], got \[2, 2\]"),
        ({"old_log_probs": torch.zeros(3)}, r"old_log_probs must have shape \[2\], got \[3\]"),
        (
            {"old_log_probs": torch.zeros(2, requires_grad=True)},
            "old_log_probs must not require grad, .*detach",
        ),
        ({"ref_log_probs": torch.zeros(2).int()}, "ref_log_probs must be one of float32.* got int32"),
        ({"ref_log_probs": torch.zeros(2, device="meta")}, "ref_log_probs must be on cpu, got meta"),
        ({"mask": torch.zeros(1)}, r"mask must have shape \[2\], got \[1\]"),
        ({"kl_type": "k4"}, "kl_type must be one of k1, k2, k3, low_var_kl, got 'k4'"),
    ],
)
def test_bad_input_is_named(change, message):
    inputs = {"log_probs": torch.zeros(2), "old_log_probs": torch.zeros(2)} | change
    with pytest.raises(ValueError, match=message):
        ratio_kl(**inputs)
