"""Functions that plug-ins call for images, video and audio. Prompts are text only, so each call with media is an
error."""

from __future__ import annotations

from typing import NoReturn

_TEXT_ONLY = "images, video and audio are not supported yet; leave them out of the messages"


def load_processor(name_or_path: str, **kwargs: object) -> None:
    """Returns None, as slime does for a checkpoint without a processor. Code that loads a processor then uses text."""


def process_vision_info(prompt: object, processor: object) -> NoReturn:
    """Raises ValueError, because prompts are text only."""
    raise ValueError(f"prompts must be text only, got a call of process_vision_info; {_TEXT_ONLY}")


def build_processor_kwargs(multimodal_inputs: dict[str, object] | None = None) -> NoReturn:
    """Raises ValueError, because prompts are text only."""
    raise ValueError(f"prompts must be text only, got a call of build_processor_kwargs; {_TEXT_ONLY}")


def encode_image_for_rollout_engine(image: object) -> NoReturn:
    """Raises ValueError, because prompts are text only."""
    raise ValueError(f"prompts must be text only, got an image; {_TEXT_ONLY}")
