"""Tests soft cap and scale of logits in `logp`, `linear_logp` and `linear_token_loss`, in the reference and the
kernels, compared with the float64 formula and with plain PyTorch."""

import pytest
import torch

from rl_kernel import linear_logp, linear_token_loss, logp
from rl_kernel.contract import CONTRACTS, max_error
from rl_kernel.ops.linear_logp import cases
from rl_kernel.ops.linear_logp.cases import LinearCase, compute_truth, contract_violations, evaluate
from rl_kernel.ops.logp import cases as logp_cases

pytest.importorskip("triton", reason="Triton is not installed")
from hardware_rounding import nearest  # noqa: F401

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.usefixtures("nearest"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLS = ["reference", "triton"]
CAP = {"logit_cap": 3.0, "logit_scale": 0.5}
"""A cap that changes every logit of the cases."""
SMALL = LinearCase("small", 9, 24, 37, vocab_size=33)
BF16, FP32 = torch.bfloat16, torch.float32


def layer_of(case, dtype, bias=False):
    hidden, weight, targets = case.inputs(dtype, DEVICE)
    layer = {"hidden": 3 * hidden, "weight": weight}
    if bias:
        layer["bias"] = torch.linspace(-1, 1, case.vocab, device=DEVICE).to(dtype)
    return layer, targets


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kept", [False, True], ids=["whole", "kept"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_linear_logp_is_the_formula(dtype, kept, impl):
    layer, targets = layer_of(SMALL, dtype, bias=True)
    options = {"temperature": torch.linspace(0.5, 1.5, 9, device=DEVICE), "vocab_size": 33, **CAP}
    if kept:
        options["keep_mask"] = SMALL.kept(targets)

    def op(**kwargs):
        return linear_logp(impl=impl, return_entropy=True, **kwargs)

    actual, truth = (
        f(layer, targets, **options) for f in (lambda *a, **k: evaluate(op, *a, **k), compute_truth)
    )
    # In bfloat16, a cap rounds three times more.
    assert contract_violations(actual, truth, dtype, dtype, allowance=1 if dtype == FP32 else 3) == []
    plain = evaluate(cases.formula, {n: x.double() for n, x in layer.items()}, targets, vocab_size=33)
    assert (plain["log_probs"] - truth["log_probs"]).abs().max() > 0.1  # the cap matters


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", logp_cases.CASES, ids=lambda case: case.name)
def test_logp_is_the_formula(case, impl):
    logits, targets = case.inputs(device=DEVICE)
    kept = case.kept(targets)
    results = []
    ours = {"impl": impl, "keep_mask": kept, "return_entropy": True}
    theirs = logits.double()
    for function, x, options in ((logp, logits, ours), (logp_cases.formula, theirs, {"kept": kept})):
        leaf = x.requires_grad_()
        out = function(leaf, targets, vocab_size=case.vocab_size, temperature=0.7, **CAP, **options)
        g, h = cases.upstream(case.tokens, DEVICE)
        (out[0] * g + out[1] * h).sum().backward()
        results.append((*out, leaf.grad))
    bounds = [CONTRACTS["logp"].outputs["float32"]] * 2 + [CONTRACTS["logp"].gradients["float32"]]
    for got, want, bound in zip(*results, bounds, strict=True):
        assert max_error(got.detach(), want.detach()) <= bound.bound(want.detach())


@pytest.mark.parametrize("impl", IMPLS)
def test_a_cap_is_computed_in_the_dtype_of_the_logits(impl):
    """vLLM divides, applies tanh and multiplies in bfloat16."""
    layer, targets = layer_of(SMALL, BF16)
    logits = layer["hidden"] @ layer["weight"].T
    capped = 3.0 * torch.tanh(logits / 3.0)
    want = (capped[:, :33].float() / 2).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    exact = (3.0 * torch.tanh(logits.float() / 3.0))[:, :33] / 2
    assert (exact.log_softmax(-1).gather(1, targets[:, None])[:, 0] - want).abs().max() > 1e-3
    for got in (
        logp(logits, targets, vocab_size=33, impl=impl, **CAP),
        linear_logp(**layer, targets=targets, vocab_size=33, impl=impl, **CAP),
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_token_loss_is_that_of_the_log_probs(impl):
    layer, targets = layer_of(SMALL, FP32)
    g, h = cases.upstream(9, DEVICE)
    options = {"targets": targets, "vocab_size": 33, "return_entropy": True, "impl": impl, **CAP}

    def loss(log_probs, entropy, rows):
        return (g[rows] * log_probs + h[rows] * entropy).sum(), {}

    got, want = ({n: x.clone().requires_grad_() for n, x in layer.items()} for _ in range(2))
    one_pass = linear_token_loss(**got, token_loss=loss, **options)
    one_pass.loss.backward()
    log_probs, entropy = linear_logp(**want, **options)
    loss(log_probs, entropy, slice(0, 9))[0].backward()
    torch.testing.assert_close(one_pass.log_probs, log_probs.detach(), rtol=0, atol=1e-6)
    for name in layer:
        torch.testing.assert_close(got[name].grad, want[name].grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_cap_far_above_the_logits_changes_nothing(impl):
    """Small arguments of tanh keep their digits."""
    logits, targets = logp_cases.LogpCase("wide", 7, 5000).inputs(device=DEVICE)
    got = logp(logits, targets, impl=impl, logit_cap=1e4)
    torch.testing.assert_close(got, logp(logits, targets, impl=impl), rtol=0, atol=1e-5)


@pytest.mark.parametrize("wrong", [{"logit_cap": 0.0}, {"logit_cap": float("inf")}, {"logit_scale": -1.0}])
def test_bad_values(wrong):
    layer, targets = layer_of(SMALL, FP32)
    name = next(iter(wrong))
    with pytest.raises(ValueError, match=f"{name} must be > 0 and finite"):
        linear_logp(**layer, targets=targets, **wrong)
    with pytest.raises(ValueError, match=f"{name} must be > 0 and finite"):
        logp(torch.zeros(9, 37, device=DEVICE), targets, **wrong)
