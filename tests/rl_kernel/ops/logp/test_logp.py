"""Compares `logp` with hand-worked numbers, the float64 formula, numerical derivatives and `linear_logp`."""

import math

import pytest
import torch

from rl_kernel import linear_logp, logp
from rl_kernel.contract import CONTRACTS, max_error
from rl_kernel.kept import KeptTokens
from rl_kernel.ops.linear_logp.cases import CASES, LinearCase

CONTRACT = CONTRACTS["logp"]


def formula(logits, targets, temperature, vocab_size):
    log_p = torch.log_softmax(logits[:, :vocab_size].double() / temperature.double()[:, None], -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def test_by_hand():
    # p = (1/8, 3/8, 1/2)
    logits = torch.tensor([[0.0, math.log(3), math.log(4)]], requires_grad=True)
    log_probs, entropy = logp(logits, torch.tensor([2]), return_entropy=True)
    p = [1 / 8, 3 / 8, 1 / 2]
    want = -sum(x * math.log(x) for x in p)
    assert log_probs.item() == pytest.approx(math.log(0.5), rel=1e-6)
    assert entropy.item() == pytest.approx(want, rel=1e-6)
    (2 * log_probs + 3 * entropy).sum().backward()
    slope = [2 * ((i == 2) - x) - 3 * x * (math.log(x) + want) for i, x in enumerate(p)]
    assert logits.grad[0].tolist() == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_case_keeps_the_contract(case, dtype):
    hidden, weight, targets = case.inputs()
    logits = (hidden @ weight.t()).to(dtype).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    temperature = torch.linspace(0.5, 1.5, case.tokens)
    g, h = torch.randn(2, case.tokens, generator=torch.Generator().manual_seed(3))
    actual = logp(logits, targets, temperature=temperature, vocab_size=case.vocab_size, return_entropy=True)
    truth = formula(exact, targets, temperature, case.vocab_size)
    for log_probs, entropy in (actual, truth):
        (log_probs * g + entropy * h).sum().backward()
    name = str(dtype).removeprefix("torch.")
    for got, want in zip(actual, truth, strict=True):
        assert got.dtype == torch.float32
        assert max_error(got, want) <= CONTRACT.outputs[name].bound(want)
    assert logits.grad.dtype == dtype
    assert max_error(logits.grad, exact.grad) <= CONTRACT.gradients[name].bound(exact.grad)
    assert not logits.grad[:, case.vocab_size or case.vocab :].any()


@pytest.mark.parametrize("return_entropy", [False, True])
@pytest.mark.parametrize("vocab_size", [None, 4])
@pytest.mark.parametrize("keep_mask", [None, KeptTokens.from_lists([[0, 3], [], [2], [3, 1, 0], [], []])])
def test_gradcheck(return_entropy, vocab_size, keep_mask):
    logits = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 1, 2, 3, 3, 0])
    temperature = torch.linspace(0.6, 1.4, 6, dtype=torch.float64)

    def op(logits):
        return logp(
            logits,
            targets,
            temperature=temperature,
            vocab_size=vocab_size,
            keep_mask=keep_mask,
            return_entropy=return_entropy,
        )

    assert torch.autograd.gradcheck(op, [logits.requires_grad_()])


def test_agrees_with_linear_logp():
    hidden, weight, targets = LinearCase("equal", 50, 16, 40, vocab_size=37).inputs()
    kwargs = {"temperature": 0.7, "vocab_size": 37, "return_entropy": True}
    for a, b in zip(
        logp(hidden @ weight.t(), targets, **kwargs),
        linear_logp(hidden, weight, targets, **kwargs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


def test_logits_are_left_alone_and_strides_do_not_matter():
    logits = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    strided = logits[:, ::2].requires_grad_()
    dense = strided.detach().contiguous().requires_grad_()
    targets = torch.tensor([0, 5, 2, 1])
    outputs = [logp(x, targets, temperature=0.5, return_entropy=True) for x in (strided, dense)]
    for log_probs, entropy in outputs:
        (log_probs.sum() + entropy.sum()).backward()
    assert torch.equal(logits, before)
    assert torch.equal(outputs[0][0], outputs[1][0]) and torch.equal(strided.grad, dense.grad)


def test_columns_of_probability_zero_stay_out_of_the_entropy():
    logits = torch.tensor([[0.0, -math.inf, 0.0]], requires_grad=True)
    log_probs, entropy = logp(logits, torch.tensor([0]), return_entropy=True)
    assert log_probs.item() == pytest.approx(math.log(0.5), rel=1e-6)
    assert entropy.item() == pytest.approx(math.log(2), rel=1e-6)
    (log_probs + entropy).sum().backward()
    assert logits.grad[0].tolist() == pytest.approx([0.5, 0.0, -0.5], abs=1e-6)


def test_kept_tokens_by_hand():
    # The second token's rollout kept (3, 8) from p ~ (1, 3, 4, 8): p = 3/11.
    row = [0.0, math.log(3), math.log(4), math.log(8)]
    logits = torch.tensor([row, row], requires_grad=True)
    kept = KeptTokens.from_lists([[], [3, 1]])
    log_probs, entropy = logp(logits, torch.tensor([1, 1]), keep_mask=kept, return_entropy=True)
    assert log_probs.tolist() == pytest.approx([math.log(3 / 16), math.log(3 / 11)], rel=1e-6)
    # The entropy ignores the kept set.
    whole = [1 / 16, 3 / 16, 4 / 16, 8 / 16]
    want = -sum(p * math.log(p) for p in whole)
    assert entropy.tolist() == pytest.approx([want, want], rel=1e-6)
    log_probs.sum().backward(retain_graph=True)
    assert logits.grad[0].tolist() == pytest.approx([-1 / 16, 13 / 16, -4 / 16, -8 / 16], rel=1e-5)
    assert logits.grad[1].tolist() == pytest.approx([0.0, 8 / 11, 0.0, -8 / 11], rel=1e-5)
    logits.grad = None
    entropy.sum().backward(retain_graph=True)
    slope = [-p * (math.log(p) + want) for p in whole]
    assert logits.grad.tolist() == [pytest.approx(slope, rel=1e-5)] * 2
    logits.grad = None
    (2 * log_probs + 3 * entropy).sum().backward()
    both = [3 * s + 2 * g for s, g in zip(slope, (0.0, 8 / 11, 0.0, -8 / 11), strict=True)]
    assert logits.grad[1].tolist() == pytest.approx(both, rel=1e-5)


def test_no_tokens_and_one_token():
    empty = torch.zeros(0, 4, requires_grad=True)
    log_probs, entropy = logp(empty, torch.zeros(0, dtype=torch.int64), return_entropy=True)
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.shape == (0,) and empty.grad.shape == (0, 4)
    assert logp(torch.zeros(1, 4), torch.tensor([3])).item() == pytest.approx(-math.log(4), rel=1e-6)


@pytest.mark.parametrize(
    ("logits", "targets", "kwargs", "message"),
    [
        (torch.zeros(4), torch.zeros(4).long(), {}, r"logits must have shape \[N, V_local\], got \[4\]"),
        (torch.zeros(4, 0), torch.zeros(4).long(), {}, "logits must hold at least one vocabulary column"),
        (torch.zeros(4, 3), torch.zeros(3).long(), {}, r"targets must have shape \[4\], got \[3\]"),
        (torch.zeros(1, 3), torch.tensor([3]), {}, r"targets must lie in \[0, 3\), got values from 3 to 3"),
        (
            torch.zeros(1, 3),
            torch.tensor([0]),
            {"temperature": -1.0},
            "temperature must be finite and be > 0",
        ),
        (torch.zeros(1, 3), torch.tensor([0]), {"vocab_size": 9}, "vocab_size must be <= 3"),
        (torch.zeros(1, 3), torch.tensor([0]), {"vocab_start": 1}, "vocab_start must be >= 0, and 0 without"),
        (
            torch.zeros(1, 3).expand(2, 3),
            torch.tensor([0, 0]),
            {"inplace_backward": True},
            "logits must own each element with inplace_backward, got an expanded tensor; copy it",
        ),
        (
            torch.zeros(1, 3),
            torch.tensor([0]),
            {"keep_mask": KeptTokens.from_lists([[1, 2]])},
            "keep_mask.ids must hold each truncated token's target, got target 0 of token 0",
        ),
    ],
)
def test_bad_input_is_named(logits, targets, kwargs, message):
    with pytest.raises(ValueError, match=message):
        logp(logits, targets, **kwargs)
