"""Tests `linear_logp` at values where an exponential head could fail: sums that overflow, probabilities near 1 and 0,
and invalid targets and temperatures that no check has read."""

import math
from functools import partial

import pytest
import torch

from rl_kernel import linear_logp
from rl_kernel.ops.linear_logp.cases import (
    LinearCase,
    acceptance_violations,
    compute_truth,
    contract_violations,
    evaluate,
    plain,
    upstream,
)

pytest.importorskip("triton", reason="Triton is not installed")
from hardware_rounding import nearest  # noqa: F401

from rl_kernel.ops.linear_logp.exp_head import ExpHead

pytestmark = [
    # The test is about exponentials that overflow.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.usefixtures("nearest"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
fast = partial(linear_logp, impl="triton", return_entropy=True)


@pytest.fixture
def flags(monkeypatch):
    """Collects the overflow flags of the calls; the test reads them."""
    seen, centers = [], ExpHead._centers

    def spy(self):
        rows = centers(self)
        seen.append(rows["flag"])
        return rows

    monkeypatch.setattr(ExpHead, "_centers", spy)
    return seen


def one_hot(logits):
    """Returns a layer whose logits are exactly these [N, V]; bfloat16 must hold them."""
    tokens, _ = logits.shape
    width = -(-tokens // 8) * 8
    hidden = torch.eye(tokens, width, device=DEVICE, dtype=BF16)
    weight = torch.zeros(logits.shape[1], width, device=DEVICE, dtype=BF16)
    weight[:, :tokens] = logits.t().to(DEVICE)
    return {"hidden": hidden, "weight": weight}


def steep(gap, tokens=6, columns=300):
    """Returns logits whose target is `gap` below the largest; the first token's target is the largest."""
    logits = torch.randint(-8, 9, (tokens, columns), generator=torch.Generator().manual_seed(1)).float()
    targets = torch.arange(tokens) * 41 % columns
    peaks = (targets + 131) % columns
    rows = torch.arange(tokens)
    logits[rows, targets] = 0.0
    logits[rows, peaks] = float(gap)
    logits[0, targets[0]] = gap
    logits[0, peaks[0]] = 0.0
    return one_hot(logits), targets.to(DEVICE)


@pytest.mark.parametrize("uses", ["log_probs", "entropy", "both"])
@pytest.mark.parametrize("logits_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("gap", "repaired"), [(16, 0), (32, 0), (48, 1), (80, 1), (104, 1), (512, 1)])
def test_targets_far_below_the_largest_logit(flags, gap, repaired, logits_dtype, uses):
    """Sums exceed 1e17, then the range of float32: log-probs go down to -512, and other columns have probability 1."""
    layer, targets = steep(gap)
    actual = evaluate(fast, layer, targets, uses, logits_dtype=logits_dtype)
    assert [flag.item() for flag in flags[:1]] == [repaired]
    truth = compute_truth(layer, targets, uses)
    assert truth["log_probs"][1].item() == pytest.approx(-gap, abs=0.2)
    if uses == "entropy" and gap == 32:
        # Gradients of 1e-8 come from the difference of numbers that float32 holds to 2e-6.
        for name in ("d_hidden", "d_weight"):
            assert (actual.pop(name) - truth.pop(name)).abs().max() < 4e-6 * gap
    # The logits are whole numbers, so results are those of exact logits in every rounding.
    assert not contract_violations(actual, truth, BF16, FP32)


def test_logits_of_a_thousand(flags):
    """float32 can hold exp() of neither +1000 nor -1000."""
    logits = torch.tensor([[1000.0, -1000, 0, 992], [-1000, 1000, 1000, 0], [-1000, -1000, -1000, -1000]])
    layer, targets = one_hot(logits), torch.tensor([1, 1, 2], device=DEVICE)
    actual = evaluate(fast, layer, targets)
    assert flags[0].item() == 1
    assert actual["log_probs"].tolist() == pytest.approx([-2000.0, -math.log(2), -math.log(4)], abs=1e-3)
    want = [8 * math.exp(-8), math.log(2), math.log(4)]
    assert actual["entropy"].tolist() == pytest.approx(want, abs=1e-3)
    assert not contract_violations(actual, compute_truth(layer, targets), BF16, FP32)


@pytest.mark.parametrize("temperature", [0.02, 50.0])
def test_temperatures_that_stretch_the_logits(flags, temperature):
    case = LinearCase("stretched", 20, 24, 300, vocab_size=290)
    hidden, weight, targets = case.inputs(BF16, DEVICE)
    layer = {"hidden": hidden, "weight": weight}
    options = {"temperature": temperature, "vocab_size": 290}
    actual = evaluate(fast, layer, targets, logits_dtype="float32", **options)
    assert flags[0].item() == (temperature < 1)
    truth = compute_truth(layer, targets, **options)
    assert not contract_violations(actual, truth, BF16, FP32)


@pytest.mark.slow
def test_repairing_some_rows_changes_no_bit_of_the_others(flags):
    case = LinearCase("some", 140, 24, 200)
    hidden, weight, targets = case.inputs(BF16, DEVICE)
    calm = evaluate(fast, {"hidden": hidden, "weight": weight}, targets)
    wild = hidden.clone()
    wild[[3, 130]] *= 100.0
    actual = evaluate(fast, {"hidden": wild, "weight": weight}, targets)
    assert [flag.item() for flag in flags] == [0, 1]
    others = [row for row in range(140) if row not in (3, 130)]
    for name in ("log_probs", "entropy", "d_hidden"):
        assert torch.equal(actual[name][others], calm[name][others])
    truth = compute_truth({"hidden": wild, "weight": weight}, targets)
    assert truth["log_probs"][[3, 130]].max() < -39
    assert not contract_violations(
        evaluate(fast, {"hidden": wild, "weight": weight}, targets, logits_dtype="float32"), truth, BF16, FP32
    )


def test_repaired_tiles_are_computed_again_from_the_raised_center(flags):
    """The workspace is for 1,280 of 1,500 columns, and a second backward finds no kept tile."""
    layer, targets = steep(512, tokens=5, columns=1500)
    size = 5 * (64 + 13 * 2 * 4 + 1300 * 2) + 500
    leaves = {name: tensor.requires_grad_() for name, tensor in layer.items()}
    log_probs, entropy = fast(**leaves, targets=targets, workspace_bytes=size)
    g, h = upstream(5, DEVICE)
    truth = compute_truth(layer, targets)
    loss = (log_probs * g + entropy * h).sum()
    for _ in range(2):
        grads = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
        actual = {"log_probs": log_probs.detach(), "entropy": entropy.detach()}
        actual |= {"d_hidden": grads[0], "d_weight": grads[1]}
        assert not contract_violations(actual, truth, BF16, FP32)
    assert flags[0].item() == 1


@pytest.mark.parametrize("gap", [4, 8, 14, 24])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_gradients_of_nearly_certain_tokens(dtype, gap):
    """1 - p goes down to 1e-9, the sum of the other probabilities, which float32 holds to 2**-24."""
    logits = torch.zeros(3, 40)
    logits[:, 7] = gap
    layer = {name: x.to(dtype) for name, x in one_hot(logits).items()}
    targets = torch.tensor([7, 7, 7], device=DEVICE)
    actual, truth = evaluate(fast, layer, targets, "log_probs"), compute_truth(layer, targets, "log_probs")
    g, _ = upstream(3, DEVICE)
    rest = 39 * math.exp(-gap) / (1 + 39 * math.exp(-gap))
    assert truth["d_weight"][7, :3].tolist() == pytest.approx([rest * x for x in g.tolist()], rel=1e-6)
    for name in ("d_hidden", "d_weight"):
        torch.testing.assert_close(actual[name].double(), truth[name], rtol=0.02, atol=1e-6 * gap)


@pytest.mark.parametrize("gap", [8, 12, 16])
def test_entropy_gradient_of_a_nearly_certain_column_that_is_not_the_target(gap):
    """The gradient is p (log p + H) for p up to 0.99 and more. The logarithm of a bfloat16 exponential would be wrong
    by up to half its value, so likely columns take their logit from a dot product."""
    layer, targets = steep(gap)
    truth = compute_truth(layer, targets, "entropy")
    for logits_dtype in ("bfloat16", "float32"):
        actual = evaluate(fast, layer, targets, "entropy", logits_dtype=logits_dtype)
        for name in ("d_hidden", "d_weight"):
            error, size = (x.double().norm() for x in (actual[name] - truth[name], truth[name]))
            assert error < 2**-7 * size


@pytest.mark.parametrize(
    ("spread", "uses"),
    [
        (3, "log_probs"),
        (10, "entropy"),
        (10, "both"),
        pytest.param(10, "log_probs", marks=pytest.mark.slow),
        pytest.param(3, "entropy", marks=pytest.mark.slow),
        pytest.param(3, "both", marks=pytest.mark.slow),
    ],
)
def test_peaked_distributions_with_sampled_targets(spread, uses):
    """As in a rollout, the largest probabilities are 0.3 and 0.8 on average, and mostly belong to the target."""
    hidden, weight, _ = LinearCase("peaked", 100, 64, 400).inputs(BF16, DEVICE, seed=3)
    hidden *= spread
    p = (hidden.double() @ weight.double().t()).softmax(1)
    targets = torch.multinomial(p.cpu(), 1, generator=torch.Generator().manual_seed(0))[:, 0].to(DEVICE)
    layer = {"hidden": hidden, "weight": weight}
    results = [evaluate(op, layer, targets, uses) for op in (fast, plain)]
    assert not acceptance_violations([(*results, compute_truth(layer, targets, uses))], BF16)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_hidden_states_that_are_no_numbers_spoil_their_token_only(dtype, value):
    hidden, weight, targets = LinearCase("dirty", 9, 16, 60).inputs(dtype, DEVICE)
    clean = fast(hidden, weight, targets)
    hidden[4, 3] = value
    dirty = fast(hidden, weight, targets)
    others = [row for row in range(9) if row != 4]
    for got, want in zip(dirty, clean, strict=True):
        assert torch.equal(got[others], want[others])
    assert dirty[0][4].isnan() and dirty[1][4].isnan()


@pytest.fixture
def unread(monkeypatch):
    """Turns off all checks that read values, as on a device in auto mode."""
    for module in ("vocab", "kept"):
        monkeypatch.setattr(f"rl_kernel.{module}.reads_values", lambda tensor: False)


BAD_TARGETS = (-1, -100, 60, 50, 2**31 - 1, 2**31, 2**32 + 5, 2**40, -(2**40))
"""Targets below and above the vocabulary of 50, in the padding up to 60, and so far that they wrap around in
32 bits."""


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_unread_targets_that_are_no_tokens_give_nan_for_their_token(unread, dtype, impl):
    case = LinearCase("no_tokens", len(BAD_TARGETS) + 3, 16, 60, vocab_size=50)
    hidden, weight, targets = case.inputs(dtype, DEVICE)
    bad = targets.clone()
    bad[2:-1] = torch.tensor(BAD_TARGETS, device=DEVICE)
    good = [0, 1, len(bad) - 1]
    op = partial(linear_logp, impl=impl, vocab_size=50)
    clean = op(hidden, weight, targets)
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    log_probs, entropy = op(*leaves, bad, return_entropy=True)
    assert torch.equal(log_probs[good], clean[good])
    assert log_probs.isnan().nonzero()[:, 0].tolist() == list(range(2, len(bad) - 1))
    assert entropy.isfinite().all()
    # A loss that masks these tokens trains the other tokens as if they were alone.
    log_probs[good].sum().backward()
    only = [x.clone().requires_grad_() for x in (hidden[good], weight)]
    op(*only, targets[good]).sum().backward()
    assert not leaves[0].grad[2:-1].any()
    rtol = {BF16: 2**-7, FP32: 1e-5}[dtype]
    torch.testing.assert_close(leaves[0].grad[good], only[0].grad, rtol=rtol, atol=1e-6)
    torch.testing.assert_close(leaves[1].grad, only[1].grad, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_unread_temperatures_that_are_none_give_nan_for_their_token(unread, dtype, impl):
    hidden, weight, targets = LinearCase("cold", 8, 16, 60).inputs(dtype, DEVICE)
    temperature = torch.tensor([1.0, 0.0, 0.5, -1.0, math.nan, math.inf, -math.inf, 2.0], device=DEVICE)
    op = partial(linear_logp, impl=impl, return_entropy=True)
    results = op(hidden, weight, targets, temperature=temperature)
    clean = op(
        hidden,
        weight,
        targets,
        temperature=torch.tensor([1, 1, 0.5, 1, 1, 1, 1, 2], device=DEVICE),
    )
    for got, want in zip(results, clean, strict=True):
        assert got.isnan().tolist() == [False, True, False, True, True, True, True, False]
        assert torch.equal(got[[0, 2, 7]], want[[0, 2, 7]])


@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_values_of_host_tensors_are_always_read(mode):
    hidden, weight, targets = LinearCase("read", 3, 16, 60).inputs(BF16)
    with pytest.raises(ValueError, match=r"targets must lie in \[0, 60\), got values from .* to 60"):
        linear_logp(hidden, weight, torch.full((3,), 60), impl="reference")
    with pytest.raises(
        ValueError, match="temperature must be finite and be > 0 for every token, got 0.0 for"
    ):
        linear_logp(hidden, weight, targets, temperature=torch.tensor([1.0, 1, 0]), impl="reference")
