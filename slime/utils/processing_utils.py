"""Import path of slime plug-ins: see slime.data.tokenizer and slime.data.processor."""

from slime.data.processor import (
    build_processor_kwargs,
    encode_image_for_rollout_engine,
    load_processor,
    process_vision_info,
)
from slime.data.tokenizer import load_tokenizer

__all__ = [
    "build_processor_kwargs",
    "encode_image_for_rollout_engine",
    "load_processor",
    "load_tokenizer",
    "process_vision_info",
]
