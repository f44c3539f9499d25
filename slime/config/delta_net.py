"""Layouts of ranks for models with gated delta net layers and gated attention: which numbers must divide the heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.models import Decoder

if TYPE_CHECKING:
    from slime.config.schema import Config


def check_delta_heads(c: Config, decoder: Decoder) -> None:
    """ValueError if tensor- and context-parallel ranks cannot share the heads of the model."""
    tp, cp = c.megatron.tensor_model_parallel_size, c.megatron.context_parallel_size
    if decoder.output_gate and decoder.groups % tp:
        raise ValueError(
            f"--tensor-model-parallel-size must divide the {decoder.groups} num_key_value_heads of attention with an "
            f"output gate, got {tp}: {decoder.groups} / {tp} = {decoder.groups / tp:.3f}; use fewer ranks"
        )
    if decoder.delta and decoder.delta.keys % (tp * cp):
        keys = decoder.delta.keys
        raise ValueError(
            f"--tensor-model-parallel-size x --context-parallel-size must divide the {keys} linear_num_key_heads, got "
            f"{tp} x {cp}: {keys} / {tp * cp} = {keys / (tp * cp):.3f}; use fewer ranks"
        )
