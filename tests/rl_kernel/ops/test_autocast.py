"""An operator computes in the dtypes of its inputs, even inside a caller's autocast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import rl_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GENERATOR = torch.Generator().manual_seed(0)
HIDDEN, WEIGHT, BIAS, ROWS = (
    torch.randn(s, generator=GENERATOR).to(DEVICE) for s in ((9, 16), (40, 16), 40, 9)
)
TARGETS = torch.randint(40, (9,), generator=GENERATOR).to(DEVICE)


def linear_logp(impl: str) -> list[Tensor]:
    layer = [x.clone().requires_grad_() for x in (HIDDEN, WEIGHT, BIAS)]
    out = rl_kernel.linear_logp(*layer[:2], TARGETS, bias=layer[2], return_entropy=True, impl=impl)
    return [*out, *torch.autograd.grad(sum(out).sum(), layer)]


def linear_top(impl: str) -> list[Tensor]:
    log_probs, top = rl_kernel.linear_top(HIDDEN, WEIGHT, TARGETS, 3, impl=impl)
    return [log_probs, top.log_probs]


def linear_token_loss(impl: str) -> list[Tensor]:
    found = []
    for buffer in (None, torch.zeros_like(WEIGHT)):
        layer = [x.clone().requires_grad_() for x in (HIDDEN, WEIGHT)]
        result = rl_kernel.linear_token_loss(
            *layer, TARGETS, lambda x, _, rows: (x.square().sum(), {}), weight_grad=buffer, impl=impl
        )
        result.loss.backward()
        found += [result.loss, layer[0].grad, layer[1].grad if buffer is None else buffer]
    return found


def logp(impl: str) -> list[Tensor]:
    logits = HIDDEN.repeat(1, 3).requires_grad_()
    out = rl_kernel.logp(logits, TARGETS, return_entropy=True, impl=impl)
    return [*out, *torch.autograd.grad(sum(out).sum(), [logits])]


def ratio_kl(impl: str) -> list[Tensor]:
    new = ROWS.clone().requires_grad_()
    out = rl_kernel.ratio_kl(new, BIAS[:9], BIAS[9:18], None, "k3", unbiased=True, impl=impl)
    return [*out, *torch.autograd.grad(sum(out).sum(), [new])]


def grpo_loss(impl: str) -> list[Tensor]:
    new = ROWS.clone().requires_grad_()
    loss, _ = rl_kernel.grpo_loss(new, BIAS[:9], BIAS[9:18], torch.ones_like(ROWS), 3.0, impl=impl)
    return [loss, *torch.autograd.grad(loss, [new])]


def masked_whiten(impl: str) -> list[Tensor]:
    return [rl_kernel.masked_whiten(ROWS, torch.ones_like(ROWS), impl=impl)]


def group_advantage(impl: str) -> list[Tensor]:
    return [rl_kernel.group_advantage(ROWS, torch.arange(9, device=DEVICE) // 3, impl=impl)]


def swiglu(impl: str) -> list[Tensor]:
    x = HIDDEN.clone().requires_grad_()
    out = rl_kernel.swiglu(x, impl=impl)
    return [out, *torch.autograd.grad(out.sum(), [x])]


OPERATORS = (
    linear_logp,
    linear_top,
    linear_token_loss,
    logp,
    ratio_kl,
    grpo_loss,
    masked_whiten,
    group_advantage,
    swiglu,
)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda o: o.__name__)
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_autocast_changes_no_bit(impl: str, operator: Callable[[str], list[Tensor]]):
    if impl == "triton":
        pytest.importorskip("triton")
    want = operator(impl)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        found = operator(impl)
    assert [x.dtype for x in found] == [x.dtype for x in want]
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
