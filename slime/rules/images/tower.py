"""Defines the rules of the vision tower (--multimodal-keys, --train-vision)."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from slime.algo.losses import loss_for
from slime.models import Decoder
from slime.models.vision import sees_images
from slime.plan.stages import build_stages
from slime.records.errors import FlagError

if TYPE_CHECKING:
    from slime.config.schema import Config


def check_tower(c: Config, decoder: Decoder) -> None:
    """Raises ValueError for a model without a tower, and for flags that do not work with images."""
    if not sees_images(c):
        if c.train.train_vision:
            raise FlagError(
                "--train-vision",
                "be given with --multimodal-keys",
                "True alone",
                "name the columns of images, or leave it out",
            )
        return
    if decoder.vision is None:
        raise FlagError(
            "--multimodal-keys",
            "be left out for a model without a vision tower",
            f"keys with {c.rollout.hf_checkpoint}",
            "`vime models` lists the models that see images",
        )
    if c.algorithm.enable_mtp_training:
        raise FlagError(
            "--enable-mtp-training",
            "be left out with --multimodal-keys",
            "True",
            "leave it out, because layers of multi-token prediction do not see images",
        )
    if c.kernels.rlk_bitwise:
        raise FlagError(
            "--rlk-bitwise",
            "be left out with --multimodal-keys",
            "True",
            "leave it out, because a vision tower has no operators with equal bits",
        )
    if c.lora.lora_rank and c.train.train_vision:
        raise FlagError(
            "--train-vision",
            "be left out with --lora-rank",
            "both",
            "adapters train the decoder, and the tower stays frozen",
        )
    _check_layout(c, decoder)


def _check_layout(c: Config, decoder: Decoder) -> None:
    """Raises ValueError if a stage without the tower has layers that get its rows, or if ranks cut an image."""
    assert decoder.vision is not None
    deep, whole = decoder.vision.deepstack, decoder.vision.sees_whole_image
    if (deep or whole) and c.megatron.overrides.get("transformer_impl") == "transformer_engine":
        raise FlagError(
            "--transformer-impl",
            "be local for images of this model",
            "transformer_engine",
            "leave the flag out, because those layers take no rows of the tower, and attend causally",
        )
    first = deep
    with suppress(ValueError):  # `check_stages` reports layers that cannot be divided
        first = len(build_stages(c.megatron, len(decoder.layers)).get_rank_layers(0)[0])
    if first < deep:
        raise FlagError(
            "--pipeline-model-parallel-size",
            f"leave the first {deep} layers on the first stage, because they get rows of the vision tower",
            f"{first} layers there",
            f"lower it, or give the first stage {deep} layers with --decoder-first-pipeline-num-layers",
        )
    if whole and c.megatron.context_parallel_size > 1:
        raise FlagError(
            "--context-parallel-size",
            "be 1 for images of this model, whose tokens see the whole image",
            c.megatron.context_parallel_size,
            "raise --tensor-model-parallel-size instead",
        )
    tokens = decoder.vision.tokens_per_image or 0
    windows = [layer.window for layer in decoder.layers if layer.window is not None]
    if whole and windows and min(windows) < tokens and loss_for(c.algorithm).rewarded:
        raise FlagError(
            "sliding_window in config.json",
            f"be at least mm_tokens_per_image, {tokens}, for engines",
            min(windows),
            "vLLM treats the tokens of larger images as text; use a model whose window holds an image",
        )
