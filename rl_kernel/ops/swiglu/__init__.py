"""`swiglu`: the gated activation of an MLP."""

from __future__ import annotations

from torch import Tensor

from rl_kernel.checks import FLOATS, check_tensor, invalid
from rl_kernel.dispatch import choose, float64_refusal
from rl_kernel.ops.swiglu.reference import swiglu_reference
from rl_kernel.telemetry import record, timed


def swiglu(x: Tensor, weights: Tensor | None = None, *, impl: str | None = None) -> Tensor:
    """Computes `F.silu(x[..., :F]) * x[..., F:] * weights[..., None]` for x of width 2 F.

    Args:
        x: [..., 2 F], any float dtype: the gates in the first half of a row, the values in the second. The kernel
            computes in float32 and rounds once; the reference uses PyTorch's functions, which round twice.
        weights: [...], any float dtype: a factor for each row, such as the router's weight of an expert. None means 1.
        impl: names the implementation, "reference" or "triton", for tests and comparisons.

    Returns:
        [..., F] in the dtype of x, differentiable in x and `weights`. Saves x and `weights` only.

    Raises:
        ValueError: wrong dtype, no dimension, an odd width.
        Refused: the mode or `impl` demands the fast implementation and it cannot run.

    Deterministic. Source: N. Shazeer, "GLU Variants Improve Transformer" (2020).
    """
    check_tensor("x", x, None, FLOATS)
    if x.dim() == 0 or x.shape[-1] % 2:
        raise invalid("x", "have an even last dimension", list(x.shape), "put gate and values side by side")
    if weights is not None:
        check_tensor("weights", weights, list(x.shape[:-1]), FLOATS, device=x.device)
    choice = choose("swiglu", x.device, impl, float64_refusal(x, weights))
    record(choice, x.numel() // x.shape[-1] if x.numel() else 0)
    with timed("swiglu", x.device):
        if choice.implementation == "triton":
            from rl_kernel.ops.swiglu.autograd import Swiglu

            out: Tensor = Swiglu.apply(x, weights)
            return out
        return swiglu_reference(x, weights)
