"""`rotary`: rotary position embedding of packed tokens."""

from __future__ import annotations

from torch import Tensor

from rl_kernel.checks import FLOATS, check_constant, check_tensor, invalid
from rl_kernel.dispatch import choose, float64_refusal
from rl_kernel.ops.rotary.reference import rotary_reference
from rl_kernel.telemetry import record, timed


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, impl: str | None = None) -> Tensor:
    """Computes `torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)` for the halves x1, x2 of the last dimension.

    Args:
        x: [T, heads, D], any float dtype and stride.
        cos, sin: [T, 1, D / 2] for each token's position; constants. They are first rounded to the dtype of x, in
            which engines store them. The kernel then computes in float32 and rounds once; the reference computes in
            the dtype of x.
        impl: names the implementation, "reference" or "triton", for tests and comparisons.

    Returns:
        [T, heads, D] in the dtype of x, contiguous, differentiable in x. Saves cos and sin only.

    Raises:
        ValueError: wrong shape, dtype or device, an odd D, cos or sin that require grad.
        Refused: the mode or `impl` demands the fast implementation and it cannot run.

    Deterministic (element-wise). Element i of a head is rotated with element i + D / 2, as HF checkpoints expect.
    Source: RoFormer, Su et al. (2021).
    """
    check_tensor("x", x, ["T", "heads", "D"], FLOATS)
    tokens, _, size = x.shape
    if size % 2:
        raise invalid("x", "have an even last dimension", list(x.shape), "rotate whole heads")
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, table, [tokens, 1, size // 2], FLOATS, device=x.device)
    check_constant(cos=cos, sin=sin)
    choice = choose("rotary", x.device, impl, float64_refusal(x, cos, sin))
    record(choice, tokens)
    with timed("rotary", x.device):
        if choice.implementation == "triton":
            from rl_kernel.ops.rotary.autograd import Rotary

            out: Tensor = Rotary.apply(x, cos, sin)
            return out
        return rotary_reference(x, cos, sin)
