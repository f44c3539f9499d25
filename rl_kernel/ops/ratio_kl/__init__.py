"""`ratio_kl`: the importance ratio and a KL estimate per token."""

from __future__ import annotations

from torch import Tensor

from rl_kernel.checks import MASKS, check_constant, check_tensor, compute_dtype, invalid
from rl_kernel.dispatch import choose, float64_refusal
from rl_kernel.ops.ratio_kl.reference import ratio_kl_reference
from rl_kernel.telemetry import record, timed

KL_TYPES = ("k1", "k2", "k3", "low_var_kl")


def ratio_kl(
    log_probs: Tensor,
    old_log_probs: Tensor,
    ref_log_probs: Tensor | None = None,
    mask: Tensor | None = None,
    kl_type: str = "k1",
    *,
    unbiased: bool = False,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes `ratio = (log_probs - old_log_probs).exp()` and the KL estimate against `ref_log_probs`.

    With lr = log_probs - ref_log_probs: k1 `lr`; k2 `lr**2 / 2`; k3 `x.exp() - 1 - x` with `x = -lr`; low_var_kl: k3
    clamped to [-10, 10]. `unbiased` multiplies the estimate by the ratio before the clamp, and the product with a ratio
    of 0 is 0; the gradient includes the ratio.

    Args:
        log_probs: [N] nats, any float dtype; computed in float32 (float64 if it is float64).
        old_log_probs, ref_log_probs: [N]; constants. Without a reference the KL is 0.
        mask: [N] bool, integer or float; nonzero means counted. The other tokens have ratio 1, KL 0 and no gradient,
            for any input values (NaN included).
        kl_type: one of k1, k2, k3, low_var_kl.
        impl: names the implementation, "reference" or "triton", for tests and comparisons.

    Returns:
        (ratio [N], kl [N]), float32, differentiable in `log_probs`. Exponents above 80 count as 80, in the ratio and as
        x of k3. Both results then stay finite, and their gradients are 0 there.

    Raises:
        ValueError: wrong shape, dtype or device, a constant that requires grad, an unknown kl_type.
        Refused: the mode or `impl` demands the fast implementation and it cannot run.

    Deterministic (element-wise). Source: J. Schulman, "Approximating KL Divergence" (2020); DeepSeek-V3.2 (2025) for
    the unbiased weight.
    """
    check_tensor("log_probs", log_probs, ["N"])
    shape, device = log_probs.shape, log_probs.device
    check_tensor("old_log_probs", old_log_probs, shape, device=device)
    if ref_log_probs is not None:
        check_tensor("ref_log_probs", ref_log_probs, shape, device=device)
    if mask is not None:
        check_tensor("mask", mask, shape, MASKS, device=device)
    check_constant(old_log_probs=old_log_probs, ref_log_probs=ref_log_probs, mask=mask)
    check_kl_type(kl_type)
    choice = choose("ratio_kl", device, impl, float64_refusal(log_probs))
    record(choice, log_probs.numel())
    with timed("ratio_kl", device):
        if choice.implementation == "triton":
            from rl_kernel.ops.ratio_kl.autograd import RatioKL

            inputs = log_probs, old_log_probs, ref_log_probs, mask
            out: tuple[Tensor, Tensor] = RatioKL.apply(*inputs, kl_type, unbiased)
            return out
        dtype = compute_dtype(log_probs)
        ref = None if ref_log_probs is None else ref_log_probs.to(dtype)
        counted = None if mask is None else mask != 0
        return ratio_kl_reference(
            log_probs.to(dtype), old_log_probs.to(dtype), ref, counted, kl_type, unbiased
        )


def check_kl_type(kl_type: str) -> None:
    """Raises ValueError unless `kl_type` is one of KL_TYPES."""
    if kl_type not in KL_TYPES:
        raise invalid("kl_type", f"be one of {', '.join(KL_TYPES)}", repr(kl_type), "pick one of them")
