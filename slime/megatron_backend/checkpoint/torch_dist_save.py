"""Writes the weights of a model as slime's converter does. torch_dist.py has the names."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.dict_utils import nested_values
from torch import nn

from slime.checkpoints.checkpoint_dir import LATEST, RELEASE, hidden
from slime.megatron_backend.checkpoint.checkpoint_io import DirectSave
from slime.megatron_backend.checkpoint.torch_dist import (
    PLAIN_NORMS,
    make_name,
    numbered,
    placed,
    sharding,
    shards,
)
from slime.megatron_backend.model.gpt import HiddenGPTModel, unwrap
from slime.system.disk_space import DiskSpaceGuard

_STATEFUL = (
    *("self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.core_attention"),
    *("mlp.linear_fc1", "mlp.linear_fc2"),
)
_STATEFUL_NORMS = ("self_attention.q_layernorm", "self_attention.k_layernorm", "pre_mlp_layernorm")
"""Modules of Transformer Engine's layers that also save an `_extra_state`, in addition to those of this project's
layers."""


def save_torch_dist(model: nn.Module, out_dir: Path, hf_checkpoint: str) -> Path:
    """Writes OUT_DIR/release as slime's converter does, with Transformer Engine's names. Returns its path. Collective.

    Layers of dense models are stacked, layers of models with experts are numbered. Raises ValueError if the disk has no
    room.
    """
    inner, flag = unwrap(model), "--output-dir"
    path = out_dir / RELEASE
    partial = hidden(path, "partial")
    with DiskSpaceGuard(flag, out_dir, "a torch_dist checkpoint"):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        state: dict[str, Any] = {"model": _release_state(inner)}
        state |= {"args": _release_args(inner, hf_checkpoint), "checkpoint_version": 3.0, "iteration": 0}
        state["num_floating_point_operations_so_far"] = 0
        content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        writer = DirectSave(flag)
        dist_checkpointing.save(state, str(partial), sharded_strategy=writer, content_metadata=content)
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
        (out_dir / LATEST).write_text(RELEASE, encoding="utf-8")
    return path


def _release_state(inner: HiddenGPTModel) -> dict[str, Any]:
    core = inner.config
    stacked = not core.num_moe_experts
    state: dict[str, Any] = {}
    for number, shard in enumerate(shards(inner)):
        layer, rest = numbered(shard.key)
        sparse = layer is not None and core.num_moe_experts and core.moe_layer_freq[layer]
        if sparse and rest == "mlp.linear_fc1.layer_norm_weight":
            rest = PLAIN_NORMS[rest]
        name = make_name(layer, rest, stacked=stacked)
        state[f"{number}"] = placed(shard, name, layer if stacked else None, core.num_layers)
    for item in _extra_states(inner, stacked=stacked):
        state[item.unique_key] = item
    return state


def _extra_states(inner: HiddenGPTModel, *, stacked: bool) -> Iterator[ShardedObject]:
    """Yields empty `_extra_state` records of Transformer Engine's modules. Megatron refuses a checkpoint that lacks a
    record."""
    core, seen = inner.config, set()
    for item in nested_values(inner.sharded_state_dict(metadata=sharding())):
        if isinstance(item, ShardedObject):
            layer, rest = numbered(item.key)
            seen.add((layer, rest))
            front = stacked and layer is not None
            shape = (core.num_layers,) if front else item.global_shape
            offset = (layer,) if front else item.global_offset
            yield ShardedObject(make_name(layer, rest, stacked=stacked), None, shape, offset)
    for layer in range(core.num_layers):
        for module in (*_STATEFUL, *_STATEFUL_NORMS):
            if (layer, rest := f"{module}._extra_state") not in seen:
                shape, offset = ((core.num_layers,), (layer,)) if stacked else ((1,), (0,))
                yield ShardedObject(make_name(layer, rest, stacked=stacked), None, shape, offset)
    yield ShardedObject("decoder.final_layernorm._extra_state", None, (1,), (0,))


def _release_args(inner: HiddenGPTModel, hf_checkpoint: str) -> argparse.Namespace:
    """Returns the settings that Megatron and slime's tools look up in a checkpoint."""
    core, hf = inner.config, inner.hf_config
    return argparse.Namespace(
        **{name: getattr(core, name) for name in _CORE_ARGS},
        num_experts=core.num_moe_experts,
        add_position_embedding=True,  # Megatron's default, which it compares with its own
        position_embedding_type="rope",
        max_position_embeddings=hf.get("max_position_embeddings"),
        norm_epsilon=core.layernorm_epsilon,
        swiglu=True,
        untie_embeddings_and_output_weights=not inner.share_embeddings_and_output_weights,
        vocab_size=inner.sizes.vocab,
        padded_vocab_size=inner.sizes.padded_vocab,
        hf_checkpoint=hf_checkpoint,
        ckpt_format="torch_dist",
        use_dist_ckpt=True,
        ckpt_fully_parallel_save=False,
        use_distributed_optimizer=False,
        no_save_optim=True,
        no_save_rng=True,
        finetune=True,
    )


_CORE_ARGS = (
    *(
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
    ),
    *("normalization", "qk_layernorm", "add_qkv_bias", "params_dtype", "bf16", "moe_layer_freq"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
    *("moe_ffn_hidden_size", "moe_router_topk"),
)
