"""config.json of a Hugging Face checkpoint, read in one place."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any


def read_hf_config(checkpoint: str | Path) -> dict[str, Any]:
    """config.json of a Hugging Face checkpoint directory; ValueError when it is missing or no JSON object."""
    path = Path(checkpoint) / "config.json"
    if not path.is_file():
        what = "check the path"
        if not path.parent.exists() and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(checkpoint)):
            what = f"if that is a name on the Hugging Face hub: hf download {checkpoint} --local-dir {path.parent.name}"
        raise ValueError(f"--hf-checkpoint must be a directory with a config.json, got {checkpoint}; {what}")
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"--hf-checkpoint must hold a valid config.json, got {path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"--hf-checkpoint must hold a JSON object in config.json, got {type(content).__name__}"
        )
    return content


def expert_count(hf_config: dict[str, Any]) -> int:
    """Routed experts of a layer, 0 of a dense model. transformers 5 writes num_local_experts where Qwen's files have
    num_experts."""
    return hf_config.get("num_experts") or hf_config.get("num_local_experts") or 0


def sparse_layers(hf_config: dict[str, Any]) -> tuple[bool, ...]:
    """Whether each layer has experts in place of one MLP: every `decoder_sparse_step`-th, but for `mlp_only_layers`."""
    step, dense = hf_config.get("decoder_sparse_step", 1), hf_config.get("mlp_only_layers") or ()
    experts = expert_count(hf_config) > 0
    return tuple(
        experts and i not in dense and (i + 1) % step == 0 for i in range(hf_config["num_hidden_layers"])
    )


EXPERT_MODELS = ("qwen3_moe",)
"""`model_type` of the models with experts that are trained. (Dense ones: slime.megatron_backend.hf_weights.)"""


def check_experts(hf_config: dict[str, Any]) -> None:
    """ValueError for a model whose experts are not known to be computed as its engine does, or are not told."""
    model_type, experts = str(hf_config.get("model_type")), expert_count(hf_config)
    if experts and model_type not in EXPERT_MODELS:
        raise ValueError(
            f"model_type in config.json must be one of {', '.join(EXPERT_MODELS)} for a model with experts, got "
            f"{model_type} with {experts} experts; others are not supported yet"
        )
    if model_type.endswith("_moe") and not experts:
        raise ValueError(
            f"config.json must give num_experts for model_type {model_type}, got none; the checkpoint is incomplete"
        )


def check_checkpoint_shapes(checkpoint: str | Path, hf_config: dict[str, Any]) -> None:
    """ValueError naming the first tensor whose shape is not the one config.json implies, or layers that are not there.

    Reads safetensors headers only. Judges what every dense decoder has (embedding, MLP, layer count); the trainer and
    the engine compare all tensors when they load them. A checkpoint without safetensors files is left to them.
    """
    from safetensors import safe_open

    hidden, ffn = hf_config.get("hidden_size"), hf_config.get("intermediate_size")
    expected = {
        "embed_tokens.weight": [hf_config.get("vocab_size"), hidden],
        "mlp.gate_proj.weight": [ffn, hidden],
        "mlp.down_proj.weight": [hidden, ffn],
    }
    layers = set()
    files = sorted(Path(checkpoint).glob("*.safetensors"))
    for file in files:
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                layers |= set(re.findall(r"\blayers\.(\d+)\.", name))
                for suffix, shape in expected.items():
                    got = list(tensors.get_slice(name).get_shape()) if name.endswith(suffix) else shape
                    if got != shape:
                        raise ValueError(
                            f"{name} in {file} must have shape {shape}, as config.json says, got {got}; "
                            "the weights and the config of --hf-checkpoint are not of one model"
                        )
    if files and len(layers) != hf_config.get("num_hidden_layers"):
        raise ValueError(
            f"--hf-checkpoint must hold {hf_config.get('num_hidden_layers')} layers, as its config.json says, got "
            f"{len(layers)} in {checkpoint}"
        )
