"""A tiny random Qwen3 checkpoint with a character tokenizer, and weight files made from it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from slime.protocols import WeightUpdate
from slime.weight_sync.file_channel import FileChannel

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]
CHARACTERS = "0123456789+-*/=().,:; abcdefghijklmnopqrstuvwxyz"
EOS_ID = SPECIAL.index("<|im_end|>")


def make_checkpoint(
    path: Path, *, seed: int = 0, tied: bool = True, layers: int = 2, hidden: int = 64
) -> Path:
    """Write an HF checkpoint (config, safetensors, fast tokenizer) with random weights by `seed`."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token="<unk>"
    )
    fast.save_pretrained(path)
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        eos_token_id=EOS_ID,
        initializer_range=0.2,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(path)
    return path


def publish_checkpoint(checkpoint: Path, directory: Path, version: int, *, checksums: bool) -> WeightUpdate:
    """What a trainer with the weights of `checkpoint` publishes as `version`."""
    state = load_file(checkpoint / "model.safetensors")
    return FileChannel(directory).publish(state.items(), version, checksums=checksums)
