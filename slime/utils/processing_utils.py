"""Import path of slime plug-ins: see slime.data.tokenizer and slime.plug_ins.media."""

from slime.data.tokenizer import load_tokenizer
from slime.plug_ins.media import (
    build_processor_kwargs,
    encode_image_for_rollout_engine,
    load_processor,
    process_vision_info,
)

__all__ = [
    "build_processor_kwargs",
    "encode_image_for_rollout_engine",
    "load_processor",
    "load_tokenizer",
    "process_vision_info",
]
