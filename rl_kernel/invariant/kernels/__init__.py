"""Triton kernels whose result for a row does not depend on the other rows: products, RMSNorm, log-softmax, attention,
experts.

A row reads its inputs in one fixed order, and no addition is atomic. Only the sum of the log-softmax is split over
programs, at fixed columns. A row of a batch of 1 and a row of a batch of 10,000 therefore take the same steps. The
content of the other rows of a tile never enters the sums of a row.
"""

from rl_kernel.invariant.kernels.attention import attention
from rl_kernel.invariant.kernels.experts import choose_experts, expert_products, expert_rows
from rl_kernel.invariant.kernels.product import linear
from rl_kernel.invariant.kernels.rows import log_softmax, log_sums, rms_norm

__all__ = [
    "attention",
    "choose_experts",
    "expert_products",
    "expert_rows",
    "linear",
    "log_softmax",
    "log_sums",
    "rms_norm",
]
