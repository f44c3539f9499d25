"""A tiny Qwen3 with random weights and a tokenizer of bytes, which needs no network."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BYTES, CONTEXT = 256, 4096
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """Writes a fast tokenizer with one token per byte and `SPECIAL`, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: number for number, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        model_max_length=CONTEXT,
    )
    fast.save_pretrained(folder)


def write_tiny_model(folder: Path, *, seed: int = 0, spread: float = 0.1) -> Path:
    """Writes config.json, safetensors and a tokenizer, and returns the folder.

    The model has 2 layers, a hidden size of 64 and 259 ids: one per byte, and `SPECIAL`. `spread` is the standard
    deviation of the weights.
    """
    write_tokenizer(folder)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=BYTES + len(SPECIAL),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=BYTES + SPECIAL.index("<|im_end|>"),
        pad_token_id=BYTES + SPECIAL.index("<|endoftext|>"),
        initializer_range=spread,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    return folder
