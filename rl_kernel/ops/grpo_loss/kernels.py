"""`grpo_loss` in Triton: one pass over the inputs computes metrics, partial sums of the loss, and its derivative.

A single program computes up to 4096 tokens and writes the loss directly. With more tokens, each program writes a
partial sum in float64, and a second kernel adds the partial sums in a fixed order. The backward multiplies the saved
derivative.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_kernel.ops.grpo_loss.reference import Columns, LossTerms
from rl_kernel.ops.masked.blocks import add_rows, counts, load, store
from rl_kernel.ops.ratio_kl.kernels import clamped_ratio, kl_estimate

ONE_PROGRAM, ONE_PROGRAM_WARPS = 4096, 16
BLOCK, WARPS = 1024, 4


@triton.jit
def _policy_loss(ratio, ratio_slope, advantage, low, high, ceiling, DUAL: tl.constexpr):
    """Returns each token's loss, its derivative in log_probs, and whether the token is clipped."""
    unclipped = -ratio * advantage
    held = tl.where(ratio < low, low, tl.where(ratio > high, high, ratio))
    bounded = -held * advantage
    clipped = bounded > unclipped
    loss = tl.where(clipped, bounded, unclipped)
    constant = clipped
    if DUAL:
        above = (advantage < 0) & (loss > -ceiling * advantage)
        loss = tl.where(above, -ceiling * advantage, loss)
        constant = constant | above
    return loss, tl.where(constant, 0.0, -advantage * ratio_slope), clipped


@triton.jit
def _weight(DENOMINATORS, denominator, lane, left, PER_TOKEN: tl.constexpr, FULL: tl.constexpr):
    """Returns 1 / denominator, or NaN if the denominator is not positive, so that the mistake shows in the loss."""
    if PER_TOKEN:
        divisor = load(DENOMINATORS, lane, left, FULL).to(tl.float32)
        weight = tl.where(divisor > 0, 1.0 / divisor, float("nan"))
    else:
        weight = 1.0 / denominator
    return weight


@triton.jit
def _block(
    NEW,
    OLD,
    ADVANTAGES,
    MASK,
    DENOMINATORS,
    TIS,
    REF,
    ENTROPY,
    PG_LOSS,
    PG_CLIPFRAC,
    PPO_KL,
    RATIO,
    KL,
    SLOPE,
    PARTIAL,
    denominator,
    low,
    high,
    ceiling,
    kl_coef,
    entropy_coef,
    left,
    PER_TOKEN: tl.constexpr,
    DUAL: tl.constexpr,
    HAS_TIS: tl.constexpr,
    HAS_REF: tl.constexpr,
    USE_KL: tl.constexpr,
    USE_ENTROPY: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
    KL_TYPE: tl.constexpr,
    UNBIASED: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    counted = counts(MASK, lane, left, FULL)
    new = load(NEW, lane, left, FULL).to(tl.float32)
    log_ratio = tl.where(counted, new - load(OLD, lane, left, FULL).to(tl.float32), 0.0)
    advantage = load(ADVANTAGES, lane, left, FULL).to(tl.float32)
    ratio, ratio_slope = clamped_ratio(log_ratio)
    loss, slope, clipped = _policy_loss(ratio, ratio_slope, advantage, low, high, ceiling, DUAL)
    if HAS_TIS:
        tis = load(TIS, lane, left, FULL).to(tl.float32)
        loss *= tis
        slope *= tis
    store(PG_LOSS, lane, tl.where(counted, loss, 0.0), left, FULL)
    store(PG_CLIPFRAC, lane, tl.where(counted & clipped, 1.0, 0.0), left, FULL)
    store(PPO_KL, lane, 0.0 - log_ratio, left, FULL)
    store(RATIO, lane, ratio, left, FULL)
    if HAS_REF:
        base = load(REF, lane, left, FULL).to(tl.float32)
        kl, kl_slope = kl_estimate(tl.where(counted, new - base, 0.0), ratio, ratio_slope, KL_TYPE, UNBIASED)
        store(KL, lane, kl, left, FULL)
        if USE_KL:
            loss += kl_coef * kl
            slope += kl_coef * kl_slope
    if USE_ENTROPY:
        loss -= entropy_coef * load(ENTROPY, lane, left, FULL).to(tl.float32)
    weight = _weight(DENOMINATORS, denominator, lane, left, PER_TOKEN, FULL)
    if HAS_SLOPE:
        store(SLOPE, lane, tl.where(counted, slope * weight, 0.0), left, FULL)
    total = tl.sum(tl.where(counted, loss * weight, 0.0).to(tl.float64), 0)
    tl.store(PARTIAL, total.to(PARTIAL.dtype.element_ty))


@triton.jit(do_not_specialize=["N"])
def forward_kernel(
    NEW,
    OLD,
    ADVANTAGES,
    MASK,
    DENOMINATORS,
    TIS,
    REF,
    ENTROPY,
    PG_LOSS,
    PG_CLIPFRAC,
    PPO_KL,
    RATIO,
    KL,
    SLOPE,
    PARTIALS,
    N,
    denominator,
    low,
    high,
    ceiling,
    kl_coef,
    entropy_coef,
    PER_TOKEN: tl.constexpr,
    DUAL: tl.constexpr,
    HAS_TIS: tl.constexpr,
    HAS_REF: tl.constexpr,
    USE_KL: tl.constexpr,
    USE_ENTROPY: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
    KL_TYPE: tl.constexpr,
    UNBIASED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes metrics [N], derivative [N], and one partial sum of the loss per program."""
    program = tl.program_id(0)
    at = program.to(tl.int64) * BLOCK
    # fmt: off
    if at + BLOCK <= N:
        _block(NEW + at, OLD + at, ADVANTAGES + at, MASK + at, DENOMINATORS + at, TIS + at, REF + at, ENTROPY + at,
               PG_LOSS + at, PG_CLIPFRAC + at, PPO_KL + at, RATIO + at, KL + at, SLOPE + at, PARTIALS + program,
               denominator, low, high, ceiling, kl_coef, entropy_coef, BLOCK,
               PER_TOKEN, DUAL, HAS_TIS, HAS_REF, USE_KL, USE_ENTROPY, HAS_SLOPE, KL_TYPE, UNBIASED, BLOCK, True)
    else:
        _block(NEW + at, OLD + at, ADVANTAGES + at, MASK + at, DENOMINATORS + at, TIS + at, REF + at, ENTROPY + at,
               PG_LOSS + at, PG_CLIPFRAC + at, PPO_KL + at, RATIO + at, KL + at, SLOPE + at, PARTIALS + program,
               denominator, low, high, ceiling, kl_coef, entropy_coef, N - at,
               PER_TOKEN, DUAL, HAS_TIS, HAS_REF, USE_KL, USE_ENTROPY, HAS_SLOPE, KL_TYPE, UNBIASED, BLOCK, False)
    # fmt: on


@triton.jit
def _backward_block(
    UPSTREAM,
    SLOPE,
    MASK,
    DENOMINATORS,
    D_NEW,
    D_ENTROPY,
    denominator,
    entropy_coef,
    left,
    PER_TOKEN: tl.constexpr,
    HAS_NEW: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    upstream = tl.load(UPSTREAM).to(tl.float32)
    if HAS_NEW:
        slope = load(SLOPE, lane, left, FULL)
        store(D_NEW, lane, (upstream * slope).to(D_NEW.dtype.element_ty), left, FULL)
    if HAS_ENTROPY:
        counted = counts(MASK, lane, left, FULL)
        weight = _weight(DENOMINATORS, denominator, lane, left, PER_TOKEN, FULL)
        slope = tl.where(counted, -entropy_coef * upstream * weight, 0.0)
        store(D_ENTROPY, lane, slope.to(D_ENTROPY.dtype.element_ty), left, FULL)


@triton.jit(do_not_specialize=["UPSTREAM", "N"])
def backward_kernel(
    UPSTREAM,
    SLOPE,
    MASK,
    DENOMINATORS,
    D_NEW,
    D_ENTROPY,
    N,
    denominator,
    entropy_coef,
    PER_TOKEN: tl.constexpr,
    HAS_NEW: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes d_log_probs [N] and d_entropy [N] from the derivative of the loss and the gradient of the scalar."""
    at = tl.program_id(0).to(tl.int64) * BLOCK
    # fmt: off
    if at + BLOCK <= N:
        _backward_block(UPSTREAM, SLOPE + at, MASK + at, DENOMINATORS + at, D_NEW + at, D_ENTROPY + at, denominator,
                        entropy_coef, BLOCK, PER_TOKEN, HAS_NEW, HAS_ENTROPY, BLOCK, True)
    else:
        _backward_block(UPSTREAM, SLOPE + at, MASK + at, DENOMINATORS + at, D_NEW + at, D_ENTROPY + at, denominator,
                        entropy_coef, N - at, PER_TOKEN, HAS_NEW, HAS_ENTROPY, BLOCK, False)
    # fmt: on


def metric_names(c: Columns) -> tuple[str, ...]:
    """Returns the names of a call's metrics, in the order of the outputs."""
    names = ("pg_loss", "pg_clipfrac", "ppo_kl", "ratio")
    return names if c.ref_log_probs is None else (*names, "kl_loss")


def forward(
    terms: LossTerms, c: Columns, *, with_slope: bool
) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
    """Returns (loss scalar, metrics, derivative of the loss in log_probs [N] if `with_slope`), float32, from flat
    columns."""
    tokens = c.log_probs.numel()
    metrics = {name: torch.empty_like(c.log_probs, dtype=torch.float32) for name in metric_names(c)}
    slope = torch.empty_like(metrics["ratio"]) if with_slope else None
    loss = metrics["ratio"].new_empty(())
    one = 0 < tokens <= ONE_PROGRAM
    block, warps = (ONE_PROGRAM, ONE_PROGRAM_WARPS) if one else (BLOCK, WARPS)
    programs = triton.cdiv(tokens, block)
    partials = loss if one else loss.new_empty((1, programs), dtype=torch.float64)
    per_token = isinstance(c.denominators, Tensor)
    unused = c.log_probs
    with torch.cuda.device_of(loss):
        if programs:
            forward_kernel[(programs,)](
                c.log_probs,
                c.old_log_probs,
                c.advantages,
                c.mask,
                c.denominators if per_token else unused,
                unused if c.tis_weights is None else c.tis_weights,
                unused if c.ref_log_probs is None else c.ref_log_probs,
                unused if c.entropy is None else c.entropy,
                metrics["pg_loss"],
                metrics["pg_clipfrac"],
                metrics["ppo_kl"],
                metrics["ratio"],
                metrics.get("kl_loss", unused),
                unused if slope is None else slope,
                partials,
                tokens,
                1.0 if per_token else float(c.denominators),
                float(1 - terms.eps_clip),
                float(1 + terms.eps_clip_high),
                float(terms.eps_clip_c or 0.0),
                float(terms.kl_coef),
                float(terms.entropy_coef),
                PER_TOKEN=per_token,
                DUAL=terms.eps_clip_c is not None,
                HAS_TIS=c.tis_weights is not None,
                HAS_REF=c.ref_log_probs is not None,
                USE_KL=terms.kl_coef != 0,
                USE_ENTROPY=terms.entropy_coef != 0,
                HAS_SLOPE=with_slope,
                KL_TYPE=terms.kl_type,
                UNBIASED=terms.unbiased_kl,
                BLOCK=block,
                num_warps=warps,
            )
        if not one:
            add_rows(partials, loss)
    return loss, metrics, slope


def backward(
    upstream: Tensor,
    slope: Tensor | None,
    mask: Tensor,
    denominators: Tensor | float,
    entropy_coef: float,
    d_log_probs: Tensor | None,
    d_entropy: Tensor | None,
) -> None:
    """Writes those gradients whose tensors are not None, [N] each. `upstream` is the gradient of the scalar loss."""
    per_token = isinstance(denominators, Tensor)
    if tokens := mask.numel():
        with torch.cuda.device_of(mask):
            backward_kernel[(triton.cdiv(tokens, BLOCK),)](
                upstream,
                mask if slope is None else slope,
                mask,
                denominators if per_token else mask,
                mask if d_log_probs is None else d_log_probs,
                mask if d_entropy is None else d_entropy,
                tokens,
                1.0 if per_token else float(denominators),
                float(entropy_coef),
                PER_TOKEN=per_token,
                HAS_NEW=d_log_probs is not None,
                HAS_ENTROPY=d_entropy is not None,
                BLOCK=BLOCK,
                num_warps=WARPS,
            )
