"""Linear layers in fp8 with scales per block, for training: the forward product and both gradients.

A value is rounded to `code * scale`, where the code is a number of e4m3 and the scale belongs to 128 elements of an
activation, or to 128 x 128 elements of a weight. `reference` defines the results in plain PyTorch. On a GPU, Triton
kernels round, with the same bits, and torch (cuBLAS), DeepGEMM or Triton multiplies.
"""

from rl_kernel.fp8.choice import PRODUCTS, choose_products, products_refusal, uses_deepgemm
from rl_kernel.fp8.kept import keep_rounded
from rl_kernel.fp8.layers import (
    check_sizes,
    expert_gradients,
    expert_outputs,
    linear,
    refusal,
    round_experts,
)
from rl_kernel.fp8.ranks import multiply, row_parallel_linear
from rl_kernel.fp8.reference import GROUP

__all__ = [
    "GROUP",
    "PRODUCTS",
    "check_sizes",
    "choose_products",
    "expert_gradients",
    "expert_outputs",
    "keep_rounded",
    "linear",
    "multiply",
    "products_refusal",
    "refusal",
    "round_experts",
    "row_parallel_linear",
    "uses_deepgemm",
]
