"""Functions that plug-ins call for images and videos."""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from slime.vision import processor
from slime.vision.images import encode_png, open_image
from slime.vision.sources import read_part_source

if TYPE_CHECKING:
    from transformers import ProcessorMixin

logger = logging.getLogger(__name__)


def load_processor(name_or_path: str, **kwargs: object) -> ProcessorMixin | None:
    """Returns the model's processor, or None for a checkpoint without one. Logs a warning for a processor that cannot
    be loaded. Only `trust_remote_code` is read from `kwargs`."""
    try:
        return processor.load_processor(
            name_or_path, trust_remote_code=bool(kwargs.get("trust_remote_code", False))
        )
    except ValueError as error:
        logger.warning("%s; prompts are text", error)
        return None


def process_vision_info(prompt: object, processor: object) -> dict[str, object]:
    """Returns the images and videos of messages as the arguments `images` and `videos` of a processor. Images are PIL
    images in RGB, which the processor resizes. `processor` is not read."""
    found: dict[str, list[object]] = {"image": [], "video": []}
    for message in prompt if isinstance(prompt, list | tuple) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list | tuple) else ():
            kind, value = read_part_source(part)
            if kind is not None:
                found[kind].append(open_image(value) if kind == "image" else value)
    return {f"{kind}s": values or None for kind, values in found.items()}


def build_processor_kwargs(multimodal_inputs: Mapping[str, object] | None = None) -> dict[str, object]:
    """Returns the arguments of a processor with which ids are lists, and the inputs of the model are tensors."""
    passed = {name: value for name, value in (multimodal_inputs or {}).items() if value is not None}
    forced: dict[str, dict[str, object]] = {
        "text_kwargs": {"return_tensors": None, "return_mm_token_type_ids": False},
        **{f"{kind}_kwargs": {"return_tensors": "pt"} for kind in ("audio", "images", "videos")},
    }
    merged = {name: {**_record(passed.get(name)), **values} for name, values in forced.items()}
    return {**passed, **merged}


def _record(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def encode_image_for_rollout_engine(image: object) -> str:
    """Returns an image as a data URL of a PNG file, for `image_data` of a request to an engine."""
    return f"data:image/png;base64,{base64.b64encode(encode_png(open_image(image))).decode()}"
