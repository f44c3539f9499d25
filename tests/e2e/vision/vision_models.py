"""Makes tiny models with a vision tower from their configurations, and computes log-probs with transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from slime.models import FAMILIES
from slime.vision.inputs import ImageInputs

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
FIRST_SPECIAL, VOCABULARY = 256, 320
IDS = {name: FIRST_SPECIAL + number for number, name in enumerate(SPECIAL)}
TWIN = VOCABULARY - 1
"""An id with the embedding of the image's id: transformers computes a sampled image id like any text as this id."""
PATCH = 4
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": IDS["<|im_end|>"],
    "pad_token_id": IDS["<|endoftext|>"],
    "initializer_range": 0.1,
}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "initializer_range": 0.2,
}
_QWEN3_TOWER = {"depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}


def _rope(sections: list[int], **more: object) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections, **more}


_QWEN3 = {"head_dim": 32, "rope_parameters": _rope([6, 5, 5], mrope_interleaved=True)}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
_HYBRID = {
    **{"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 32},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "rms_norm_eps": 1e-4},
    "rope_parameters": _rope([2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.25),
}
"""vLLM's CPU kernels of gated delta nets need heads of 128."""
_WINDOW, _IMAGE_TOKENS = 16, 9
_GEMMA3 = {
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": _WINDOW,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}
_SIGLIP = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "image_size": 6 * PATCH,
    "patch_size": PATCH,
    "vision_use_head": False,
}
KINDS: dict[str, tuple[dict[str, object], dict[str, object], str]] = {
    "gemma3": (_GEMMA3, _SIGLIP, "Gemma3Processor"),
    "qwen2_5_vl": (
        {"rope_parameters": _rope([4, 6, 6])},
        {"depth": 2, "window_size": 4 * PATCH, "fullatt_block_indexes": [1]},
        "Qwen2_5_VLProcessor",
    ),
    "qwen3_vl": (_QWEN3, _QWEN3_TOWER, "Qwen3VLProcessor"),
    "qwen3_vl_moe": (_QWEN3 | _EXPERTS, _QWEN3_TOWER, "Qwen3VLProcessor"),
    "qwen3_5": (_HYBRID, {"depth": 2, "num_position_embeddings": 64}, "Qwen3VLProcessor"),
}
"""Model type -> settings of the text model and of the tower that differ from the others', and the processor."""


def make_vision_model(
    folder: Path, kind: str = "qwen2_5_vl", *, seed: int = 0, dtype: str = "float32"
) -> PreTrainedModel:
    """Writes a checkpoint with random weights, tokenizer and processor. Returns transformers' model."""
    text, tower, processor = KINDS[kind]
    tokens = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    if kind == "gemma3":
        names = ("image_token_index", "", "boi_token_index", "eoi_token_index")
    ids = {name: IDS[token] for name, token in zip(names, tokens, strict=True) if name}
    config = AutoConfig.for_model(
        kind,
        text_config=_TEXT | text,
        vision_config=tower if kind == "gemma3" else _TOWER | tower,
        tie_word_embeddings=True,
        dtype=dtype,
        **(ids | ({"mm_tokens_per_image": _IMAGE_TOKENS} if kind == "gemma3" else {})),
    )
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config).to(getattr(torch, dtype))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # biases are zeros and norms are ones, which hides errors
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.1)
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        embeddings[TWIN] = embeddings[IDS["<|image_pad|>"]]
    model.save_pretrained(folder)
    if kind == "qwen3_vl_moe":
        _transpose_experts(folder / "model.safetensors")
    _save_tokenizer(folder)
    if kind == "gemma3":
        _save_gemma3_parts(folder)
        return model.eval()
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": processor,
        "patch_size": PATCH,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 4 * PATCH * PATCH, "longest_edge": 64 * 64},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return model.eval()


def _transpose_experts(file: Path) -> None:
    """Stores the matrices of the experts as published checkpoints do: rows are inputs."""
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})


def _save_gemma3_parts(folder: Path) -> None:
    """Writes the processor of a Gemma 3, gives the tokenizer its names, and names the tower as published files do."""
    tensors = load_file(folder / "model.safetensors")
    named = {FAMILIES["gemma3"].table_name(name): tensor for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "tokenizer_config.json").read_text())
    names = ("boi_token", "eoi_token", "image_token")
    tokens = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
    config["extra_special_tokens"] = dict(zip(names, tokens, strict=True))
    del config["additional_special_tokens"]
    config["chat_template"] = TEMPLATE.replace("<|image_pad|><|vision_end|>", "")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    size = {"height": 6 * PATCH, "width": 6 * PATCH}
    settings = {"image_processor_type": "Gemma3ImageProcessor", "size": size}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    processor = {"processor_class": "Gemma3Processor", "image_seq_length": _IMAGE_TOKENS}
    (folder / "processor_config.json").write_text(json.dumps(processor))


def _save_tokenizer(folder: Path) -> None:
    """Writes a tokenizer with one token per byte, then the special tokens."""
    words = sorted(pre_tokenizers.ByteLevel.alphabet()) + list(SPECIAL)
    words += ["\n" * count for count in range(1, 5)]  # vLLM's Gemma 3 looks them up when it starts
    words += [f"Ġw{number}" for number in range(VOCABULARY - len(words))]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": list(SPECIAL),
        "model_max_length": 1024,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def log_probs(
    model: PreTrainedModel, tokens: list[int], images: ImageInputs | None, sampled: Sequence[int] = ()
) -> torch.Tensor:
    """Returns the log-prob of every token but the first, given the tokens before it, with transformers. `sampled` are
    the indices of image ids that are text."""
    ids = torch.tensor([tokens])
    ids[0, list(sampled)] = TWIN
    more = {}
    if images is not None:
        tensors = images.tensors()
        kinds = torch.zeros_like(ids)
        kinds[ids == IDS["<|image_pad|>"]] = 1
        kinds[ids == IDS["<|video_pad|>"]] = 2
        name = "token_type_ids" if model.config.model_type == "gemma3" else "mm_token_type_ids"
        more = {**tensors, name: kinds}
    with torch.no_grad():
        logits = model(input_ids=ids, **more).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
