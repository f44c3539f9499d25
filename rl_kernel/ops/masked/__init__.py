"""`masked_sum`, `masked_mean` and `masked_whiten` reduce the counted entries of a process, or of a group of ranks."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from rl_kernel.checks import MASKS, check_number, check_tensor, compute_dtype, invalid
from rl_kernel.dispatch import choose, float64_refusal
from rl_kernel.ops.masked.reference import masked_total, masked_whiten_reference
from rl_kernel.telemetry import record, timed


def masked_sum(
    values: Tensor, mask: Tensor, *, group: ProcessGroup | None = None, impl: str | None = None
) -> Tensor:
    """Returns `values[mask != 0].sum()`, over all ranks of `group`.

    Args:
        values: any shape and float dtype. Entries that are not counted may hold any value, NaN included.
        mask: same shape, bool, integer or float; nonzero means counted.
        group: data-parallel (and context-parallel) ranks. Each rank passes its own part, of any size. All ranks must
            call, with the same `impl` and mode.
        impl: names the implementation, "reference" or "triton", for tests and comparisons.

    Returns:
        float32 scalar (float64 for float64 values), equal on all ranks; differentiable in `values` without a group.

    Raises:
        ValueError: shapes or devices that differ, wrong dtype, values that require grad together with a group.
        Refused: the mode or `impl` demands the fast implementation and it cannot run.

    Sums are in float64, over ranks in rank order. Deterministic.
    """
    return _total("masked_sum", values, mask, group, impl)


def masked_mean(
    values: Tensor, mask: Tensor, *, group: ProcessGroup | None = None, impl: str | None = None
) -> Tensor:
    """Returns `values[mask != 0].mean()` over all ranks of `group`; 0 if no entry counts. See `masked_sum` for the
    rest."""
    return _total("masked_mean", values, mask, group, impl)


def masked_whiten(
    values: Tensor,
    mask: Tensor,
    *,
    group: ProcessGroup | None = None,
    eps: float = 1e-8,
    shift_mean: bool = True,
    impl: str | None = None,
) -> Tensor:
    """Returns the counted entries with zero mean and unit variance: `(values - mean) * (var + eps).rsqrt()`.

    `var` has Bessel's correction. `shift_mean=False` adds the mean back. Entries that are not counted become 0. A
    single counted entry has variance 0. eps must be > 0. Mean and variance cover all ranks of `group`. Arguments,
    errors, gradient and determinism are those of `masked_sum`.

    Returns:
        The shape of `values`, float32 (float64 for float64 values).
    """
    _check(values, mask, group)
    check_number("eps", eps, above=0.0)
    choice = choose("masked_whiten", values.device, impl, float64_refusal(values))
    record(choice, values.numel())
    with timed("masked_whiten", values.device):
        if choice.implementation == "triton":
            from rl_kernel.ops.masked.autograd import masked_whiten_triton

            return masked_whiten_triton(values, mask, group, eps, shift_mean)
        return masked_whiten_reference(values.to(compute_dtype(values)), mask != 0, group, eps, shift_mean)


def _total(
    operator: str, values: Tensor, mask: Tensor, group: ProcessGroup | None, impl: str | None
) -> Tensor:
    """Returns the sum, or the mean if `operator` is masked_mean."""
    mean = operator == "masked_mean"
    _check(values, mask, group)
    choice = choose(operator, values.device, impl, float64_refusal(values))
    record(choice, values.numel())
    with timed(operator, values.device):
        if choice.implementation == "triton":
            from rl_kernel.ops.masked.autograd import masked_total_triton

            return masked_total_triton(values, mask, group, mean=mean)
        total, count = masked_total(values, mask != 0, group).unbind()
        return (total / count.clamp(min=1) if mean else total).to(compute_dtype(values))


def _check(values: Tensor, mask: Tensor, group: ProcessGroup | None) -> None:
    check_tensor("values", values, None)
    check_tensor("mask", mask, values.shape, MASKS, device=values.device)
    if group is not None and values.requires_grad:
        raise invalid("values", "not require grad with a group", "requires_grad=True", "pass values.detach()")
