"""Parameters, memory and FLOPs of a vision tower. Imports neither torch nor Megatron.

The first pipeline stage has the whole tower on every tensor-parallel rank. The memory is that of a micro-batch whose
tokens are all image tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from slime.config import Config
from slime.models import read_decoder
from slime.models.decoder import Hf
from slime.models.selection import Selection
from slime.models.vision import PREFIX, Vision, sees_images

CACHE_BYTES = 2**29
"""Host memory per trainer rank for the rows of frozen towers (slime.data.media.tower_cache). A 4B model has 6 MB for an
image of 640 x 480 pixels."""


def run_tower(c: Config, hf: Hf) -> Vision | None:
    """Returns the tower that a run builds. Returns None for a run without images."""
    return read_decoder(hf).vision if hf and sees_images(c) else None


def tower_params(vision: Vision) -> int:
    """Returns the tower's parameters, matrices only."""
    return _block_params(vision) + _projector_params(vision)


def _block_params(vision: Vision) -> int:
    """Returns the parameters that a patch passes through."""
    attention, mlp = 4 * vision.hidden**2, (3 if vision.gated else 2) * vision.hidden * vision.ffn
    return vision.depth * (attention + mlp) + vision.patch_values * vision.hidden


def _projector_params(vision: Vision) -> int:
    """Returns the parameters that a token passes through, which has `merge**2` patches."""
    merged = vision.hidden * vision.merge**2
    if vision.pooled:
        return vision.hidden * vision.out
    return vision.mergers * ((merged**2 if vision.merge > 1 else 0) + merged * vision.out)


def trained_tower_params(selection: Selection, vision: Vision) -> int:
    """Returns the parameters that a run trains: those of the tower, or 0 if its first block is frozen."""
    return tower_params(vision) * selection.trains(PREFIX + vision.block_weight)


def tower_memory(c: Config, vision: Vision, tokens: int, size: int) -> tuple[float, str]:
    """Returns the bytes that stay until the backward of a micro-batch of `tokens` image tokens ends, and the
    arithmetic. `size` is the number of bytes of a value of the model.

    The pixels are in float32. A frozen tower keeps no activations. A trained tower keeps, per block and patch, two norm
    inputs and outputs, queries, keys and values before and after the rotation, the output of the attention, and the
    inputs and outputs of the activation. With full recomputation it keeps the input of each block.
    """
    patches = tokens * vision.merge**2
    pixels = patches * vision.patch_values * 4
    text = f"{patches} patches x {vision.patch_values} x 4 B of pixels"
    if not trained_tower_params(Selection.of(c), vision):
        return pixels, text
    full = c.megatron.overrides.get("recompute_granularity") == "full"
    width = vision.hidden if full else 10 * vision.hidden + (4 if vision.gated else 2) * vision.ffn
    return (
        pixels + patches * vision.depth * width * size,
        f"{text} + {patches} patches x {size} B x {vision.depth} blocks x {width}",
    )


def tower_token_flops(vision: Vision) -> int:
    """Returns the FLOPs of a forward pass per token of an image, in the tower's layers without attention's products."""
    return 2 * (vision.merge**2 * _block_params(vision) + _projector_params(vision))


def _whole_grid(vision: Vision) -> tuple[int, int, int]:
    """Returns the patches of each image of a tower that resizes images to one size."""
    image, patch = (vision.settings[name] for name in ("image_size", "patch_size"))
    assert isinstance(image, int) and isinstance(patch, int)
    return 1, image // patch, image // patch


def tower_flops(vision: Vision, grids: Iterable[tuple[int, ...]]) -> float:
    """Returns the FLOPs of a forward pass over images and videos with `grids` patches (time, height, width). All
    patches of a frame attend to each other; with windows, most layers attend within windows. An empty grid is an image
    of a tower whose images have one size."""
    total = 0.0
    for grid in grids:
        time, height, width = grid or _whole_grid(vision)
        frame = height * width
        near = min(vision.window or frame, frame)
        whole = vision.depth if vision.window is None else vision.whole_layers
        pairs = frame * (whole * frame + (vision.depth - whole) * near)
        products = frame * _block_params(vision) + frame // vision.merge**2 * _projector_params(vision)
        total += time * (2 * products + 4 * vision.hidden * pairs)
    return total
