"""Writes a torch_dist checkpoint from Hugging Face tensors as slime's converter does, with a hand-written mapping."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from safetensors.torch import load_file
from torch import Tensor


def megatron_tensors(hf: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Returns full tensors under Transformer Engine's names, with numbered layers, and experts stacked on their first
    axis."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    size, out = config["head_dim"], {}
    out["embedding.word_embeddings.weight"] = hf["model.embed_tokens.weight"]
    out["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
    if not config["tie_word_embeddings"]:
        out["output_layer.weight"] = hf["lm_head.weight"]
    for i in range(config["num_hidden_layers"]):
        old, new = f"model.layers.{i}.", f"decoder.layers.{i}."
        for kind in ("weight", "bias"):
            if f"{old}self_attn.q_proj.{kind}" not in hf:
                continue
            q, k, v = (hf[f"{old}self_attn.{x}_proj.{kind}"] for x in "qkv")
            rows = []
            for group in range(groups):
                for head in range(group * heads // groups, (group + 1) * heads // groups):
                    rows.append(q[head * size : (head + 1) * size])
                rows.append(k[group * size : (group + 1) * size])
                rows.append(v[group * size : (group + 1) * size])
            out[f"{new}self_attention.linear_qkv.{kind}"] = torch.cat(rows)
        out[f"{new}self_attention.linear_qkv.layer_norm_weight"] = hf[f"{old}input_layernorm.weight"]
        out[f"{new}self_attention.linear_proj.weight"] = hf[f"{old}self_attn.o_proj.weight"]
        for x in "qk":
            if f"{old}self_attn.{x}_norm.weight" in hf:
                out[f"{new}self_attention.{x}_layernorm.weight"] = hf[f"{old}self_attn.{x}_norm.weight"]
        norm = hf[f"{old}post_attention_layernorm.weight"]
        if f"{old}mlp.gate.weight" not in hf:
            out[f"{new}mlp.linear_fc1.layer_norm_weight"] = norm
            out[f"{new}mlp.linear_fc1.weight"] = _both(hf, f"{old}mlp.")
            out[f"{new}mlp.linear_fc2.weight"] = hf[f"{old}mlp.down_proj.weight"]
            continue
        out[f"{new}pre_mlp_layernorm.weight"] = norm
        out[f"{new}mlp.router.weight"] = hf[f"{old}mlp.gate.weight"]
        if (bias := hf.get(f"{old}mlp.gate.e_score_correction_bias")) is not None:
            out[f"{new}mlp.router.expert_bias"] = bias.float()
        if f"{old}mlp.shared_experts.up_proj.weight" in hf:
            out[f"{new}mlp.shared_experts.linear_fc1.weight"] = _both(hf, f"{old}mlp.shared_experts.")
            out[f"{new}mlp.shared_experts.linear_fc2.weight"] = hf[
                f"{old}mlp.shared_experts.down_proj.weight"
            ]
        experts = [f"{old}mlp.experts.{e}." for e in range(hf[f"{old}mlp.gate.weight"].shape[0])]
        out[f"{new}mlp.experts.experts.linear_fc1.weight"] = torch.stack([_both(hf, e) for e in experts])
        downs = [hf[f"{e}down_proj.weight"] for e in experts]
        out[f"{new}mlp.experts.experts.linear_fc2.weight"] = torch.stack(downs)
    return out


def _both(hf: dict[str, Tensor], place: str) -> Tensor:
    return torch.cat([hf[f"{place}gate_proj.weight"], hf[f"{place}up_proj.weight"]])


def stacked(tensors: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Stacks each parameter over the layers into one tensor, as Megatron saves equal layers."""
    out = {name: tensor for name, tensor in tensors.items() if ".layers." not in name}
    for name in tensors:
        if name.startswith("decoder.layers.0."):
            rest = name.removeprefix("decoder.layers.0.")
            of_layers = [tensors[f"decoder.layers.{i}.{rest}"] for i in range(layers)]
            out[f"decoder.layers.{rest}"] = torch.stack(of_layers)
    return out


def write_torch_dist(
    path: Path,
    tensors: dict[str, Tensor],
    *,
    vocab_rows: int | None = None,
    cut: int = 1,
    trained: bool = False,
) -> None:
    """Saves full tensors in `path`, each in `cut` parts along an axis that can be cut. `vocab_rows` adds padding
    rows, which are not zero. `trained` adds an optimizer's tensors and random generators, as a training run saves
    them."""
    path.mkdir(parents=True)
    state: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if vocab_rows and name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            padding = tensor.new_full((vocab_rows - len(tensor), tensor.shape[1]), 7.0)
            tensor = torch.cat([tensor, padding])
        axis = next((a for a, n in enumerate(tensor.shape) if n % cut == 0), 0)
        pieces = tensor.chunk(cut if tensor.shape[axis] % cut == 0 else 1, dim=axis)
        state[name] = [
            ShardedTensor.from_rank_offsets(name, piece.contiguous(), (axis, i, len(pieces)))
            for i, piece in enumerate(pieces)
        ]
        if trained:
            key = f"optimizer.state.exp_avg.{name}"
            state[key] = ShardedTensor.from_rank_offsets(key, torch.zeros_like(tensor, dtype=torch.float32))
    for key in ("decoder.layers.self_attention.linear_qkv._extra_state", "rng_state"):
        state[key] = ShardedObject(key, torch.empty(0, dtype=torch.uint8), (1,), (0,))
    state |= {"args": argparse.Namespace(num_layers=2), "checkpoint_version": 3.0, "iteration": 1}
    dist_checkpointing.save(state, str(path))


def convert(hf_dir: Path, path: Path, *, stack: bool = False, **options: Any) -> dict[str, Tensor]:
    """Runs `write_torch_dist` on a Hugging Face directory and returns its tensors."""
    hf = load_file(hf_dir / "model.safetensors")
    config = json.loads((hf_dir / "config.json").read_text())
    tensors = megatron_tensors(hf, config)
    write_torch_dist(path, stacked(tensors, config["num_hidden_layers"]) if stack else tensors, **options)
    return hf


def release(folder: Path) -> Path:
    """Returns the folder for a release in `folder`, and writes the record next to it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    return folder / "release"
