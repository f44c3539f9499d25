"""`swiglu` in Triton: a kernel for the forward, one for the backward. Each program computes a block of columns of a
row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 4


@triton.jit
def forward_kernel(X, OUT, x_stride, F, BLOCK: tl.constexpr):
    """silu(gate) * up of one block. x_stride: elements from one row of X to the next."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < F
    gate = tl.load(X + row * x_stride + lane, inside, other=0.0).to(tl.float32)
    up = tl.load(X + row * x_stride + F + lane, inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(OUT + row * F + lane, out.to(OUT.dtype.element_ty), inside)


@triton.jit
def backward_kernel(X, D_OUT, D_X, x_stride, d_stride, F, BLOCK: tl.constexpr):
    """d_x of one block: d_up = d * silu(gate), d_gate = d * up * (s + gate * s * (1 - s)), s = sigmoid(gate)."""
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


def forward(x: Tensor) -> Tensor:
    """x [N, 2 F] -> [N, F], contiguous."""
    x = _rows(x)
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, width)
    if out.numel():
        with torch.cuda.device_of(x):
            forward_kernel[(rows, triton.cdiv(width, BLOCK))](
                x, out, x.stride(0), width, BLOCK=BLOCK, num_warps=WARPS
            )
    return out


def backward(x: Tensor, upstream: Tensor) -> Tensor:
    """Gradient [N, 2 F] from that of the output, [N, F]."""
    x, upstream = _rows(x), _rows(upstream)
    rows, width = upstream.shape
    grad = x.new_empty(rows, 2 * width)
    if grad.numel():
        with torch.cuda.device_of(x):
            backward_kernel[(rows, triton.cdiv(width, BLOCK))](
                x, upstream, grad, x.stride(0), upstream.stride(0), width, BLOCK=BLOCK, num_warps=WARPS
            )
    return grad


def _rows(x: Tensor) -> Tensor:
    """`x` itself if the elements of a row are contiguous, otherwise a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
