"""Triton kernels whose result for a row does not depend on the other rows: product, RMSNorm, log-softmax, attention.

A row meets its inputs in one fixed order, and nothing is added atomically. Only the sum of the log-softmax is split
over programs, at fixed columns. So a row of a batch of 1 and of 10,000 takes the same steps. What stands in the other
rows of its tile never enters its sums.
"""

from rl_kernel.invariant.kernels.attention import attention
from rl_kernel.invariant.kernels.product import linear
from rl_kernel.invariant.kernels.rows import log_softmax, log_sums, rms_norm

__all__ = ["attention", "linear", "log_softmax", "log_sums", "rms_norm"]
