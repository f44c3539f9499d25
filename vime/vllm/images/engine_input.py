"""Makes vLLM's input for a prompt with images, from the prompt's ids and the processed images, in the engine's server.

vLLM does not process the images again: the tower gets the pixels that the trainer gets. The positions of the images are
the engine's own: the ids that the engine's configuration names, as many per image as the engine's tower returns. A
prompt with other ids is an error that names the image.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime.checkpoints.hf_config import read_hf_config
from slime.models import read_decoder
from slime.vision.runs import next_run
from vime.vllm.images.wire import WireImage

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.inputs.engine import MultiModalInput
    from vllm.multimodal.inputs import MultiModalKwargsItem, PlaceholderRange
    from vllm.v1.engine.async_llm import AsyncLLM

    from slime.models import Hf


def make_input(engine: AsyncLLM, token_ids: list[int], images: Sequence[WireImage]) -> MultiModalInput:
    """Returns the engine's input for the prompt.

    Raises ValueError for a model without images, for more images than --limit-mm-per-prompt, and for ids that do not
    fit the images.
    """
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalKwargsItems

    processor = engine.renderer.mm_processor
    if processor is None:
        raise ValueError(
            f"the engine's model must take images, got {len(images)} for a text model; set --hf-checkpoint to a "
            "model with a vision tower, or leave --multimodal-keys out"
        )
    config: Any = processor.info.get_hf_config()
    counts = {kind: sum(one.kind == kind for one in images) for kind in {one.kind for one in images}}
    for kind, count in counts.items():
        processor.info.validate_num_items(kind, count)
    items: dict[str, list[MultiModalKwargsItem]] = {kind: [] for kind in counts}
    for number, one in enumerate(images):
        item = _make_item(processor, one, number)
        expected = count_embeddings(config, one.kind, {name: elem.data for name, elem in item.items()})
        if expected != one.tokens:
            raise ValueError(
                f"{one.kind} {number} must have {expected} ids in the prompt, which is what the engine's tower "
                f"returns, got {one.tokens} from {one.path}; use the processor of the engine's checkpoint"
            )
        items[one.kind].append(item)
    return mm_input(
        token_ids,
        MultiModalKwargsItems(items),
        {kind: [one.key for one in images if one.kind == kind] for kind in counts},
        find_placeholders(token_ids, images, media_ids(config), opens_frames=opens_frames(engine, counts)),
    )


def opens_frames(engine: AsyncLLM, kinds: Collection[str]) -> bool:
    """Returns true if each frame of a video has its time and an opening id before it, as for Qwen3-VL. vLLM then finds
    a frame by its opening id, from the beginning of the video's placeholder on."""
    if "video" not in kinds:
        return False
    vision = read_decoder(read_hf_config(engine.model_config.model)).vision
    return vision is not None and vision.frame_times == "texts"


def _make_item(processor: Any, image: WireImage, number: int) -> MultiModalKwargsItem:
    """Returns the processed image in vLLM's form, with the fields that vLLM's class of the model uses."""
    import torch
    from transformers import BatchFeature
    from vllm.multimodal.inputs import MultiModalKwargsItems

    tensors = _read(image)
    if f"{image.kind}_grid_thw" not in tensors:  # the parts of an image, which vLLM's processor counts
        tensors["num_patches"] = torch.tensor([len(tensors["pixel_values"])])
    features = BatchFeature(tensors)
    fields = processor._get_mm_fields_config(features, {})
    found = MultiModalKwargsItems.from_hf_inputs(features, fields).get(image.kind, [])
    if len(found) != 1:
        raise ValueError(
            f"{image.kind} {number} must be one {image.kind} for the engine's model, got {len(found)} from "
            f"{sorted(features)} in {image.path}; use the processor of the engine's checkpoint"
        )
    item: MultiModalKwargsItem = found[0]
    return item


def _read(image: WireImage) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load, load_file

    try:
        return load(image.data) if image.data else load_file(image.path)
    except SafetensorError as error:
        raise ValueError(
            f"a processed {image.kind} must be a file of safetensors, got {image.path}: {error}; remove the file, and "
            "start the run again"
        ) from error


def media_ids(config: Hf | Any) -> dict[str, int]:
    """Returns the token ids of an image's parts and of a video's parts in the engine's configuration, by kind. A kind
    that the model does not have is left out."""
    names = {"image": "image_token_id", "video": "video_token_id"}
    return {kind: found for kind, name in names.items() if (found := getattr(config, name, None)) is not None}


def count_embeddings(config: Any, kind: str, tensors: Mapping[str, Any]) -> int:
    """Returns the number of rows that the tower of the engine's model returns for an image or a video.

    A model with a grid of patches merges squares of patches. Another model returns the same number for each image.
    """
    grid = tensors.get(f"{kind}_grid_thw")
    if grid is not None:
        rows: int = int(grid.prod()) // config.vision_config.spatial_merge_size**2
        return rows
    fixed: int | None = getattr(config, "mm_tokens_per_image", None)
    if fixed is None:
        raise ValueError(
            f"a model with images must have a grid of patches or a fixed number of ids per image, got "
            f"{config.model_type} with {sorted(tensors)}; use a family of `vime models`"
        )
    pixels = tensors["pixel_values"]
    return fixed * (len(pixels) if pixels.ndim == 4 else 1)


def find_placeholders(
    token_ids: Sequence[int],
    images: Sequence[WireImage],
    ids: Mapping[str, int],
    *,
    opens_frames: bool = False,
) -> dict[str, list[PlaceholderRange]]:
    """Returns where each image is in the prompt, by kind.

    `slime.vision.runs` has the rules, which the trainer uses too. Between the frames of a video there may be other ids.
    A model may sample the id of an image; such an id is text. With `opens_frames`, the placeholder of a video has the
    opening id of its first frame.
    """
    import torch
    from vllm.multimodal.inputs import PlaceholderRange

    found: dict[str, list[PlaceholderRange]] = {one.kind: [] for one in images}
    indices = {
        kind: [index for index, token in enumerate(token_ids) if token == ids.get(kind)] for kind in found
    }
    for number, one in enumerate(images):
        own = _own(indices[one.kind], one)
        if len(own) < one.tokens:
            where = "" if one.start is None else f" from id {one.start} on"
            raise ValueError(
                f"{one.kind} {number} of {len(images)} must have {one.tokens} neighbouring ids {ids.get(one.kind)} in "
                f"the prompt{where}, got {len(own)}; make the ids with the processor of the checkpoint ({one.path})"
            )
        first = max(own[0] - 1, 0) if one.kind == "video" and opens_frames else own[0]
        length = own[-1] + 1 - first
        mask = None
        if length > len(own):
            mask = torch.zeros(length, dtype=torch.bool)
            mask[[index - first for index in own]] = True
        found[one.kind].append(PlaceholderRange(first, length, mask))
        indices[one.kind] = [index for index in indices[one.kind] if index > own[-1]]
    return found


def _own(indices: list[int], image: WireImage) -> list[int]:
    """Returns the indices of an image, from the indices of its kind after the images before it. Returns fewer if the
    image does not fit."""
    run = next_run(indices, 0, image.tokens, image.start)
    if run is not None:
        return indices[run : run + image.tokens]
    first = 0 if image.start is None else bisect_left(indices, image.start)
    rest = indices[first : first + image.tokens]
    known = image.start is None or rest[:1] == [image.start]
    return rest if len(rest) < image.tokens or (image.kind == "video" and known) else []
