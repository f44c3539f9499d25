"""Draws pictures of dots, and makes a tiny Qwen3-VL from its configuration. Nothing is downloaded.

    python examples/vision-tiny/make.py runs/dots

writes to that folder: model/ (0.2 M random parameters, tokenizer, processor), images/, train.jsonl, test.jsonl, and
shuffled.jsonl, the rows of test.jsonl with the images of other rows. The answer to the prompt is the number of dots: 1,
4 or 8. The same seed gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from pathlib import Path

import PIL.Image
import PIL.ImageDraw
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, Qwen3VLConfig

COUNTS = (1, 4, 8)
SIDE, CELL = 32, 8
"""Pixels per side of a picture, and of the square of one dot. A square is a patch of the tower."""
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
WORDS = [*SPECIAL, *string.digits, *string.ascii_lowercase, *string.ascii_uppercase[:15], *" ?\n<>|_"]
"""The vocabulary: special tokens and characters."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def draw(count: int, generator: random.Random) -> PIL.Image.Image:
    """Draws `count` white dots in random squares of a black picture."""
    image = PIL.Image.new("RGB", (SIDE, SIDE), "black")
    pen, columns = PIL.ImageDraw.Draw(image), SIDE // CELL
    for square in generator.sample(range(columns**2), count):
        x, y = square % columns * CELL, square // columns * CELL
        pen.ellipse((x + 1, y + 1, x + CELL - 2, y + CELL - 2), fill="white")
    return image


def write_rows(folder: Path, name: str, rows: int, generator: random.Random) -> list[dict[str, str]]:
    """Draws the pictures of a file of prompts, and writes the file."""
    found = []
    for number in range(rows):
        count = COUNTS[number % len(COUNTS)]
        path = Path("images", f"{name}-{number}.png")
        draw(count, generator).save(folder / path)
        found.append({"prompt": "<image>how many?", "image": str(path), "label": str(count)})
    write_file(folder / f"{name}.jsonl", found)
    return found


def write_file(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_model(folder: Path, seed: int) -> None:
    """Writes the checkpoint with random weights."""
    ids = {word: number for number, word in enumerate(WORDS)}
    kinds = ("image_token", "video_token", "vision_start_token", "vision_end_token")
    words = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    shared = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.05}
    text = {
        **{
            "vocab_size": len(WORDS),
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        },
        **{"head_dim": 32, "max_position_embeddings": 256, "rope_parameters": rope},
        **{"bos_token_id": None, "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]},
    }
    tower = {
        **{"depth": 2, "num_heads": 2, "patch_size": CELL, "num_position_embeddings": 64},
        **{"deepstack_visual_indexes": [0], "out_hidden_size": 64},
    }
    config = Qwen3VLConfig(
        text_config=shared | text,
        vision_config=shared | tower,
        tie_word_embeddings=True,
        dtype="float32",
        **{f"{kind}_id": ids[word] for kind, word in zip(kinds, words, strict=True)},
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(folder)
    write_processor(folder, ids)


def write_processor(folder: Path, ids: dict[str, int]) -> None:
    """Writes the tokenizer, with one token per character, and the settings of the processor."""
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="_"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": list(SPECIAL),
        "model_max_length": 256,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    image = {
        **{"processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessor"},
        **{"patch_size": CELL, "merge_size": 2, "temporal_patch_size": 2},
        "size": {"shortest_edge": SIDE * SIDE, "longest_edge": SIDE * SIDE},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(image, indent=2) + "\n", encoding="utf-8")
    video = {"video_processor_type": "Qwen3VLVideoProcessor"}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw pictures of dots, and make a tiny Qwen3-VL.")
    parser.add_argument("folder", type=Path, help="output folder; files of an earlier call are replaced")
    parser.add_argument("--seed", type=int, default=0, help="decides every byte (default 0)")
    arguments = parser.parse_args(argv)
    folder: Path = arguments.folder
    (folder / "images").mkdir(parents=True, exist_ok=True)
    generator = random.Random(arguments.seed)
    write_rows(folder, "train", 240, generator)
    rows = write_rows(folder, "test", 60, generator)
    images = [row["image"] for row in rows]
    generator.shuffle(images)
    write_file(
        folder / "shuffled.jsonl", [{**row, "image": image} for row, image in zip(rows, images, strict=True)]
    )
    make_model(folder / "model", arguments.seed)
    print(f"{folder}: 240 training and {len(rows)} test prompts, and a model for them")


if __name__ == "__main__":
    main()
