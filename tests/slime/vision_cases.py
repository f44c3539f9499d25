"""Provides tiny processors, made from their settings, and drawn images for the tests of images."""

from __future__ import annotations

import io
import json
from pathlib import Path

import PIL.Image
import PIL.ImageDraw
from rollout_double import make_tokenizer
from tokenizers import AddedToken

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}IMAGE{% elif part.type == 'video' %}VIDEO{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN_IMAGE, _QWEN_VIDEO = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))
_QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_GEMMA = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
_SMALL = {"size": {"shortest_edge": 28 * 28, "longest_edge": 56 * 84}}

PROCESSORS = ("qwen2_5_vl", "qwen3_vl", "gemma3")


def write_processor(folder: Path, kind: str = "qwen2_5_vl") -> str:
    """Writes tokenizer, processor settings and config.json of a tiny model, and returns the folder. An image of at most
    56 x 84 pixels keeps its size in a Qwen model."""
    folder.mkdir(exist_ok=True)
    gemma = kind == "gemma3"
    template = TEMPLATE.replace("IMAGE", "<start_of_image>" if gemma else _QWEN_IMAGE)
    tokenizer = make_tokenizer(template.replace("VIDEO", _QWEN_VIDEO))
    tokenizer.add_special_tokens(
        {
            "additional_special_tokens": [
                AddedToken(name, normalized=False) for name in (_GEMMA if gemma else _QWEN)
            ]
        }
    )
    settings: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if gemma:
        names = ("boi_token", "eoi_token", "image_token")
        tokenizer = _with_names(tokenizer, dict(zip(names, _GEMMA, strict=True)))
    tokenizer.save_pretrained(folder)
    patch = {"patch_size": 16 if kind == "qwen3_vl" else 14, "merge_size": 2}
    settings = {"image_processor_type": "Qwen2VLImageProcessor", **patch, **_SMALL}
    if gemma:
        settings = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 28, "width": 28}}
        processor = {"processor_class": "Gemma3Processor", "image_seq_length": 4}
        (folder / "processor_config.json").write_text(json.dumps(processor))
    else:
        video = "Qwen3VLVideoProcessor" if kind == "qwen3_vl" else "Qwen2VLVideoProcessor"
        (folder / "video_preprocessor_config.json").write_text(json.dumps({"video_processor_type": video}))
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return str(folder)


def _with_names(tokenizer: object, names: dict[str, str]) -> object:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token="<|im_end|>",
        chat_template=tokenizer.chat_template,
        extra_special_tokens=names,
    )


def draw_image(size: tuple[int, int] = (56, 56), color: object = "red", mode: str = "RGB") -> PIL.Image.Image:
    """Draws a disk on white."""
    image = PIL.Image.new("RGB", size, "white")
    PIL.ImageDraw.Draw(image).ellipse((1, 1, size[0] - 2, size[1] - 2), fill=color)
    return image.convert(mode)


def encode_image(image: PIL.Image.Image, kind: str = "PNG", **options: object) -> bytes:
    """Returns the image's file in the format `kind`."""
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()
