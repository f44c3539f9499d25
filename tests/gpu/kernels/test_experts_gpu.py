"""Tests grouped products of experts on a GPU: accuracy, empty experts, Megatron's buffers, no synchronisation, and
the speed compared with one expert after the other, at the shape of Qwen3-30B-A3B."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rl_kernel import swiglu
from slime.megatron_backend.model.moe.grouped_product import GroupedProduct, expert_ends

pytestmark = pytest.mark.gpu

SHARES = {
    "uneven": [130, 1, 300, 81],
    "empty-experts": [0, 200, 0, 0, 57, 0],
    "no-rows": [0, 0, 0],
}
INPUTS, OUTPUTS = 256, 384


@pytest.fixture(params=SHARES)
def shares(request: pytest.FixtureRequest) -> list[int]:
    return SHARES[request.param]


def problem(shares: list[int], dtype: torch.dtype) -> tuple[Tensor, list[nn.Parameter], Tensor]:
    """Returns x [C, K], weights [N, K] with gradient buffers of ones as in Megatron, and the upstream gradient [C,
    N]."""
    torch.manual_seed(0)
    x = torch.randn(sum(shares), INPUTS, device="cuda").to(dtype).requires_grad_()
    weights = [nn.Parameter(torch.randn(OUTPUTS, INPUTS, device="cuda").to(dtype)) for _ in shares]
    for weight in weights:
        weight.main_grad, weight.grad_added_to_main_grad = torch.ones_like(weight, dtype=torch.float32), False
    return x, weights, torch.randn(sum(shares), OUTPUTS, device="cuda").to(dtype)


def one_by_one(shares: list[int], leaves: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """Returns y, d_x and each weight's gradient, for x and the weights in any dtype."""
    x, *weights = leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    y = torch.cat([linear(rows, w) for rows, w in zip(x.split(shares), weights, strict=True)])
    return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_less_accurate_than_one_expert_after_the_other(shares, dtype, where):
    """The products are compared with float64. `where` is the device on which the dispatcher left the shares."""
    x, weights, upstream = problem(shares, dtype)
    y = GroupedProduct.apply(x, expert_ends(torch.tensor(shares, device=where), x.device), *weights)
    y.backward(upstream)
    assert all(weight.grad_added_to_main_grad for weight in weights)
    ours = [y.detach(), x.grad, *(weight.main_grad - 1 for weight in weights)]
    plain = one_by_one(shares, [x, *weights], upstream)
    truth = one_by_one(shares, [leaf.double() for leaf in (x, *weights)], upstream.double())
    for got, theirs, wanted in zip(ours, plain, truth, strict=True):
        assert got.shape == wanted.shape
        if wanted.numel():
            error, usual = ((t.double() - wanted).abs().max().item() for t in (got, theirs))
            # In float32, the buffer of ones rounds the sums in it.
            assert error <= 1.1 * usual + (1e-5 if dtype == torch.float32 else 0.0)
    for share, weight in zip(shares, weights, strict=True):
        assert share or torch.equal(weight.main_grad, torch.ones_like(weight.main_grad))


def test_the_host_waits_for_nothing(shares):
    x, weights, upstream = problem(shares, torch.bfloat16)
    on_host, on_device = torch.tensor(shares), torch.tensor(shares, device="cuda")
    GroupedProduct.apply(x, expert_ends(on_host, x.device), *weights).backward(upstream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for counts in (on_host, on_device):
            GroupedProduct.apply(x, expert_ends(counts, x.device), *weights).backward(upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")


HIDDEN, WIDTH, EXPERTS, COPIES = 2048, 768, 128, 8192 * 8
"""The shape of Qwen3-30B-A3B, and 8,192 tokens that go to 8 experts each."""


class ExpertsLayer:
    """Weights of a layer's experts in bfloat16, their buffers, and the two ways to compute the layer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.fc1 = [self.weight(2 * WIDTH, HIDDEN) for _ in range(EXPERTS)]
        self.fc2 = [self.weight(HIDDEN, WIDTH) for _ in range(EXPERTS)]
        self.x = torch.randn(COPIES, HIDDEN, device="cuda", dtype=torch.bfloat16).requires_grad_()
        self.probs = torch.rand(COPIES, device="cuda").requires_grad_()
        self.upstream = torch.randn_like(self.x)
        self.shares = torch.bincount(torch.randint(0, EXPERTS, (COPIES,)), minlength=EXPERTS)

    @staticmethod
    def weight(outputs: int, inputs: int) -> nn.Parameter:
        made = nn.Parameter(torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) / inputs**0.5)
        made.main_grad = torch.zeros(outputs, inputs, device="cuda")
        made.grad_added_to_main_grad = False
        return made

    def grouped(self) -> Tensor:
        ends = expert_ends(self.shares, self.x.device)
        gate_and_up = GroupedProduct.apply(self.x, ends, *self.fc1)
        gated = (swiglu(gate_and_up) * self.probs[:, None]).to(self.x.dtype)
        return GroupedProduct.apply(gated, ends, *self.fc2)

    def sequential(self) -> Tensor:
        shares = self.shares.tolist()
        parts = zip(self.x.split(shares), self.probs.split(shares), self.fc1, self.fc2, strict=True)
        outputs = []
        for x, probs, fc1, fc2 in parts:
            gated = (swiglu(linear(x, fc1)) * probs[:, None]).to(x.dtype)
            outputs.append(linear(gated, fc2))
        return torch.cat(outputs)

    def step(self, forward: Callable[[], Tensor]) -> Tensor:
        """Runs forward, backward, and Megatron's hook for each gradient."""
        y = forward()
        y.backward(self.upstream)
        for weight in (*self.fc1, *self.fc2):
            if not weight.grad_added_to_main_grad:
                weight.main_grad.add_(weight.grad)
            weight.grad, weight.grad_added_to_main_grad = None, False
        return y.detach()

    def results(self, forward: Callable[[], Tensor]) -> list[Tensor]:
        """Returns y, the gradients of x and of the router's weights, and those of the first and last expert."""
        weights = [*self.fc1, *self.fc2]
        for weight in weights:
            weight.main_grad.zero_()
        self.x.grad = self.probs.grad = None
        y = self.step(forward)
        ends = [weights[i].main_grad.clone() for i in (0, EXPERTS - 1, EXPERTS, -1)]
        return [y, self.x.grad.clone(), self.probs.grad.clone(), *ends]

    def milliseconds(self, forward: Callable[[], Tensor]) -> float:
        times = []
        for _ in range(10):
            self.x.grad = self.probs.grad = None
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self.step(forward)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return median(times[3:])


def test_three_times_faster_than_one_expert_after_the_other():
    layer = ExpertsLayer()
    for ours, theirs in zip(layer.results(layer.grouped), layer.results(layer.sequential), strict=True):
        assert (ours - theirs).float().norm() <= 0.01 * theirs.float().norm()
    grouped, sequential = layer.milliseconds(layer.grouped), layer.milliseconds(layer.sequential)
    print(
        f"experts of a layer, forward and backward: grouped {grouped:.1f} ms, sequential {sequential:.1f} ms"
    )
    assert sequential >= 3 * grouped
