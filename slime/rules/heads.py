"""Checks the numbers of ranks that can share the heads of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.models import Decoder
from slime.models.decoder import can_exchange_heads
from slime.records.errors import FlagError

if TYPE_CHECKING:
    from slime.config.schema import Config


def check_heads(c: Config, decoder: Decoder) -> None:
    """Raises ValueError if tensor- and context-parallel ranks cannot share the heads of the model, latent ones
    included."""
    tp, cp = c.megatron.tensor_model_parallel_size, c.megatron.context_parallel_size
    _divide(decoder.heads, "num_attention_heads", tp)
    if decoder.output_gate:
        _divide(decoder.groups, "num_key_value_heads of attention with an output gate", tp)
    if decoder.qk_norm == "projection":
        _divide(decoder.groups, "num_key_value_heads that share a norm", tp)
    if c.megatron.cp_comm_type == "a2a" and not can_exchange_heads(decoder, tp, cp):
        raise FlagError(
            "--context-parallel-size",
            f"divide the {decoder.heads // tp} query heads of a tensor-parallel rank, and divide or be a "
            f"multiple of its {max(decoder.groups // tp, 1)} heads of keys and values, with --cp-comm-type a2a",
            cp,
            "use --cp-comm-type all_gather or other sizes",
        )
    if decoder.delta and decoder.delta.keys % (tp * cp):
        keys = decoder.delta.keys
        raise FlagError(
            "--tensor-model-parallel-size x --context-parallel-size",
            f"divide the {keys} linear_num_key_heads",
            f"{tp} x {cp}: {keys} / {tp * cp} = {keys / (tp * cp):.3f}",
            "use fewer ranks",
        )


def _divide(heads: int, what: str, ranks: int) -> None:
    if heads % ranks:
        raise FlagError(
            "--tensor-model-parallel-size",
            f"divide the {heads} {what}",
            f"{ranks}: {heads} / {ranks} = {heads / ranks:.3f}",
            "use fewer ranks",
        )
