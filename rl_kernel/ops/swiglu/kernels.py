"""`swiglu` in Triton: forward and backward kernels, in which each program computes a block of columns of a row. With a
factor for each row, a backward program computes a whole row, because the factor's gradient is a sum over the row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 4


@triton.jit(do_not_specialize=["W"])
def forward_kernel(X, W, OUT, x_stride, F, BLOCK: tl.constexpr):
    """Computes silu(gate) * up * factor of a block. x_stride: elements from one row of X to the next. W: None, or a
    factor for each row."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < F
    gate = tl.load(X + row * x_stride + lane, inside, other=0.0).to(tl.float32)
    up = tl.load(X + row * x_stride + F + lane, inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    if W is not None:
        out *= tl.load(W + row).to(tl.float32)
    tl.store(OUT + row * F + lane, out.to(OUT.dtype.element_ty), inside)


@triton.jit
def backward_kernel(X, D_OUT, D_X, x_stride, d_stride, F, BLOCK: tl.constexpr):
    """Computes d_x of a block: d_up = d * silu(gate), d_gate = d * up * (s + gate * s * (1 - s)), s =
    sigmoid(gate)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < F
    gate = tl.load(X + row * x_stride + lane, inside, other=0.0).to(tl.float32)
    up = tl.load(X + row * x_stride + F + lane, inside, other=0.0).to(tl.float32)
    d = tl.load(D_OUT + row * d_stride + lane, inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    kind = D_X.dtype.element_ty
    tl.store(D_X + row * 2 * F + lane, (d * up * s * (1.0 + gate * (1.0 - s))).to(kind), inside)
    tl.store(D_X + row * 2 * F + F + lane, (d * gate * s).to(kind), inside)


@triton.jit(do_not_specialize=["W", "D_W"])
def weighted_backward_kernel(X, W, D_OUT, D_X, D_W, x_stride, d_stride, F, BLOCK: tl.constexpr):
    """Computes d_x and d_factor of a row: the formulas of `backward_kernel` with d * factor, and sum(d * silu(gate) *
    up)."""
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(W + row).to(tl.float32)
    kind = D_X.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, F, BLOCK):
        lane = start + tl.arange(0, BLOCK)
        inside = lane < F
        gate = tl.load(X + row * x_stride + lane, inside, other=0.0).to(tl.float32)
        up = tl.load(X + row * x_stride + F + lane, inside, other=0.0).to(tl.float32)
        d = tl.load(D_OUT + row * d_stride + lane, inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(gate)
        total += tl.where(inside, d * gate * s * up, 0.0)
        d *= factor
        tl.store(D_X + row * 2 * F + lane, (d * up * s * (1.0 + gate * (1.0 - s))).to(kind), inside)
        tl.store(D_X + row * 2 * F + F + lane, (d * gate * s).to(kind), inside)
    tl.store(D_W + row, tl.sum(total, 0).to(D_W.dtype.element_ty))


def forward(x: Tensor, factors: Tensor | None = None) -> Tensor:
    """Computes x [N, 2 F], factors [N] -> [N, F], contiguous."""
    x = _rows(x)
    factors = None if factors is None else factors.contiguous()
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, width)
    if out.numel():
        with torch.cuda.device_of(x):
            forward_kernel[(rows, triton.cdiv(width, BLOCK))](
                x, factors, out, x.stride(0), width, BLOCK=BLOCK, num_warps=WARPS
            )
    return out


def backward(x: Tensor, upstream: Tensor) -> Tensor:
    """Returns the gradient [N, 2 F] from the output's gradient [N, F]."""
    x, upstream = _rows(x), _rows(upstream)
    rows, width = upstream.shape
    grad = x.new_empty(rows, 2 * width)
    if grad.numel():
        with torch.cuda.device_of(x):
            backward_kernel[(rows, triton.cdiv(width, BLOCK))](
                x, upstream, grad, x.stride(0), upstream.stride(0), width, BLOCK=BLOCK, num_warps=WARPS
            )
    return grad


def weighted_backward(x: Tensor, factors: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients [N, 2 F] and [N] from the output's gradient [N, F]."""
    x, upstream, factors = _rows(x), _rows(upstream), factors.contiguous()
    rows, width = upstream.shape
    grad, grad_factors = x.new_empty(rows, 2 * width), torch.zeros_like(factors)
    if grad.numel():
        block = min(triton.next_power_of_2(width), BLOCK)
        with torch.cuda.device_of(x):
            weighted_backward_kernel[(rows,)](
                *(x, factors, upstream, grad, grad_factors, x.stride(0), upstream.stride(0), width),
                BLOCK=block,
                num_warps=WARPS,
            )
    return grad, grad_factors


def _rows(x: Tensor) -> Tensor:
    """Returns `x` if the elements of a row are contiguous, otherwise a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
