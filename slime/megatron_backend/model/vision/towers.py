"""Builds the vision towers. A tower is transformers' own module, so its weights have the names of the files.

    inputs of a micro-batch's images -> tower -> features, which replace the embeddings of image tokens

Shapes: N patches of all images, F rows of features (one per image token of the distinct images), H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from slime.megatron_backend.model.vision.attention import register_frame_attention
from slime.models.vision import Vision

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class TowerOutput:
    """The output of a tower. `rows` [F, H] replace embeddings, and `deep` [F, H] are added to the outputs of the first
    decoder layers."""

    rows: Tensor
    deep: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class TowerKind:
    """A kind of towers."""

    build: Callable[[Vision], PreTrainedModel | PooledTower]
    """Returns the tower with uninitialised parameters in float32."""
    run: Callable[[nn.Module, Mapping[str, Tensor]], TowerOutput]
    """Computes the output from the tensors of the model's processor."""
    smallest: Callable[[Vision], dict[str, Tensor]]
    """Returns the inputs of the smallest image, with zeros as pixels."""


def build_tower(vision: Vision, dtype: torch.dtype, *, recompute: bool = False) -> nn.Module:
    """Returns the tower with uninitialised parameters in `dtype`. Its frequencies stay in float32. With `recompute`, a
    training pass keeps only the inputs of the tower's blocks."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        tower = TOWERS[vision.kind].build(vision)
    for parameter in tower.parameters():
        parameter.data = parameter.data.to(dtype)
    if recompute:
        tower.gradient_checkpointing_enable({"use_reentrant": False})
    module: nn.Module = tower  # transformers' own `to` has no types
    return module.to(torch.cuda.current_device())


def run_tower(vision: Vision, tower: nn.Module, inputs: Mapping[str, Tensor]) -> TowerOutput:
    """Returns the tower's output for the images of a micro-batch."""
    return TOWERS[vision.kind].run(tower, inputs)


def make_one_image(vision: Vision, device: int) -> dict[str, Tensor]:
    """Returns the tower's inputs for the smallest image, with zeros as pixels."""
    return {name: tensor.to(device) for name, tensor in TOWERS[vision.kind].smallest(vision).items()}


def _build_qwen2_5_vl(vision: Vision) -> PreTrainedModel:
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as made_by

    return _from_settings(
        made_by.Qwen2_5_VisionTransformerPretrainedModel, made_by.Qwen2_5_VLVisionConfig, vision
    )


def _build_qwen3_vl(vision: Vision) -> PreTrainedModel:
    from transformers.models.qwen3_vl import modeling_qwen3_vl as made_by

    return _from_settings(made_by.Qwen3VLVisionModel, made_by.Qwen3VLVisionConfig, vision)


def _build_qwen3_vl_moe(vision: Vision) -> PreTrainedModel:
    from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe as made_by

    return _from_settings(made_by.Qwen3VLMoeVisionModel, made_by.Qwen3VLMoeVisionConfig, vision)


def _build_qwen3_5(vision: Vision) -> PreTrainedModel:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as made_by

    return _from_settings(made_by.Qwen3_5VisionModel, made_by.Qwen3_5VisionConfig, vision)


def _build_qwen3_5_moe(vision: Vision) -> PreTrainedModel:
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as made_by

    return _from_settings(made_by.Qwen3_5MoeVisionModel, made_by.Qwen3_5MoeVisionConfig, vision)


def _from_settings(tower: Any, config: Any, vision: Vision) -> PreTrainedModel:
    """Returns transformers' `tower` for the record in config.json."""
    built: PreTrainedModel = tower._from_config(config(**vision.settings))
    # not an argument of `_from_config`, which looks for a package of flash attention then
    built.config._attn_implementation = register_frame_attention()
    return built


def _run_qwen(tower: nn.Module, inputs: Mapping[str, Tensor]) -> TowerOutput:
    """Runs a tower whose images have grids. Images and videos are one sequence of patches for it."""
    weight = next(tower.parameters())
    found = [name for name in ("pixel_values", "pixel_values_videos") if name in inputs]
    pixels = torch.cat([inputs[name].to(weight.dtype) for name in found])
    grids = torch.cat([inputs[name] for name in ("image_grid_thw", "video_grid_thw") if name in inputs])
    output = tower(pixels, grid_thw=grids)
    return TowerOutput(output.pooler_output, tuple(getattr(output, "deepstack_features", ())))


def _smallest_qwen(vision: Vision) -> dict[str, Tensor]:
    side = vision.merge
    return {
        "pixel_values": torch.zeros(side * side, vision.patch_values),
        "image_grid_thw": torch.tensor([[1, side, side]]),
    }


class PooledTower(nn.Module):
    """SigLIP and the projector of Gemma 3, which averages squares of patches. The names are those of transformers'
    model."""

    def __init__(self, vision: Vision) -> None:
        from transformers.models.gemma3 import modeling_gemma3 as made_by
        from transformers.models.siglip import modeling_siglip as siglip

        super().__init__()
        # the head pools an image to one vector, which Gemma does not use
        tower = siglip.SiglipVisionConfig(**{**vision.settings, "vision_use_head": False})
        text = {"hidden_size": vision.out, "num_attention_heads": 1}
        whole = made_by.Gemma3Config(
            text_config=text, vision_config=tower, mm_tokens_per_image=vision.tokens_per_image
        )
        self.vision_tower = siglip.SiglipVisionModel._from_config(tower)
        self.multi_modal_projector = made_by.Gemma3MultiModalProjector(whole)

    def gradient_checkpointing_enable(self, settings: dict[str, object]) -> None:
        self.vision_tower.gradient_checkpointing_enable(settings)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Maps images [n, channels, height, width] to rows [n * tokens per image, H]."""
        rows: Tensor = self.multi_modal_projector(self.vision_tower(pixel_values).last_hidden_state)
        return rows.flatten(0, 1)


def _run_pooled(tower: nn.Module, inputs: Mapping[str, Tensor]) -> TowerOutput:
    """Runs a tower whose images have one size."""
    return TowerOutput(tower(inputs["pixel_values"].to(next(tower.parameters()).dtype)))


def _smallest_pooled(vision: Vision) -> dict[str, Tensor]:
    channels, size = vision.settings.get("num_channels") or 3, vision.settings["image_size"]
    assert isinstance(channels, int) and isinstance(size, int)
    return {"pixel_values": torch.zeros(1, channels, size, size)}


_QWEN = {
    "qwen2_5_vl": _build_qwen2_5_vl,
    "qwen3_vl": _build_qwen3_vl,
    "qwen3_vl_moe": _build_qwen3_vl_moe,
    "qwen3_5": _build_qwen3_5,
    "qwen3_5_moe": _build_qwen3_5_moe,
}
TOWERS: dict[str, TowerKind] = {
    **{kind: TowerKind(build, _run_qwen, _smallest_qwen) for kind, build in _QWEN.items()},
    "gemma3": TowerKind(PooledTower, _run_pooled, _smallest_pooled),
}
"""Maps `Vision.kind` to the kind of towers."""
