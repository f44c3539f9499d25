"""The memory of operands in fp8 during the backward of a layer. Imports neither torch nor Megatron."""

from __future__ import annotations

from slime.config import Config
from slime.plan.layer_elements import expert_copies
from slime.plan.model_shape import Shape

BYTES = 1 + 4 / 128
"""Bytes of an e4m3 number with its share of a float32 scale of 128 numbers."""


def rounded_bytes(c: Config, shape: Shape, tokens: int) -> float:
    """Returns the bytes of the rounded operands of the largest product in the backward, 0 without --fp8-recipe
    blockwise.

    The first product of an MLP or of experts is the largest. Its output's gradient is rounded along both axes, its
    input along the columns, and its weight once. The operands of a product are freed before the next product.
    """
    if not c.megatron.has_fp8_blocks:
        return 0.0
    tp, found = c.megatron.tensor_model_parallel_size, [0.0]
    if any(not kind.sparse for kind in shape.kinds):
        width = 2 * shape.ffn / tp
        found.append(tokens * (2 * width + shape.hidden) + width * shape.hidden)
    if any(kind.sparse for kind in shape.kinds):
        width = 2 * shape.expert_ffn / c.megatron.expert_tensor_parallel
        experts = shape.experts / c.megatron.expert_model_parallel_size
        found.append(
            tokens * expert_copies(c, shape) * (2 * width + shape.hidden) + experts * width * shape.hidden
        )
    return max(found) * BYTES
