"""`masked_sum`, `masked_mean`, `masked_whiten`: over counted entries, of all data-parallel ranks if asked."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from rl_kernel.checks import MASKS, check_number, check_tensor, compute_dtype, invalid
from rl_kernel.ops.masked.reference import masked_total, masked_whiten_reference


def masked_sum(values: Tensor, mask: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """`values[mask != 0].sum()`, over all ranks of `group`.

    Args:
        values: any shape and float dtype. Entries that are not counted may hold anything, NaN included.
        mask: same shape, bool, integer or float; nonzero means counted.
        group: data- (and context-) parallel ranks; each passes its own part, of any size. All of them must
            call.

    Returns:
        float32 scalar (float64 for float64 values), equal on all ranks; differentiable in `values` without a
        group.

    Raises:
        ValueError: shapes or devices that differ, wrong dtype, values that require grad together with a
        group.

    Summed in float64, over ranks in rank order: deterministic.
    """
    counted = _check(values, mask, group)
    return masked_total(values, counted, group)[0].to(compute_dtype(values))


def masked_mean(values: Tensor, mask: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """`values[mask != 0].mean()` over all ranks of `group`; 0 if nothing counts. Else as `masked_sum`."""
    counted = _check(values, mask, group)
    total, count = masked_total(values, counted, group)
    return (total / count.clamp(min=1)).to(compute_dtype(values))


def masked_whiten(
    values: Tensor,
    mask: Tensor,
    *,
    group: ProcessGroup | None = None,
    eps: float = 1e-8,
    shift_mean: bool = True,
) -> Tensor:
    """Zero mean and unit variance over the counted entries: `(values - mean) * (var + eps).rsqrt()`.

    `var` has Bessel's correction. `shift_mean=False` adds the mean back. Entries that are not counted come
    out as 0, and so does a single counted entry (its variance is taken as 0). eps > 0. Statistics are those
    of all ranks of `group`; arguments, errors, gradient and determinism as for `masked_sum`.

    Returns:
        The shape of `values`, float32 (float64 for float64 values).
    """
    counted = _check(values, mask, group)
    check_number("eps", eps, above=0.0)
    return masked_whiten_reference(values.to(compute_dtype(values)), counted, group, eps, shift_mean)


def _check(values: Tensor, mask: Tensor, group: ProcessGroup | None) -> Tensor:
    check_tensor("values", values, None)
    check_tensor("mask", mask, values.shape, MASKS, device=values.device)
    if group is not None and values.requires_grad:
        raise invalid("values", "not require grad with a group", "requires_grad=True", "pass values.detach()")
    return mask != 0
