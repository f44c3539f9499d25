"""`swiglu`: the gated activation of an MLP."""

from __future__ import annotations

from torch import Tensor

from rl_kernel.checks import FLOATS, check_tensor, invalid
from rl_kernel.dispatch import choose, float64_refusal
from rl_kernel.ops.swiglu.reference import swiglu_reference
from rl_kernel.telemetry import record, timed


def swiglu(x: Tensor, *, impl: str | None = None) -> Tensor:
    """`F.silu(x[..., :F]) * x[..., F:]` for x of width 2 F.

    Args:
        x: [..., 2 F], any float dtype: the gates in the first half of a row, the values in the second. The kernel
        computes
            in float32 and rounds once; the reference uses PyTorch's functions, which round twice.
        impl: names the implementation, "reference" or "triton", for tests and comparisons.

    Returns:
        [..., F] in the dtype of x, differentiable. Only x is saved for the backward.

    Raises:
        ValueError: wrong dtype, no dimension, an odd width.
        Refused: the mode or `impl` demands the fast implementation and it cannot run.

    Deterministic (element-wise). Source: N. Shazeer, "GLU Variants Improve Transformer" (2020).
    """
    check_tensor("x", x, None, FLOATS)
    if x.dim() == 0 or x.shape[-1] % 2:
        raise invalid("x", "have an even last dimension", list(x.shape), "put gate and values side by side")
    choice = choose("swiglu", x.device, impl, float64_refusal(x))
    record(choice, x.numel() // x.shape[-1] if x.numel() else 0)
    with timed("swiglu", x.device):
        if choice.implementation == "triton":
            from rl_kernel.ops.swiglu.autograd import Swiglu

            out: Tensor = Swiglu.apply(x)
            return out
        return swiglu_reference(x)
