"""`ratio_kl` in Triton: a forward kernel, a backward kernel, and functions that `grpo_loss` shares.

Each program computes one block of tokens. Clamps use `where`: a minimum or maximum would drop a NaN, which must reach
the loss.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_kernel.ops.masked.blocks import aligned, counts, load, store
from rl_kernel.ops.ratio_kl.reference import LOW_VAR_BOUND, MAX_EXPONENT

_TOP = tl.constexpr(MAX_EXPONENT)
_BOUND = tl.constexpr(LOW_VAR_BOUND)
BLOCK, WARPS = 1024, 4


@triton.jit
def clamped_ratio(log_ratio):
    """Returns exp(log_ratio), with the exponent clamped to MAX_EXPONENT, and its derivative."""
    over = log_ratio > _TOP
    ratio = tl.exp(tl.where(over, _TOP, log_ratio))
    return ratio, tl.where(over, 0.0, ratio)


@triton.jit
def _k3_estimate(log_ratio):
    """Returns exp(x) - 1 - x with x = -log_ratio, at most MAX_EXPONENT, and its derivative in log_ratio, 1 - exp(x)."""
    over = -log_ratio > _TOP
    x = tl.where(over, _TOP, -log_ratio)
    power = tl.exp(x)
    # Almost all tokens are near 0, where exp(x) - 1 - x loses all digits. The series from x**2 on keeps them.
    tail = 1 / 720 + x * (1 / 5040 + x * (1 / 40320 + x * (1 / 362880)))
    tail = x * x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * tail))))
    near = tl.abs(x) < 0.5
    value = tl.where(near, tail, power - 1.0 - x)
    slope = -tl.where(near, x + tail, power - 1.0)
    return value, tl.where(over, 0.0, slope)


@triton.jit
def kl_estimate(log_ratio, ratio, ratio_slope, KL_TYPE: tl.constexpr, UNBIASED: tl.constexpr):
    """Returns the estimate for `log_probs - ref_log_probs`, weighted and clamped, and its derivative in log_probs."""
    if KL_TYPE == "k1":
        kl = log_ratio
        slope = tl.full(log_ratio.shape, 1.0, tl.float32)
    elif KL_TYPE == "k2":
        kl = log_ratio * log_ratio * 0.5
        slope = log_ratio
    else:
        kl, slope = _k3_estimate(log_ratio)
    if UNBIASED:  # a ratio of 0 times an infinite estimate is 0, not NaN
        gone = ratio == 0
        slope = tl.where(gone, 0.0, ratio * slope + kl * ratio_slope)
        kl = tl.where(gone, 0.0, ratio * kl)
    if KL_TYPE == "low_var_kl":
        slope = tl.where((kl > _BOUND) | (kl < -_BOUND), 0.0, slope)
        kl = tl.where(kl > _BOUND, _BOUND, tl.where(kl < -_BOUND, -_BOUND, kl))
    return kl, slope


@triton.jit
def _forward_block(
    NEW,
    OLD,
    REF,
    MASK,
    RATIO,
    KL,
    left,
    HAS_REF: tl.constexpr,
    HAS_MASK: tl.constexpr,
    KL_TYPE: tl.constexpr,
    UNBIASED: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    new = load(NEW, lane, left, FULL).to(tl.float32)
    log_ratio = new - load(OLD, lane, left, FULL).to(tl.float32)
    counted = lane < left
    if HAS_MASK:
        counted = counts(MASK, lane, left, FULL)
    ratio, ratio_slope = clamped_ratio(tl.where(counted, log_ratio, 0.0))
    store(RATIO, lane, ratio, left, FULL)
    kl = tl.zeros([BLOCK], tl.float32)
    if HAS_REF:
        base = load(REF, lane, left, FULL).to(tl.float32)
        kl, _ = kl_estimate(tl.where(counted, new - base, 0.0), ratio, ratio_slope, KL_TYPE, UNBIASED)
    store(KL, lane, kl, left, FULL)


@triton.jit(do_not_specialize=["N"])
def forward_kernel(
    NEW,
    OLD,
    REF,
    MASK,
    RATIO,
    KL,
    N,
    HAS_REF: tl.constexpr,
    HAS_MASK: tl.constexpr,
    KL_TYPE: tl.constexpr,
    UNBIASED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes ratio and KL of a block of tokens."""
    at = tl.program_id(0).to(tl.int64) * BLOCK
    # fmt: off
    if at + BLOCK <= N:
        _forward_block(NEW + at, OLD + at, REF + at, MASK + at, RATIO + at, KL + at, BLOCK,
                       HAS_REF, HAS_MASK, KL_TYPE, UNBIASED, BLOCK, True)
    else:
        _forward_block(NEW + at, OLD + at, REF + at, MASK + at, RATIO + at, KL + at, N - at,
                       HAS_REF, HAS_MASK, KL_TYPE, UNBIASED, BLOCK, False)
    # fmt: on


@triton.jit
def _backward_block(
    NEW,
    OLD,
    REF,
    MASK,
    D_RATIO,
    D_KL,
    D_NEW,
    ratio_stride,
    kl_stride,
    left,
    HAS_RATIO: tl.constexpr,
    HAS_KL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    KL_TYPE: tl.constexpr,
    UNBIASED: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    new = load(NEW, lane, left, FULL).to(tl.float32)
    log_ratio = new - load(OLD, lane, left, FULL).to(tl.float32)
    counted = lane < left
    if HAS_MASK:
        counted = counts(MASK, lane, left, FULL)
    ratio, ratio_slope = clamped_ratio(tl.where(counted, log_ratio, 0.0))
    grad = tl.zeros([BLOCK], tl.float32)
    if HAS_RATIO:
        grad += load(D_RATIO, lane, left, FULL, ratio_stride).to(tl.float32) * ratio_slope
    if HAS_KL:
        base = load(REF, lane, left, FULL).to(tl.float32)
        _, slope = kl_estimate(tl.where(counted, new - base, 0.0), ratio, ratio_slope, KL_TYPE, UNBIASED)
        grad += load(D_KL, lane, left, FULL, kl_stride).to(tl.float32) * slope
    store(D_NEW, lane, tl.where(counted, grad, 0.0).to(D_NEW.dtype.element_ty), left, FULL)


@triton.jit(do_not_specialize=["N"])
def backward_kernel(
    NEW,
    OLD,
    REF,
    MASK,
    D_RATIO,
    D_KL,
    D_NEW,
    ratio_stride,
    kl_stride,
    N,
    HAS_RATIO: tl.constexpr,
    HAS_KL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    KL_TYPE: tl.constexpr,
    UNBIASED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes d_log_probs of a block from the gradients of ratio and KL, which may be strided (stride 0 after a
    sum)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK
    # fmt: off
    if at + BLOCK <= N:
        _backward_block(NEW + at, OLD + at, REF + at, MASK + at, D_RATIO + at * ratio_stride, D_KL + at * kl_stride,
                        D_NEW + at, ratio_stride, kl_stride, BLOCK,
                        HAS_RATIO, HAS_KL, HAS_MASK, KL_TYPE, UNBIASED, BLOCK, True)
    else:
        _backward_block(NEW + at, OLD + at, REF + at, MASK + at, D_RATIO + at * ratio_stride, D_KL + at * kl_stride,
                        D_NEW + at, ratio_stride, kl_stride, N - at,
                        HAS_RATIO, HAS_KL, HAS_MASK, KL_TYPE, UNBIASED, BLOCK, False)
    # fmt: on


def forward(
    log_probs: Tensor, old: Tensor, ref: Tensor | None, mask: Tensor | None, kl_type: str, unbiased: bool
) -> tuple[Tensor, Tensor]:
    """Returns (ratio, kl) [N] float32 of flat inputs."""
    ratio = torch.empty_like(log_probs, dtype=torch.float32)
    kl = torch.empty_like(ratio)
    if tokens := log_probs.numel():
        with torch.cuda.device_of(log_probs):
            forward_kernel[(triton.cdiv(tokens, BLOCK),)](
                log_probs,
                old,
                log_probs if ref is None else ref,
                log_probs if mask is None else mask,
                ratio,
                kl,
                tokens,
                HAS_REF=ref is not None,
                HAS_MASK=mask is not None,
                KL_TYPE=kl_type,
                UNBIASED=unbiased,
                BLOCK=BLOCK,
                num_warps=WARPS,
            )
    return ratio, kl


def backward(
    log_probs: Tensor,
    old: Tensor,
    ref: Tensor | None,
    mask: Tensor | None,
    kl_type: str,
    unbiased: bool,
    d_ratio: Tensor | None,
    d_kl: Tensor | None,
) -> Tensor:
    """Returns d_log_probs [N] in the dtype of `log_probs`; gradients may have any stride."""
    grad = torch.empty_like(log_probs)
    d_ratio, d_kl = (value if value is None else aligned(value) for value in (d_ratio, d_kl))
    has_kl = d_kl is not None and ref is not None
    if tokens := log_probs.numel():
        with torch.cuda.device_of(log_probs):
            backward_kernel[(triton.cdiv(tokens, BLOCK),)](
                log_probs,
                old,
                log_probs if ref is None else ref,
                log_probs if mask is None else mask,
                log_probs if d_ratio is None else d_ratio,
                d_kl if has_kl else log_probs,
                grad,
                1 if d_ratio is None else d_ratio.stride(0),
                1 if d_kl is None else d_kl.stride(0),
                tokens,
                HAS_RATIO=d_ratio is not None,
                HAS_KL=has_kl,
                HAS_MASK=mask is not None,
                KL_TYPE=kl_type,
                UNBIASED=unbiased,
                BLOCK=BLOCK,
                num_warps=WARPS,
            )
    return grad
