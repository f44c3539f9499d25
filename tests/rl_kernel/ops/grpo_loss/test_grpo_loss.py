"""Compares `grpo_loss` with hand-worked numbers, the float64 formula and numerical derivatives."""

import math

import pytest
import torch

from rl_kernel import grpo_loss
from rl_kernel.contract import CONTRACTS, max_error
from rl_kernel.ops.ratio_kl import KL_TYPES

CONTRACT = CONTRACTS["grpo_loss"]
TERMS = {
    "plain": {},
    "clip_higher": {"eps_clip": 0.1, "eps_clip_high": 0.3},
    "dual_clip": {"eps_clip_c": 1.2},
    "kl": {"kl_coef": 0.1, "kl_type": "low_var_kl"},
    "unbiased_kl": {"kl_coef": 0.2, "kl_type": "k3", "unbiased_kl": True},
    "entropy": {"entropy_coef": 0.05},
}


def inputs(tokens, dtype=torch.float32):
    """Returns three samples of different lengths; their mask sums are the denominators."""
    generator = torch.Generator().manual_seed(1)
    new = -3 * torch.rand(tokens, generator=generator)
    noise = torch.randn(4, tokens, generator=generator)
    mask = torch.rand(tokens, generator=generator) < 0.8
    sample = torch.arange(tokens) * 3 // max(tokens, 1)
    sums = torch.zeros(3).index_add_(0, sample, mask.float()).clamp(min=1)
    columns = {
        "log_probs": new,
        "old_log_probs": new + 0.3 * noise[0],
        "advantages": noise[1],
        "ref_log_probs": new + noise[2],
        "entropy": noise[3].abs(),
        "tis_weights": (0.3 * noise[0]).exp().clamp(max=2),
    }
    columns = {name: value.to(dtype) for name, value in columns.items()}
    return columns | {"mask": mask, "denominators": sums[sample]}


def formula(
    c, *, eps_clip=0.2, eps_clip_high=None, eps_clip_c=None, kl_coef=0.0, entropy_coef=0.0, **kl_kwargs
):
    """Computes the published objective in float64, token by token."""
    high = eps_clip if eps_clip_high is None else eps_clip_high
    d = {name: value.double() for name, value in c.items()}
    ratio, advantages = (d["log_probs"] - d["old_log_probs"]).exp(), d["advantages"]
    pg = torch.maximum(-ratio * advantages, -ratio.clamp(1 - eps_clip, 1 + high) * advantages)
    if eps_clip_c is not None:
        pg = torch.where(advantages < 0, torch.minimum(pg, -eps_clip_c * advantages), pg)
    lr = d["log_probs"] - d["ref_log_probs"]
    kl = (-lr).exp() - 1 + lr
    if kl_kwargs.get("unbiased_kl"):
        kl = ratio * kl
    if kl_kwargs.get("kl_type") == "low_var_kl":
        kl = kl.clamp(-10, 10)
    per_token = pg * d["tis_weights"] + kl_coef * kl - entropy_coef * d["entropy"]
    return (per_token * d["mask"] / d["denominators"]).sum()


def test_clip_by_hand():
    # Ratios 2, 2, 1/2, 1/2 and advantages +1, -1, +1, -1 with bounds [0.8, 1.3]:
    # max(-2, -1.3) = -1.3 clipped; max(2, 1.3) = 2; max(-0.5, -0.8) = -0.5; max(0.5, 0.8) = 0.8 clipped.
    new = torch.tensor([math.log(2), math.log(2), -math.log(2), -math.log(2)], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss, metrics = grpo_loss(
        new, torch.zeros(4), advantages, torch.ones(4), 4.0, eps_clip=0.2, eps_clip_high=0.3
    )
    assert metrics["pg_loss"].tolist() == pytest.approx([-1.3, 2.0, -0.5, 0.8], rel=1e-6)
    assert metrics["pg_clipfrac"].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert metrics["ratio"].tolist() == pytest.approx([2.0, 2.0, 0.5, 0.5], rel=1e-6)
    assert metrics["ppo_kl"].tolist() == pytest.approx([-math.log(2)] * 2 + [math.log(2)] * 2, rel=1e-6)
    assert set(metrics) == {"pg_loss", "pg_clipfrac", "ppo_kl", "ratio"}
    assert loss.item() == pytest.approx(1.0 / 4, rel=1e-6)
    loss.backward()
    # Only unclipped tokens have a gradient: -ratio * A / 4.
    assert new.grad.tolist() == pytest.approx([0.0, 0.5, -0.125, 0.0], rel=1e-6)
    assert not any(value.requires_grad for value in metrics.values())


def test_dual_clip_by_hand():
    # Ratio 5, A = -1: max(5, 1.2) = 5, bounded by 3. The positive advantage is unchanged: -min(5, 1.2).
    new = torch.full((2,), math.log(5), requires_grad=True)
    advantages = torch.tensor([-1.0, 1.0])
    loss, metrics = grpo_loss(new, torch.zeros(2), advantages, torch.ones(2), 1.0, eps_clip_c=3.0)
    assert metrics["pg_loss"].tolist() == pytest.approx([3.0, -1.2], rel=1e-6)
    loss.backward()
    assert new.grad.tolist() == [0.0, 0.0]


def test_terms_mask_and_denominators_by_hand():
    # On policy: ratio 1. Token 0: -1 * 2 (TIS) + 0.1 * ln 4 (k1 against 1/4) - 0.01 * 3, over 2.
    # Token 1 is masked. Token 2: -(-3) * 1 + 0.1 * 0 - 0.01 * 5, over 4.
    new = torch.zeros(3, requires_grad=True)
    entropy = torch.tensor([3.0, math.nan, 5.0], requires_grad=True)
    loss, metrics = grpo_loss(
        new,
        torch.tensor([0.0, math.nan, 0.0]),
        torch.tensor([1.0, math.nan, -3.0]),
        torch.tensor([1, 0, 1]),
        torch.tensor([2, 2, 4]),
        tis_weights=torch.tensor([2.0, math.nan, 1.0]),
        ref_log_probs=torch.tensor([-math.log(4), math.nan, 0.0]),
        kl_coef=0.1,
        entropy=entropy,
        entropy_coef=0.01,
    )
    want = (-2 + 0.1 * math.log(4) - 0.03) / 2 + (3 - 0.05) / 4
    assert loss.item() == pytest.approx(want, rel=1e-6)
    assert metrics["pg_loss"].tolist() == [-2.0, 0.0, 3.0]
    assert metrics["kl_loss"].tolist() == pytest.approx([math.log(4), 0.0, 0.0], rel=1e-6)
    assert metrics["ratio"].tolist() == [1.0, 1.0, 1.0] and metrics["ppo_kl"].tolist() == [0.0, 0.0, 0.0]
    loss.backward()
    # d/d log_prob: (-A * tis + kl_coef) / denominator; d/d entropy: -entropy_coef / denominator.
    assert new.grad.tolist() == pytest.approx([(-2 + 0.1) / 2, 0.0, (3 + 0.1) / 4], rel=1e-6)
    assert entropy.grad.tolist() == pytest.approx([-0.005, 0.0, -0.0025], rel=1e-6)


def test_kl_and_entropy_without_coefficient_are_metrics_only():
    c = inputs(20)
    c["log_probs"].requires_grad_()
    c["entropy"].requires_grad_()
    loss, metrics = grpo_loss(**c, kl_type="k2")
    loss.backward()
    lr = (c["log_probs"] - c["ref_log_probs"]).detach()
    torch.testing.assert_close(metrics["kl_loss"], lr.square() / 2 * c["mask"])
    assert c["entropy"].grad is None
    bare = {name: value for name, value in c.items() if name not in ("ref_log_probs", "entropy")}
    bare["log_probs"] = c["log_probs"].detach().requires_grad_()
    other, _ = grpo_loss(**bare)
    other.backward()
    assert torch.equal(loss, other) and torch.equal(c["log_probs"].grad, bare["log_probs"].grad)


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
@pytest.mark.parametrize("tokens", [0, 1, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_contract(terms, tokens, dtype):
    name = str(dtype).removeprefix("torch.")
    c = inputs(tokens, dtype)
    exact = {key: value.double() if value.is_floating_point() else value for key, value in c.items()}
    terms = {"kl_type": "k3", **terms}
    for columns in (c, exact):
        columns["log_probs"].requires_grad_()
        columns["entropy"].requires_grad_()
    loss, _ = grpo_loss(**c, **terms)
    want = formula(exact, **terms)
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert max_error(loss, want) <= CONTRACT.outputs[name].bound(want)
    loss.backward()
    want.backward()
    for key in ("log_probs", "entropy") if "entropy_coef" in terms else ("log_probs",):
        truth = exact[key].grad
        assert max_error(c[key].grad, truth) <= CONTRACT.gradients[name].bound(truth)


@pytest.mark.parametrize("kl_type", KL_TYPES)
def test_gradcheck(kl_type):
    c = inputs(12, torch.float64)
    leaves = [c.pop("log_probs").requires_grad_(), c.pop("entropy").requires_grad_()]

    def op(log_probs, entropy):
        terms = {"eps_clip_c": 1.1, "kl_coef": 0.3, "entropy_coef": 0.2, "unbiased_kl": True}
        return grpo_loss(log_probs, entropy=entropy, kl_type=kl_type, **terms, **c)[0]

    assert torch.autograd.gradcheck(op, leaves)


def test_nothing_counted_has_zero_loss_and_gradient():
    new = torch.zeros(3, requires_grad=True)
    loss, _ = grpo_loss(new, torch.zeros(3), torch.ones(3), torch.zeros(3), 1.0)
    loss.backward()
    assert loss.item() == 0.0 and new.grad.tolist() == [0.0, 0.0, 0.0]


def test_huge_ratio_of_a_clipped_token_has_a_zero_gradient():
    new = torch.tensor([0.0], requires_grad=True)
    loss, _ = grpo_loss(new, torch.tensor([-200.0]), torch.ones(1), torch.ones(1), 1.0)
    loss.backward()
    assert loss.item() == pytest.approx(-1.2) and new.grad.item() == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_probs": torch.zeros(1, 2)}, r"log_probs must have shape \[N\], got \[1, 2\]"),
        ({"advantages": torch.zeros(3)}, r"advantages must have shape \[2\], got \[3\]"),
        ({"advantages": torch.zeros(2, requires_grad=True)}, "advantages must not require grad"),
        ({"mask": torch.zeros(2, requires_grad=True)}, "mask must not require grad"),
        ({"mask": None}, "mask must be a tensor, got NoneType"),
        ({"denominators": 0.0}, "denominators must be finite and be > 0, got 0.0"),
        (
            {"denominators": torch.tensor([1, 0])},
            "denominators must be > 0 for every token, got 0 for token 1",
        ),
        ({"denominators": torch.ones(1)}, r"denominators must have shape \[2\], got \[1\]"),
        ({"tis_weights": torch.ones(2, device="meta")}, "tis_weights must be on cpu, got meta"),
        ({"eps_clip": -0.1}, "eps_clip must be finite and be >= 0, got -0.1"),
        ({"eps_clip_high": math.inf}, "eps_clip_high must be finite and be >= 0, got inf"),
        ({"eps_clip_c": 1.0}, "eps_clip_c must be finite and be > 1, got 1.0"),
        ({"kl_coef": 0.1}, "kl_coef must be 0 without ref_log_probs, got 0.1; pass ref_log_probs"),
        ({"kl_coef": math.nan}, "kl_coef must be finite, got nan"),
        ({"kl_type": "kl"}, "kl_type must be one of k1"),
        ({"entropy_coef": 0.1}, "entropy_coef must be 0 without entropy, got 0.1; pass entropy"),
    ],
)
def test_bad_input_is_named(change, message):
    names = ("log_probs", "old_log_probs", "advantages")
    columns = dict.fromkeys(names, torch.zeros(2)) | {"mask": torch.ones(2), "denominators": 1.0} | change
    with pytest.raises(ValueError, match=message):
        grpo_loss(**columns)
