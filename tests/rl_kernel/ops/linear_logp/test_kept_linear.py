"""Tests `linear_logp` and `linear_token_loss` with a kept set: log-probs over the kept ids, entropy over all
columns."""

import math

import pytest
import torch

from rl_kernel import linear_logp, linear_token_loss
from rl_kernel.contract import CONTRACTS, Tolerance, max_error
from rl_kernel.kept import KeptTokens
from rl_kernel.ops.linear_logp.cases import LinearCase
from rl_kernel.ops.logp import cases as materialised

pytest.importorskip("triton", reason="Triton is not installed")
from hardware_rounding import nearest  # noqa: F401

from rl_kernel.ops.linear_logp.arguments import Task
from rl_kernel.ops.linear_logp.head import HeadProblem
from rl_kernel.ops.linear_logp.plain_head import PlainHead
from rl_kernel.ops.linear_logp.plan import Budget, plan
from rl_kernel.vocab import VocabShard

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.usefixtures("nearest"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLS = ["reference", "triton"]
CASES = (
    LinearCase("no_tokens", 0, 5, 16),
    LinearCase("one_token", 1, 5, 16),
    LinearCase("one_column", 4, 5, 1),
    LinearCase("tiny", 7, 5, 11),
    LinearCase("padded", 9, 8, 64, vocab_size=50),
)
TINY = CASES[3]


def inputs(case, dtype=torch.float32):
    """Returns hidden, weight, targets, kept set (a third of the tokens not truncated, ids twice), bias and
    temperature."""
    hidden, weight, targets = (x.to(DEVICE) for x in case.inputs(dtype))
    kept = materialised.LogpCase("", case.tokens, case.vocab, case.vocab_size).kept(targets)
    bias = torch.linspace(-1, 1, case.vocab).to(DEVICE, dtype)
    return hidden, weight, targets, kept, bias, torch.linspace(0.5, 1.5, case.tokens, device=DEVICE)


def upstream(tokens):
    return torch.randn(2, tokens, generator=torch.Generator().manual_seed(3)).to(DEVICE)


def formula(hidden, weight, bias, targets, temperature, case, kept, rounding=None):
    """Computes the definition in float64, with materialised logits."""
    logits = hidden.double() @ weight.double().t() + (0 if bias is None else bias.double())
    if rounding is not None:
        logits = logits + (logits.to(rounding).double() - logits).detach()
    return materialised.formula(logits, targets, temperature, case.vocab_size, kept)


def with_grads(op, *layer, weights=(1, 1)):
    """Returns outputs and gradients of `(g * log_probs + h * entropy).sum()`; a weight of None leaves that term out."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in layer]
    outputs = op(*leaves)
    terms = [
        w * (u * out).sum()
        for w, u, out in zip(weights, upstream(len(layer[0])), outputs, strict=True)
        if w is not None
    ]
    sum(terms).backward()
    return *(out.detach() for out in outputs), *(x.grad for x in leaves if x is not None)


def check(actual, truth, outputs, gradients):
    for got, want, bound in zip(actual, truth, [outputs] * 2 + [gradients] * 3, strict=False):
        assert got.shape == want.shape
        assert max_error(got, want) <= bound.bound(want)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_every_case_keeps_the_contract(impl, case, with_bias):
    hidden, weight, targets, kept, bias, temperature = inputs(case)
    layer = hidden, weight, bias if with_bias else None

    def op(hidden, weight, bias):
        return linear_logp(
            hidden,
            weight,
            targets,
            bias=bias,
            temperature=temperature,
            vocab_size=case.vocab_size,
            keep_mask=kept,
            return_entropy=True,
            impl=impl,
        )

    truth = with_grads(lambda *x: formula(*x, targets, temperature, case, kept), *layer)
    actual = with_grads(op, *layer)
    check(actual, truth, Tolerance(3e-6, 1e-6), Tolerance(1e-6, 2e-6))
    alone = linear_logp(
        *layer[:2],
        targets,
        bias=layer[2],
        temperature=temperature,
        vocab_size=case.vocab_size,
        keep_mask=kept,
        impl=impl,
    )
    torch.testing.assert_close(alone, actual[0])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("logits_dtype", [None, "float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_dtypes(impl, dtype, logits_dtype):
    """Rounded logits come from matrix products in another order, so some are rounded to the next number."""
    hidden, weight, targets, kept, _, temperature = inputs(TINY, dtype)
    options = {"keep_mask": kept, "return_entropy": True, "logits_dtype": logits_dtype, "impl": impl}
    actual = with_grads(
        lambda h, w: linear_logp(h, w, targets, temperature=temperature, **options), hidden, weight
    )
    rounding = dtype if logits_dtype is None else None
    truth = with_grads(
        lambda h, w: formula(h, w, None, targets, temperature, TINY, kept, rounding),
        hidden.double(),
        weight.double(),
    )
    assert [x.dtype for x in actual] == [torch.float32] * 2 + [dtype] * 2
    unit = torch.finfo(dtype).eps
    outputs = CONTRACTS["linear_logp"].outputs["float32"] if rounding is None else Tolerance(unit, 2 * unit)
    check(actual, truth, outputs, Tolerance(1e-7, 2 * unit))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("weights", [(1, 0), (0, 1), (1, None), (None, 1)], ids=str)
def test_each_gradient_alone(impl, weights):
    """With None, the loss does not use that output, so its gradient is None instead of zeros."""
    hidden, weight, targets, kept, _, temperature = inputs(TINY)
    options = {"temperature": temperature, "keep_mask": kept, "return_entropy": True, "impl": impl}
    actual = with_grads(lambda h, w: linear_logp(h, w, targets, **options), hidden, weight, weights=weights)
    truth = with_grads(
        lambda h, w: formula(h, w, None, targets, temperature, TINY, kept), hidden, weight, weights=weights
    )
    check(actual, truth, Tolerance(3e-6, 1e-6), Tolerance(1e-6, 2e-6))


def test_by_hand():
    # The rollout kept (3, 8) from p ~ (1, 3, 4, 8): the log-prob is over these two (sum 11), the entropy over all
    # four.
    weight = torch.tensor([[0.0], [math.log(3)], [math.log(4)], [math.log(8)]], device=DEVICE)
    kept = KeptTokens.from_lists([[3, 1, 3]], DEVICE)
    p = [1 / 16, 3 / 16, 4 / 16, 8 / 16]
    want = -sum(x * math.log(x) for x in p)
    for impl in IMPLS:
        leaf = weight.clone().requires_grad_()
        log_probs, entropy = linear_logp(
            torch.ones(1, 1, device=DEVICE),
            leaf,
            torch.tensor([1], device=DEVICE),
            keep_mask=kept,
            return_entropy=True,
            impl=impl,
        )
        assert log_probs.item() == pytest.approx(math.log(3 / 11), rel=1e-6)
        assert entropy.item() == pytest.approx(want, rel=1e-6)
        (2 * log_probs + 3 * entropy).sum().backward()
        slope = [-3 * x * (math.log(x) + want) for x in p]
        slope[1], slope[3] = slope[1] + 2 * 8 / 11, slope[3] - 2 * 8 / 11
        assert leaf.grad[:, 0].tolist() == pytest.approx(slope, rel=1e-5)


def test_gradcheck_of_kept_and_recomputed_tiles(monkeypatch):
    hidden, weight, targets, kept, *_ = inputs(TINY, torch.float64)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]

    def op(hidden, weight):
        return linear_logp(hidden, weight, targets, temperature=0.8, keep_mask=kept, return_entropy=True)

    assert torch.autograd.gradcheck(op, leaves)
    monkeypatch.setattr("rl_kernel.ops.linear_logp.reference.KEPT_ELEMENTS", 0)
    monkeypatch.setattr("rl_kernel.vocab.TILE_ELEMENTS", 22)
    monkeypatch.setattr("rl_kernel.vocab.TILE_MIN_ROWS", 1)
    assert torch.autograd.gradcheck(op, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiles_of_a_small_workspace(dtype):
    """Some columns are kept, and some are computed again in several tiles: bits may differ, results do not."""
    case = LinearCase("tiles", 6, 4, 7000, vocab_size=6990)
    hidden, weight, targets, kept, _, temperature = inputs(case, dtype)
    task = Task(targets, temperature, kept, VocabShard(0, 7000, 6990, None, 7000), None)
    problem = HeadProblem(hidden, weight, None, task)
    costs = PlainHead(problem).costs(True)
    workspace = case.tokens * (costs.row + 4200 * costs.element)
    budget = plan(case.tokens, case.vocab, costs, workspace)
    assert budget.kept > 0 and budget.kept + 2 * budget.tile < case.vocab
    assert plan(case.tokens, case.vocab, costs, 2 * workspace) == Budget(case.vocab, case.vocab)
    options = {"temperature": temperature, "vocab_size": case.vocab_size, "keep_mask": kept}
    options |= {"return_entropy": True, "logits_dtype": "float32", "impl": "triton"}
    truth = with_grads(
        lambda h, w: formula(h, w, None, targets, temperature, case, kept), hidden.double(), weight.double()
    )
    for size in (workspace, 2 * workspace):
        actual = with_grads(
            lambda h, w, size=size: linear_logp(h, w, targets, workspace_bytes=size, **options),
            hidden,
            weight,
        )
        check(actual, truth, Tolerance(3e-6, 1e-6), Tolerance(1e-6, 2 * torch.finfo(dtype).eps + 2e-6))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "workspace", [pytest.param(2**30, marks=pytest.mark.slow), 105_000], ids=["one block", "two blocks"]
)
def test_one_pass_loss(impl, workspace):
    case = LinearCase("one_pass", 150, 4, 60, vocab_size=55)
    hidden, weight, targets, kept, bias, temperature = inputs(case)
    g, h = upstream(case.tokens)
    seen = []

    def token_loss(log_probs, entropy, rows):
        seen.append(rows)
        return (g[rows] * log_probs + h[rows] * entropy).sum(), {}

    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    result = linear_token_loss(
        *leaves[:2],
        targets,
        token_loss,
        bias=leaves[2],
        temperature=temperature,
        vocab_size=case.vocab_size,
        keep_mask=kept,
        return_entropy=True,
        workspace_bytes=workspace,
        impl=impl,
    )
    result.loss.backward()
    truth = with_grads(
        lambda *x: formula(*x, targets, temperature, case, kept),
        *(x.double() for x in (hidden, weight, bias)),
    )
    actual = result.log_probs, result.entropy, *(x.grad for x in leaves)
    check(actual, truth, Tolerance(3e-6, 1e-6), Tolerance(1e-6, 5e-6))
    assert len(seen) == (2 if impl == "triton" and workspace < 2**30 else 1)


def test_same_bits_every_time():
    hidden, weight, targets, kept, _, temperature = inputs(TINY, torch.bfloat16)
    options = {"temperature": temperature, "keep_mask": kept, "return_entropy": True, "impl": "triton"}
    first, second = (
        with_grads(lambda h, w: linear_logp(h, w, targets, **options), hidden, weight) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
