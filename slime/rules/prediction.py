"""Defines the rules of multi-token prediction (--enable-mtp-training)."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from slime.models import family_for, read_decoder
from slime.models.decoder import Hf
from slime.plan.stages import virtual_flag
from slime.records.errors import FlagError

if TYPE_CHECKING:
    from slime.config.schema import Config


def _virtual_flag(c: Config, layers: int) -> str | None:
    """Returns the flag of virtual stages, or None. Also None for layers that cannot be divided, which `check_stages`
    reports."""
    with suppress(ValueError):
        return virtual_flag(c.megatron, layers)
    return None


def check_prediction(c: Config, hf_config: Hf) -> None:
    """Raises ValueError for a model without layers that can be trained, or a layout in which they were never
    compared."""
    if not c.algorithm.enable_mtp_training:
        return
    family = family_for(hf_config)
    if family.prediction is None:
        raise FlagError(
            "--enable-mtp-training",
            "be left out for a model whose layers of multi-token prediction are not trained here",
            f"model_type {family.model_type}",
            "an export has a copy of such layers",
        )
    if not read_decoder(hf_config).predictions:
        raise FlagError(
            "--enable-mtp-training",
            "be left out for a model without layers of multi-token prediction",
            "0 such layers in config.json (num_nextn_predict_layers)",
            "leave the flag out",
        )
    if (flag := _virtual_flag(c, len(read_decoder(hf_config).layers))) is not None:
        raise FlagError(
            flag,
            "give each pipeline rank one stage with --enable-mtp-training",
            "several",
            "leave one of them out",
        )
    if c.megatron.overrides.get("transformer_impl") == "transformer_engine":
        raise FlagError(
            "--transformer-impl",
            "be local with --enable-mtp-training",
            "transformer_engine",
            "leave one of them out",
        )
