"""RMSNorm, with a residual if there is one, and the two numbers of a log-softmax. One program computes one row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

LANES = 4096
"""Logits that a program reads at a time."""


@triton.jit
def rms_norm_kernel(
    X, RESIDUAL, W, OUT, SUM, x_stride, residual_stride, K, eps, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x * rsqrt(mean(x ** 2) + eps), rounded to the dtype, times the weight, as checkpoints expect. ADD: x is X +
    RESIDUAL, rounded to the dtype, and is written to SUM."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < K
    x = tl.load(X + row * x_stride + lane, inside, other=0.0).to(tl.float32)
    if ADD:
        other = tl.load(RESIDUAL + row * residual_stride + lane, inside, other=0.0).to(tl.float32)
        total = (x + other).to(SUM.dtype.element_ty)
        tl.store(SUM + row * K + lane, total, inside)
        x = total.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / K + eps)
    normed = (x * scale).to(OUT.dtype.element_ty).to(tl.float32)
    weight = tl.load(W + lane, inside, other=0.0).to(tl.float32)
    tl.store(OUT + row * K + lane, (normed * weight).to(OUT.dtype.element_ty), inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The norm of x [N, K], or of x + residual, and what was normed: both [N, K], the former contiguous."""
    x = readable_rows(x)
    out = x.new_empty(x.shape)
    added = residual is not None
    residual = x if residual is None else readable_rows(residual)
    total = torch.empty_like(out) if added else x
    if out.numel():
        with torch.cuda.device_of(x):
            rms_norm_kernel[(len(x),)](
                x, residual, weight, out, total, x.stride(0), residual.stride(0), x.shape[1], eps,
                ADD=added, BLOCK=triton.next_power_of_2(x.shape[1]), num_warps=4,
            )  # fmt: skip
    return out, total


@triton.jit
def log_sums_kernel(X, TOP, LOG_SUM, x_stride, V, LANES: tl.constexpr):
    """max(x), and log(sum(exp(x - max(x)))). Each lane adds every LANES-th column from the first on."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    largest = tl.full((LANES,), -float("inf"), tl.float32)
    for first in range(0, V, LANES):
        x = tl.load(X + row * x_stride + first + lane, first + lane < V, other=-float("inf"))
        largest = tl.maximum(largest, x)
    top = tl.max(largest, 0)
    total = tl.zeros((LANES,), tl.float32)
    for first in range(0, V, LANES):
        x = tl.load(X + row * x_stride + first + lane, first + lane < V, other=-float("inf"))
        total += tl.exp(x - top)
    tl.store(TOP + row, top)
    tl.store(LOG_SUM + row, tl.log(tl.sum(total, 0)))


def log_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(`logits.amax(-1)`, `logits.logsumexp(-1) - logits.amax(-1)`) of fp32 logits [N, V], [N, 1] each."""
    assert logits.dtype == torch.float32, "another dtype may have another order of lanes"
    logits = readable_rows(logits)
    top, log_sum = logits.new_empty(2, len(logits), 1)
    if logits.numel():
        with torch.cuda.device_of(logits):
            log_sums_kernel[(len(logits),)](
                logits, top, log_sum, logits.stride(0), logits.shape[1], LANES=LANES, num_warps=8
            )
    return top, log_sum


def readable_rows(x: Tensor) -> Tensor:
    """`x` itself if the elements of a row are contiguous, otherwise a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
