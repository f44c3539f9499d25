"""Reads the weights of checkpoints of slime's converter and of Megatron's own training loop (torch_dist).

Such a checkpoint has the parameter names of Transformer Engine's layers. Megatron's sharded state of this project's
model has the same names except for the rules in this file, which are valid for every model family:

    our name                                             name in the checkpoint
    decoder.layers.{i}.REST                              decoder.layers.REST, stacked on a new first axis, or the same
    ...self_attention.linear_qkv.layer_norm_weight       the same, or ...input_layernorm.weight
    ...mlp.linear_fc1.layer_norm_weight                  the same, or ...pre_mlp_layernorm.weight (layers with experts)

The number of rows of the padded vocabulary may differ. Optimizer, random generators, `_extra_state` and multi-token
prediction are not read. slime.megatron_backend.checkpoint.torch_dist_save writes such checkpoints.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.dist_checkpointing.strategies.torch import mcore_to_pyt_state_dict
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from slime.bridges.megatron_versions import COMMON
from slime.checkpoints.checkpoint_dir import COMPLETE
from slime.megatron_backend.checkpoint.checkpoint_io import unreadable
from slime.megatron_backend.checkpoint.safe_reading import COMMON_FILE, MetadataReader, SafePlanner
from slime.megatron_backend.model.gpt import HiddenGPTModel, unwrapped
from slime.megatron_backend.model.value_head import PARAMETER as VALUE_HEAD
from slime.models.lora import PREFIX as ADAPTERS
from slime.models.vision import PREFIX as VISION

PLAIN_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Name of a norm that is fused into the next product -> its name as a separate module."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_PREDICTION = re.compile(r"mtp\.layers\.\d+\.transformer_layer\.")
_NOT_READ = re.compile(r"(chained_\d+\.)?optimizer\.|.*\._extra_state")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Names:
    """The tensor names of a checkpoint. `stacked`: one tensor has a parameter for all layers, [L, ...]."""

    stored: dict[str, TensorStorageMetadata]
    layers: int

    @property
    def stacked(self) -> bool:
        """Returns whether the layers are stacked. Megatron numbers all layers or none."""
        return any(name.startswith("decoder.layers.") and not _LAYER.match(name) for name in self.stored)

    def locate_shard(self, shard: ShardedTensor) -> ShardedTensor:
        """Returns the shard of this project's state under the checkpoint's name and at its position there. Shares the
        shard's memory."""
        layer, rest = numbered(shard.key)
        start = match[0] if (match := _PREDICTION.match(rest)) else ""
        plain = PLAIN_NORMS.get(rest.removeprefix(start))
        names = [
            make_name(layer, name, stacked=self.stacked) for name in (rest, plain and start + plain) if name
        ]
        name = next((name for name in names if name in self.stored), names[0])
        return placed(shard, name, layer if self.stacked else None, self.layers)


def numbered(key: str) -> tuple[int | None, str]:
    match = _LAYER.fullmatch(key)
    return (int(match[1]), match[2]) if match else (None, key)


def make_name(layer: int | None, rest: str, *, stacked: bool) -> str:
    if layer is None:
        return rest
    return f"decoder.layers.{rest}" if stacked else f"decoder.layers.{layer}.{rest}"


def placed(shard: ShardedTensor, name: str, layer: int | None, layers: int) -> ShardedTensor:
    """Returns `shard` as a part of the tensor `name`, with a first axis of `layers` if `layer` is given."""
    front = () if layer is None else (layers,)
    assert shard.data is not None and shard.axis_fragmentations is not None
    ones = (1,) * (shard.prepend_axis_num + len(front))
    data = shard.data.detach().view(*ones, *shard.data.shape)
    return ShardedTensor(
        name,
        data,
        data.dtype,
        local_shape=tuple(data.shape),
        global_shape=(*front, *shard.global_shape),
        global_offset=(*(() if layer is None else (layer,)), *shard.global_offset),
        axis_fragmentations=(*front, *shard.axis_fragmentations),
        replica_id=shard.replica_id,
        allow_shape_mismatch=shard.allow_shape_mismatch,  # Megatron marks the rows of the vocabulary
    )


def sharding() -> dict[str, Any]:
    """Returns the metadata for Megatron's `sharded_state_dict`: layers are numbered, and `dp_cp_group` has the
    replicas."""
    return {
        "non_homogeneous_layers": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def shards(inner: HiddenGPTModel) -> list[ShardedTensor]:
    """Returns every tensor of this rank except adapters, as parts that share the live parameters' memory. Gate and up
    are two parts."""
    state = inner.sharded_state_dict(metadata=sharding())
    apply_factories(state)
    tensors = (item for item in nested_values(state) if isinstance(item, ShardedTensor))
    return [item for item in tensors if not item.key.startswith(ADAPTERS)]


def is_foreign(path: Path) -> bool:
    """Returns whether slime or Megatron saved the iteration `path`. Returns False also if this cannot be determined."""
    file = path / COMMON_FILE
    try:
        if not file.exists():  # this project's checkpoints always have it
            return any(
                name.startswith(COMMON) for name in MetadataReader(path).read_metadata().state_dict_metadata
            )
        if torch.serialization.get_unsafe_globals_in_checkpoint(file):
            return True  # Megatron saves its argparse.Namespace
        saved = torch.load(file, map_location="cpu", weights_only=True)  # ok: no code is loaded
        return "shape" not in saved
    except Exception:  # border: damaged files raise any error
        return False  # this project's reader names the damaged file


@torch.no_grad()
def load_torch_dist(model: nn.Module, path: Path) -> None:
    """Fills the model's parameters in place from the checkpoint in the folder `path`. Collective over the pipeline.

    Each rank reads its own parts, for any layout of ranks that wrote them. Beyond the parameters, it needs memory only
    for the largest stored part. Values are cast to the model's dtype. Vocabulary padding is zero. Raises ValueError
    with all tensors that are missing, unexpected, or differ from config.json in shape or kind, or with the damaged
    file.
    """
    StoredParts(model, path).read()


class StoredParts:
    """The parameters of a model as parts of the tensors of the checkpoint in the folder `path`. See
    `load_torch_dist`."""

    def __init__(self, model: nn.Module, path: Path) -> None:
        models = unwrapped(model)
        self._inner, self._path = models[0], path
        with _explained(path):
            kind = json.loads((path / COMPLETE).read_text(encoding="utf-8")).get("sharded_backend")
            self._reader = MetadataReader(path)
            metadata = self._reader.read_metadata()
        if kind != "torch_dist":
            raise ValueError(
                f"{path / COMPLETE} must name the format torch_dist, got {kind}; save with --ckpt-format torch_dist"
            )
        stored = {
            name: tensor
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
            and not _NOT_READ.match(name)
            and (self._inner.config.mtp_num_layers or not name.startswith("mtp."))
            and (self._inner.has_tower or not name.startswith(VISION))
        }
        names = _Names(stored, self._inner.config.num_layers)
        self._of: dict[int, list[ShardedTensor]] = {}  # by the memory that parts share with a parameter
        self._parts = [
            names.locate_shard(shard)
            for inner in models
            for shard in shards(inner)
            if shard.key != VALUE_HEAD
            or VALUE_HEAD in stored  # a policy's checkpoint leaves a new value head as it is
        ]
        by_name: dict[str, list[ShardedTensor]] = {}
        for part in self._parts:
            by_name.setdefault(part.key, []).append(part)
        _check(by_name, stored, self._inner, path)

    def read(self) -> None:
        """Fills all parameters."""
        self._read(self._parts)

    def take(self, parameter: Tensor) -> Tensor:
        """Fills one parameter and returns its values. Call it once per parameter: this object then drops the memory."""
        if not self._of:
            for part in self._parts:
                self._of.setdefault(_get_address(part.data), []).append(part)
            self._parts = []
        self._read(self._of.pop(_get_address(parameter)))
        return parameter.data

    def _read(self, wanted: list[ShardedTensor]) -> None:
        parts: dict[str, list[ShardedTensor]] = {}
        for part in wanted:
            parts.setdefault(part.key, []).append(part)
        whole = [part for of_name in parts.values() for part in of_name if not part.allow_shape_mismatch]
        padded = {name: of_name[0] for name, of_name in parts.items() if of_name[0].allow_shape_mismatch}
        with _explained(self._path):
            dcp.load(
                mcore_to_pyt_state_dict(dict(parts), is_loading=True),
                storage_reader=self._reader,
                planner=SafePlanner(
                    shapes_validation_sharded_tensors=whole, allow_shape_mismatch_sharded_tensors=padded
                ),
                no_dist=True,  # a rank's plan needs no data from other ranks
            )
        for part in padded.values():
            part.data[max(0, self._inner.sizes.vocab - part.global_offset[0]) :].zero_()


def _get_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _check(
    parts: dict[str, list[ShardedTensor]],
    stored: dict[str, TensorStorageMetadata],
    inner: HiddenGPTModel,
    path: Path,
) -> None:
    """Raises ValueError unless names, shapes and dtypes agree. Collective over the pipeline."""
    problems = [
        found for name, of_name in parts.items() for found in _problems(of_name[0], stored.get(name), inner)
    ]
    group = parallel_state.get_pipeline_model_parallel_group()
    of_stages: list[tuple[list[str], list[str]]] = [([], [])] * group.size()
    dist.all_gather_object(of_stages, (list(parts), problems), group=group)
    extra = set(stored) - {name for names, _ in of_stages for name in names}
    if inner.share_embeddings_and_output_weights or inner.value:
        extra.discard("output_layer.weight")
    found = [problem for _, of_stage in of_stages for problem in of_stage]
    found = list(dict.fromkeys(found)) + [f"{name} is unexpected" for name in sorted(extra)]
    if found:
        listed = ", ".join(found[:8]) + (", ..." if len(found) > 8 else "")
        raise ValueError(
            f"the tensors of {path} must match config.json of --hf-checkpoint, got {len(found)} that do not: {listed}; "
            "name the checkpoint that was converted from this model"
        )


def _problems(
    part: ShardedTensor, stored: TensorStorageMetadata | None, inner: HiddenGPTModel
) -> Iterator[str]:
    if stored is None:
        yield f"{part.key} is missing"
        return
    shape, wanted = list(stored.size), list(part.global_shape)
    if part.allow_shape_mismatch:
        enough = shape[0] >= inner.sizes.vocab and shape[1:] == wanted[1:]
        wanted[0] = inner.sizes.vocab
    else:
        enough = shape == wanted
    if not enough:
        yield f"{part.key} has shape {shape} instead of {wanted}"
    if stored.properties.dtype not in _DTYPES:
        yield f"{part.key} has dtype {stored.properties.dtype}"


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Replaces torch's errors in the block by a ValueError with the damaged file."""
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch's CheckpointException is a BaseException
        if isinstance(error, torch.OutOfMemoryError):
            raise
        found = unreadable(path, (COMPLETE, ".metadata"))
        if found is None:
            raise
        text = f"{found}; restore the file from a copy, or convert the model again"
        raise ValueError(text) from error
