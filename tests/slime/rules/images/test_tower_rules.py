"""Tests the rules of runs with a vision tower: each error has the rule, the value and the remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from architectures import ARCHITECTURES
from vision_architectures import VISION_ARCHITECTURES, WITHOUT_TOWER

from slime.config import Config
from slime.models import Decoder, read_decoder
from slime.rules.images.tower import check_tower

KEYS = {"multimodal_keys": {"image": "images"}}
STAGES = "--pipeline-model-parallel-size must leave the first 3 layers on the first stage, because they get rows of the"


def decoder_for(name: str) -> Decoder:
    row = {**ARCHITECTURES, **VISION_ARCHITECTURES}[name]
    fields = row.config_fields()
    text = fields.get("text_config", {})
    return read_decoder({"model_type": row.family, "hidden_act": "silu", **text, **fields})


@pytest.mark.parametrize(
    ("model", "flags", "message"),
    [
        ("qwen3-4b", KEYS, "--multimodal-keys must be left out for a model without a vision tower"),
        (
            "qwen3-4b",
            {"train_vision": True},
            "--train-vision must be given with --multimodal-keys, got True alone",
        ),
        (
            "qwen3-vl-4b",
            KEYS | {"enable_mtp_training": True},
            "--enable-mtp-training must be left out with --multi",
        ),
        (
            "qwen3-vl-4b",
            KEYS | {"rlk_bitwise": True},
            "--rlk-bitwise must be left out with --multimodal-keys",
        ),
        (
            "qwen3-vl-4b",
            KEYS | {"lora_rank": 8, "train_vision": True},
            "--train-vision must be left out with --lora-rank, got both",
        ),
        (
            "qwen3-vl-4b",
            KEYS | {"overrides": {"transformer_impl": "transformer_engine"}},
            "--transformer-impl must be local for images of this model",
        ),
        (
            "qwen3-vl-4b",
            KEYS | {"pipeline_model_parallel_size": 18},
            f"{STAGES} vision tower, got 2 layers there",
        ),
        (
            "gemma-3-4b",
            KEYS | {"overrides": {"transformer_impl": "transformer_engine"}},
            "--transformer-impl must be local for images .* and attend causally",
        ),
        (
            "gemma-3-4b",
            KEYS | {"context_parallel_size": 2},
            "--context-parallel-size must be 1 for images of this model, whose tokens see the whole image, got 2",
        ),
    ],
)
def test_a_tower_that_cannot_work_is_an_error(model: str, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_tower(Config.from_flat(flags), decoder_for(model))


def test_engines_need_a_window_that_holds_an_image() -> None:
    decoder = decoder_for("gemma-3-4b")
    layers = tuple(replace(layer, window=layer.window and 255) for layer in decoder.layers)
    small = replace(decoder, layers=layers)
    with pytest.raises(
        ValueError, match="sliding_window .* at least mm_tokens_per_image, 256, for engines, got 255"
    ):
        check_tower(Config.from_flat(KEYS), small)
    check_tower(Config.from_flat(KEYS | {"loss_type": "sft_loss"}), small)


@pytest.mark.parametrize("model", sorted(VISION_ARCHITECTURES.keys() - WITHOUT_TOWER))
@pytest.mark.parametrize(
    "flags", [{}, KEYS, KEYS | {"train_vision": True}, KEYS | {"pipeline_model_parallel_size": 4}]
)
def test_other_flags_pass(model: str, flags: dict[str, Any]) -> None:
    check_tower(Config.from_flat(flags), decoder_for(model))


def test_images_for_a_text_model_of_a_checkpoint_with_a_tower() -> None:
    decoder = decoder_for("kimi-k2.5")
    check_tower(Config.from_flat({}), decoder)
    with pytest.raises(
        ValueError, match="--multimodal-keys must be left out for a model without a vision tower"
    ):
        check_tower(Config.from_flat(KEYS), decoder)
