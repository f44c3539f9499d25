"""Operators for an engine and a trainer that must compute the same bits.

Each operator guarantees that a row of the result depends only on that row of the input and on the weights, bit for bit.
The number and the order of the other rows change nothing. An engine that decodes token by token in a changing batch and
a trainer that packs whole sequences therefore get the same log-probs. Gradients are those of the plain operators.

`refusal` returns the reason why a device cannot run the operators, and `broken` tests the guarantee on this machine.
Reasons and limits: docs/design/bitwise.md.
"""

from rl_kernel.invariant.autograd import with_value
from rl_kernel.invariant.causal import attention, packed_attention, paged_attention
from rl_kernel.invariant.experts import (
    choose_experts,
    expert_outputs,
    expert_products,
    expert_weights,
    fill_slots,
    route,
    router_logits,
    spread_rows,
    sum_rows,
    sum_slots,
)
from rl_kernel.invariant.head import log_softmax, target_log_probs
from rl_kernel.invariant.layers import (
    Multiply,
    add_rms_norm,
    angles,
    linear,
    plain_product,
    rms_norm,
    rotate,
    swiglu,
    unrounded,
)
from rl_kernel.invariant.ranks import column_parallel_linear, linear_over_ranks, own_rows, row_parallel_linear
from rl_kernel.invariant.selfcheck import broken, refusal

__all__ = [
    "Multiply",
    "add_rms_norm",
    "angles",
    "attention",
    "broken",
    "choose_experts",
    "column_parallel_linear",
    "expert_outputs",
    "expert_products",
    "expert_weights",
    "fill_slots",
    "linear",
    "linear_over_ranks",
    "log_softmax",
    "own_rows",
    "packed_attention",
    "paged_attention",
    "plain_product",
    "refusal",
    "rms_norm",
    "rotate",
    "route",
    "router_logits",
    "row_parallel_linear",
    "spread_rows",
    "sum_rows",
    "sum_slots",
    "swiglu",
    "target_log_probs",
    "unrounded",
    "with_value",
]
