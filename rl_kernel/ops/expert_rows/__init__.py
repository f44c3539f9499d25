"""`expert_dispatch` copies tokens to the rows of their experts, and `expert_combine` sums each token's rows.

ids [T, K] -> expert_rows -> rows [T, K], counts [E]
x [T, H] -> expert_dispatch -> [C, H], sorted by expert -> the experts -> expert_combine -> [T, H]
"""

from __future__ import annotations

from torch import Tensor

from rl_kernel.checks import FLOATS, INTEGERS, check_constant, check_tensor, invalid
from rl_kernel.dispatch import choose, float64_refusal
from rl_kernel.ops.expert_rows.reference import combine_reference, dispatch_reference, expert_rows
from rl_kernel.telemetry import record, timed

__all__ = ["expert_combine", "expert_dispatch", "expert_rows"]


def expert_dispatch(
    x: Tensor, weights: Tensor, rows: Tensor, total: int, *, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """Computes `out[rows[t, k]] = x[t]` and `row_weights[rows[t, k]] = weights[t, k]` where `rows[t, k] >= 0`.

    Args:
        x: [T, H], any float dtype.
        weights: [T, K], any float dtype: each expert's weight in the sum of its token.
        rows: [T, K] int32 from `expert_rows`. A row is negative if its expert is on another rank.
        total: C, the number of rows that are not negative. Each number below C occurs once in `rows`. This is not
            checked, because the host would wait for the device.
        impl: names the implementation, "reference" or "triton", for tests and comparisons.

    Returns:
        [C, H] in the dtype of x and [C] in the dtype of `weights`, differentiable in x and `weights`. Saves `rows`
        only. The gradient of x is summed in float32 and rounded once.

    Raises:
        ValueError: wrong shape, dtype or device, a negative `total`, `rows` that require grad.
        Refused: the mode or `impl` demands the fast implementation and it cannot run.

    Deterministic: the sums of the gradient have the order of k. Source: "Outrageously Large Neural Networks", Shazeer
    et al. (2017), section 3.1.
    """
    check_tensor("x", x, ["T", "H"], FLOATS)
    check_tensor("rows", rows, [x.shape[0], "K"], INTEGERS, device=x.device)
    check_tensor("weights", weights, list(rows.shape), FLOATS, device=x.device)
    check_constant(rows=rows)
    if total < 0:
        raise invalid("total", "be >= 0", total, "pass the number of rows of the experts that are here")
    choice = choose("expert_dispatch", x.device, impl, float64_refusal(x, weights))
    record(choice, x.shape[0])
    with timed("expert_dispatch", x.device):
        if choice.implementation == "triton":
            from rl_kernel.ops.expert_rows.autograd import Dispatch

            out: tuple[Tensor, Tensor] = Dispatch.apply(x, weights, rows, total)
            return out
        return dispatch_reference(x, weights, rows, total)


def expert_combine(y: Tensor, rows: Tensor, *, impl: str | None = None) -> Tensor:
    """Computes `out[t] = sum over k of y[rows[t, k]]` where `rows[t, k] >= 0`; zero for a token without such a row.

    Args:
        y: [C, H], any float dtype: the outputs of the experts, already multiplied by their weights.
        rows: [T, K] int32 from `expert_rows`.
        impl: names the implementation, "reference" or "triton", for tests and comparisons.

    Returns:
        [T, H] in the dtype of y, differentiable in y. The sum is computed in float32, in the order of k, and rounded
        once. Saves `rows` only.

    Raises:
        ValueError: wrong shape, dtype or device, `rows` that require grad.
        Refused: the mode or `impl` demands the fast implementation and it cannot run.

    Deterministic. Source: "Outrageously Large Neural Networks", Shazeer et al. (2017), equation 1.
    """
    check_tensor("y", y, ["C", "H"], FLOATS)
    check_tensor("rows", rows, ["T", "K"], INTEGERS, device=y.device)
    check_constant(rows=rows)
    choice = choose("expert_combine", y.device, impl, float64_refusal(y))
    record(choice, rows.shape[0])
    with timed("expert_combine", y.device):
        if choice.implementation == "triton":
            from rl_kernel.ops.expert_rows.autograd import Combine

            out: Tensor = Combine.apply(y, rows)
            return out
        return combine_reference(y, rows)
