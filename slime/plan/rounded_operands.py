"""The forms of few bits to which linear layers round the operands of their products, and the memory of such operands
during the backward of a layer. Imports neither torch nor Megatron."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config import Config
from slime.config.fields import Values
from slime.plan.layer_elements import expert_copies
from slime.plan.model_shape import Shape
from slime.plan.rank_params import rank_params


@dataclass(frozen=True)
class OperandForm:
    """Codes in blocks that share a scale."""

    name: str
    flag: str
    """The flag that selects the form, with its value."""
    bits: int
    block: int
    """Elements along the summed axis that share a scale."""
    scale_bytes: int
    has_layers: bool
    """The trainer's own layers compute in this form."""

    @property
    def bytes(self) -> float:
        """Returns the bytes of an element with its share of the scale."""
        return self.bits / 8 + self.scale_bytes / self.block


BLOCKS = OperandForm("fp8", "--fp8-recipe blockwise", 8, 128, 4, True)
MXFP8 = OperandForm("MXFP8", "--fp8-recipe mxfp8", 8, 32, 1, False)
NVFP4 = OperandForm("NVFP4", "--fp4-format e2m1", 4, 16, 1, False)
_RESULT = 2
"""Bytes of an element in DeepGEMM's results."""
_RECIPES = {"blockwise": BLOCKS, "mxfp8": MXFP8}


def form_for(overrides: Values) -> OperandForm | None:
    """Returns the form that Megatron's flags select. Returns None for products in the dtype of the weights, and for
    forms of Transformer Engine that are not planned."""
    if overrides.get("fp4") and overrides.get("fp4_recipe", "nvfp4") == "nvfp4":
        return NVFP4
    if not overrides.get("fp8"):
        return None
    return _RECIPES.get(str(overrides.get("fp8_recipe")))


def has_own_recipe(overrides: Values) -> bool:
    """Returns True if --fp8-recipe is that of a form, with or without --fp8-format."""
    return overrides.get("fp8_recipe") in _RECIPES


def rounded_bytes(c: Config, shape: Shape, tokens: int) -> tuple[float, str]:
    """Returns the bytes of the rounded operands of the largest product in the backward, and the name of their form. The
    bytes are 0 for products in the dtype of the weights.

    The first product of an MLP or of experts is the largest. Its output's gradient is rounded along both axes, its
    input along the columns, and its weight once. The operands of a product are freed before the next product. The rows
    of an expert are padded to whole blocks, and DeepGEMM's result is too, before its rows are copied.
    """
    form = form_for(c.megatron.overrides)
    if form is None:
        return 0.0, ""
    tp, found = c.megatron.tensor_model_parallel_size, [0.0]
    if any(kind.dense for kind in shape.kinds):
        width = shape.first * shape.ffn / tp
        found.append(tokens * (2 * width + shape.hidden) + width * shape.hidden)
    if any(kind.sparse for kind in shape.kinds):
        width = shape.first * shape.expert_ffn / c.megatron.expert_tensor_parallel
        experts = shape.experts / c.megatron.expert_model_parallel_size
        rows = tokens * expert_copies(c, shape) + experts * form.block
        results = rows * shape.hidden * _RESULT if c.kernels.rlk_fp8_products == "deepgemm" else 0
        found.append(
            rows * (2 * width + shape.hidden) + experts * width * shape.hidden + results / form.bytes
        )
    return max(found) * form.bytes, form.name


def kept_weights(c: Config, shape: Shape) -> float:
    """Returns the bytes of the rounded weights that the trainer's own layers keep during the micro-batches of a step:
    each weight of the layers in two forms."""
    form = form_for(c.megatron.overrides)
    if form is None or not form.has_layers:
        return 0.0
    return sum(2 * (part.params - part.ends) for part in rank_params(c, shape)) * form.bits / 8
