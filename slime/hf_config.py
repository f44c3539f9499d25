"""Reads config.json of a Hugging Face checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slime.checkpoint_dir import HF_INDEX
from slime.hub import is_hub_name


def read_hf_config(checkpoint: str | Path) -> dict[str, Any]:
    """config.json of a Hugging Face checkpoint directory. ValueError if it is missing or not a JSON object."""
    path = Path(checkpoint) / "config.json"
    if not path.is_file():
        what = "check the path"
        if is_hub_name(str(checkpoint)):
            what = f"if that is a name on the Hugging Face hub: hf download {checkpoint} (vime train does so by itself)"
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
    """Number of routed experts per layer, 0 for a dense model. Qwen's files have num_experts, transformers 5 writes
    num_local_experts instead, and GLM's files have n_routed_experts."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((hf_config[key] for key in keys if hf_config.get(key)), 0)


def sparse_layers(hf_config: dict[str, Any]) -> tuple[bool, ...]:
    """Whether each layer has experts in place of one MLP: every `decoder_sparse_step`-th layer, except
    `mlp_only_layers` and the first `first_k_dense_replace` layers."""
    step, dense = hf_config.get("decoder_sparse_step", 1), hf_config.get("mlp_only_layers") or ()
    first = hf_config.get("first_k_dense_replace", 0)
    experts = expert_count(hf_config) > 0
    return tuple(
        experts and i >= first and i not in dense and (i + 1) % step == 0
        for i in range(hf_config["num_hidden_layers"])
    )


def shared_expert_width(hf_config: dict[str, Any]) -> int:
    """Width of the shared expert of a sparse layer, or 0 without one. Every token goes through it. The
    `n_shared_experts` of a layer are one MLP that is as wide as all of them together."""
    width: int = (hf_config.get("n_shared_experts") or 0) * hf_config.get("moe_intermediate_size", 0)
    return width


def prediction_layers(hf_config: dict[str, Any]) -> range:
    """Numbers, in a checkpoint, of the layers of multi-token prediction, which follow the last decoder layer.

    A token's log-prob does not depend on them. The trainer does not build them, and an engine builds them only if it
    speculates.
    """
    depth = hf_config["num_hidden_layers"]
    return range(depth, depth + (hf_config.get("num_nextn_predict_layers") or 0))


def prediction_names(names: Iterable[str], hf_config: dict[str, Any]) -> list[str]:
    """The tensor names in `names` that belong to the checkpoint's `prediction_layers`."""
    prefixes = tuple(f"model.layers.{number}." for number in prediction_layers(hf_config))
    return [name for name in names if name.startswith(prefixes)]


def sigmoid_scores(hf_config: dict[str, Any]) -> bool:
    """True if a router scores each expert by a sigmoid and adds a correction bias. False if it uses a softmax."""
    return hf_config.get("model_type") == "glm4_moe"


EXPERT_MODELS = ("qwen3_moe", "glm4_moe")
"""`model_type` of the supported models with experts. (Dense models: slime.megatron_backend.hf_weights.)"""


def check_experts(hf_config: dict[str, Any]) -> None:
    """ValueError if the model's experts are not supported, or config.json does not give their number."""
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


def open_weights(file: Path, framework: str) -> Any:
    """`safetensors.safe_open`. ValueError with the file if it is missing, cut off or not a safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework=framework)
    except (SafetensorError, OSError) as error:
        got = f"{file.stat().st_size} bytes: {error}" if file.is_file() else "no such file"
        raise ValueError(
            f"{file} must be a whole safetensors file, got {got}; download or copy the checkpoint again"
        ) from error


def read_index(checkpoint: Path) -> dict[str, str] | None:
    """HF tensor name -> name of its file, from the index of a checkpoint in several files. None without an index."""
    if not (index := checkpoint / HF_INDEX).is_file():
        return None
    try:
        weight_map: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{index} must hold a valid weight_map, got {error!r}; download or copy the checkpoint again"
        ) from error
    return weight_map


def check_checkpoint_shapes(checkpoint: str | Path, hf_config: dict[str, Any]) -> None:
    """ValueError for the first file that is missing or cut off, for the first tensor whose shape does not match
    config.json, or for missing layers.

    Reads safetensors headers only. Checks the parts that every dense decoder has (embedding, MLP, number of layers).
    The trainer and the engine compare all tensors when they load them. A checkpoint without safetensors files is not
    checked here.
    """
    hidden, ffn = hf_config.get("hidden_size"), hf_config.get("intermediate_size")
    expected = {
        "embed_tokens.weight": [hf_config.get("vocab_size"), hidden],
        "mlp.gate_proj.weight": [ffn, hidden],
        "mlp.down_proj.weight": [hidden, ffn],
    }
    layers = set()
    folder = Path(checkpoint)
    files = set(folder.glob("*.safetensors"))
    if files:  # `vime plan` also works with the JSON files alone
        files |= {folder / name for name in (read_index(folder) or {}).values()}
    for file in sorted(files):
        with open_weights(file, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                layers |= set(re.findall(r"\blayers\.(\d+)\.", name))
                for suffix, shape in expected.items():
                    got = list(tensors.get_slice(name).get_shape()) if name.endswith(suffix) else shape
                    if got != shape:
                        raise ValueError(
                            f"{name} in {file} must have shape {shape}, as config.json says, got {got}; "
                            "the weights and the config of --hf-checkpoint are not of one model"
                        )
    if "num_hidden_layers" in hf_config:
        layers -= {str(number) for number in prediction_layers(hf_config)}
    if files and len(layers) != hf_config.get("num_hidden_layers"):
        raise ValueError(
            f"--hf-checkpoint must hold {hf_config.get('num_hidden_layers')} layers, as its config.json says, got "
            f"{len(layers)} in {checkpoint}"
        )
