"""HF safetensors <-> the live Megatron model, through the family's table. Owns reading, writing and gathering.

A tensor of a checkpoint that is missing, unexpected or of the wrong shape is an error that names the tensor. Loading
and export are bitwise inverses if the dtypes agree. Layers of multi-token prediction are loaded and exported if the
model has them. Otherwise, a written directory has a copy of them from the source directory.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from slime.checkpoint_dir import latest, released
from slime.checkpoint_files import WRITE_LATEST
from slime.hf_config import read_config_json
from slime.hf_files import Files, write_shards
from slime.megatron_backend.checkpoint import load_checkpoint
from slime.megatron_backend.model import HiddenGPTModel, last_part, unwrapped
from slime.megatron_backend.torch_dist import load_torch_dist
from slime.models import family_for
from slime.models.family import Tensors
from slime.models.layouts import Row
from slime.room import Room

_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)")
_PREDICTION = re.compile(r"^(mtp\.layers\.)(\d+)")
_EXPERT = re.compile(r"(\.local_experts\.)(\d+)")
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")

Read = Callable[[Tensor], Tensor]


def _live(parameter: Tensor) -> Tensor:
    return parameter.data


_TIED = ("output_layer.weight", "embedding.word_embeddings.weight")
"""A tied head is the embedding. A last stage without the embedding has a copy of it."""


def _named(inner: HiddenGPTModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters in model order. A router's weight is followed by its frozen bias, which is a buffer."""
    for name, parameter in inner.named_parameters():
        yield name, parameter
        path, router, _ = name.rpartition(".router.weight")
        if router and (bias := inner.get_submodule(f"{path}.router").expert_bias) is not None:
            yield f"{path}.router.expert_bias", bias


def _parameters(
    inner: HiddenGPTModel, expert_rank: int | None = None
) -> Iterator[tuple[Tensor, Row, tuple[str, ...]]]:
    """Every tensor of this stage with its row of the family's table and its HF names, in model order. With
    `expert_rank`, experts have their names on that expert-parallel rank."""
    rank, ranks = _rank_and_size(parallel_state.get_expert_model_parallel_group())
    experts_before = (
        (inner.config.num_moe_experts or 0) // ranks * (rank if expert_rank is None else expert_rank)
    )
    family = family_for(inner.hf_config)
    layers = inner.decoder.layers
    before = (
        layers[0].layer_number - 1 if len(layers) else 0
    )  # number of layers of earlier stages; Megatron counts from 1
    for name, parameter in _named(inner):
        if name == _TIED[0] and inner.share_embeddings_and_output_weights:
            name = _TIED[1]
        name = _LAYER.sub(lambda m: f"{m[1]}{int(m[2]) + before}", name)
        if inner.mtp_process:
            name = _PREDICTION.sub(
                lambda m: f"{m[1]}{int(m[2]) + family.first_prediction(inner.hf_config)}", name
            )
        name = _EXPERT.sub(lambda m: f"{m[1]}{int(m[2]) + experts_before}", name)
        yield parameter, *family.find(name)


def stored_tensors(inner: HiddenGPTModel, checkpoint_dir: Path) -> Tensors:
    """The tensors of a checkpoint, as the family's weight table has them."""
    return family_for(inner.hf_config).stored(Files(checkpoint_dir), inner.hf_config)


def _check_names(expected: set[str], found: set[str], inner: HiddenGPTModel, checkpoint_dir: Path) -> None:
    family = family_for(inner.hf_config)
    extra = {name for name in found - expected if not family.ignores(name)}
    if inner.config.mtp_num_layers:
        extra -= family.prediction_copies(found, inner.hf_config).keys()
    else:
        extra -= set(family.prediction_names(found, inner.hf_config))
    if inner.share_embeddings_and_output_weights:
        # Some tied checkpoints store the head again. HF ignores that tensor too.
        extra.discard("lm_head.weight")
    for names, kind in ((expected - found, "missing from"), (extra, "unexpected in")):
        if names:
            listed = ", ".join(sorted(names)[:8]) + (", ..." if len(names) > 8 else "")
            raise ValueError(
                f"the tensors of a checkpoint must match its config.json, got {len(names)} {kind} {checkpoint_dir}: "
                f"{listed}; check model_type, num_hidden_layers and tie_word_embeddings"
            )


def _names_of_all_stages(parts: list[HiddenGPTModel]) -> set[str]:
    """Collective over the pipeline."""
    group = parallel_state.get_pipeline_model_parallel_group()
    stages: list[list[str]] = [[]] * group.size()
    mine = [
        name
        for inner in parts
        for _, _, of_ranks in _with_all_experts(inner)
        for names in of_ranks
        for name in names
    ]
    dist.all_gather_object(stages, mine, group=group)
    return {name for stage in stages for name in stage}


@torch.no_grad()
def load_hf(model: nn.Module, checkpoint_dir: str | Path) -> None:
    """Fill the model's parameters in place from a single-file or sharded safetensors checkpoint. Collective over the
    stages of a pipeline.

    Values are cast to the model's dtype. Vocabulary padding is zero. Each rank keeps its tensor-parallel part. Call it
    before `build_optimizer`, which copies its fp32 main weights from the parameters (or call `reload_model_params`
    later). ValueError with the tensors that are missing, unexpected or of another shape than in config.json.
    """
    parts, checkpoint_dir = unwrapped(model), Path(checkpoint_dir)
    tensors = stored_tensors(parts[0], checkpoint_dir)
    _check_names(_names_of_all_stages(parts), tensors.names(), parts[0], checkpoint_dir)
    for inner in parts:
        _load_part(inner, tensors)


def _load_part(inner: HiddenGPTModel, tensors: Tensors) -> None:
    for parameter, row, names in _parameters(inner):
        rank, size = _rank_and_size(_shard_group(row))
        stored = [tensors.get(name) for name in names]
        for name, part, want in zip(names, stored, _hf_parts(parameter, row, inner), strict=True):
            if part.shape != want.shape:
                raise ValueError(
                    f"{name} must have shape {list(want.shape)} as config.json says, got {list(part.shape)} in "
                    f"{tensors.place(name)}"
                )
        parameter.data.copy_(row.layout.shard(row.layout.join(stored, inner.sizes), rank, size))


def load_weights(model: Any, directory: str, iteration: int | None = None) -> None:
    """Load weights from an HF directory, a Megatron checkpoint or what slime converted. The files in the directory
    decide which. `iteration` is one of a Megatron checkpoint. None: the newest."""
    if iteration is not None or latest(directory) is not None:
        load_checkpoint(directory, model, iteration=iteration, choose=WRITE_LATEST)
    elif (path := released(directory)) is not None:
        load_torch_dist(model, path)
    else:
        load_hf(model, directory)


@torch.no_grad()
def export_hf(model: nn.Module, read: Read = _live) -> Iterator[tuple[str, Tensor]]:
    """All weights under their HF names: full tensors on every rank, in the model's dtype (a router's bias in fp32).

    `read` returns the values of a parameter on any device (slime.megatron_backend.residence). With one rank, the
    tensors stay on that device. Several ranks exchange them on their own devices.

    Collective over tensor- and pipeline-parallel ranks: every rank must exhaust the iterator. A tied head is left out.
    Tensors may share memory with the live parameters, so copy a tensor that is needed after the next optimizer step.
    """
    described = unwrapped(model)[0].hf_config
    yield from family_for(described).written(_export_parts(model, read), described)


def _export_parts(model: nn.Module, read: Read) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the weight table, of all stages."""
    group = parallel_state.get_pipeline_model_parallel_group()
    for inner in unwrapped(model):  # virtual stage by virtual stage: the order of the layers
        if group.size() == 1:
            yield from _export_stage(inner, read)
        else:
            yield from _export_stages(inner, read, group)


def _export_stages(
    inner: HiddenGPTModel, read: Read, group: dist.ProcessGroup
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `inner` of each rank of the pipeline, in rank order."""
    for stage in range(group.size()):
        mine = _export_stage(inner, read) if stage == group.rank() else None
        box = [_shapes_of_stage(inner) if mine else []]
        dist.broadcast_object_list(box, group=group, group_src=stage)
        for name, shape, dtype in box[0]:
            if mine:
                tensor = next(mine)[1].contiguous().to(torch.cuda.current_device())
            else:
                tensor = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())
            dist.broadcast(tensor, group=group, group_src=stage)
            yield name, tensor


def _with_all_experts(
    inner: HiddenGPTModel,
) -> Iterator[tuple[Tensor, Row, list[tuple[str, ...]]]]:
    """Every parameter of this stage with its HF names. An expert's parameter has the names on all expert-parallel
    ranks."""
    _, ranks = _rank_and_size(parallel_state.get_expert_model_parallel_group())
    for of_ranks in zip(*(_parameters(inner, rank) for rank in range(ranks)), strict=True):
        parameter, row, _ = of_ranks[0]
        yield parameter, row, [names for _, _, names in of_ranks[: ranks if row.of_expert else 1]]


def _exported(inner: HiddenGPTModel) -> Iterator[tuple[Tensor, Row, list[tuple[str, ...]]]]:
    """The parameters of this stage, without the copy of the embedding for a tied head."""
    for parameter, row, names in _with_all_experts(inner):
        if not getattr(parameter, "shared", False):  # Megatron's mark of that copy
            yield parameter, row, names


def _export_stage(inner: HiddenGPTModel, read: Read) -> Iterator[tuple[str, Tensor]]:
    """HF names and full tensors of this stage. Collective over tensor- and expert-parallel ranks."""
    for parameter, row, names_of_ranks in _exported(inner):
        full, shards = read(parameter), _shard_group(row)
        if shards.size() > 1 and getattr(parameter, "tensor_model_parallel", False):
            full = row.layout.merge(_gathered(full, shards))
        of_ranks = [full]
        if len(names_of_ranks) > 1:
            of_ranks = _gathered(full, parallel_state.get_expert_model_parallel_group())
        for names, tensor in zip(names_of_ranks, of_ranks, strict=True):
            yield from zip(names, row.layout.split(tensor, inner.sizes), strict=True)


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """The tensors of all ranks of `group`, in rank order."""
    mine = tensor.contiguous().to(torch.cuda.current_device())
    tensors = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(tensors, mine, group=group)
    return tensors


def _shapes_of_stage(inner: HiddenGPTModel) -> list[tuple[str, torch.Size, torch.dtype]]:
    """Names, shapes and dtypes of the tensors of `_export_stage`."""
    return [
        (name, part.shape, part.dtype)
        for parameter, row, names_of_ranks in _exported(inner)
        for names in names_of_ranks
        for name, part in zip(names, _hf_parts(parameter, row, inner), strict=True)
    ]


def _hf_parts(parameter: Tensor, row: Row, inner: HiddenGPTModel) -> list[Tensor]:
    """The HF tensors of a parameter, for their shapes. They come from splitting an empty tensor of the full size."""
    _, size = _rank_and_size(_shard_group(row))
    return row.layout.split(row.layout.merge([parameter.data.to("meta")] * size), inner.sizes)


def save_hf(
    model: nn.Module,
    source_dir: str | Path,
    out_dir: str | Path,
    *,
    max_shard_bytes: int = 5 * 2**30,
    flag: str = "--save-hf",
) -> None:
    """Write an HF directory that transformers loads with the same logits. Collective. Rank 0 writes.

    The tokenizer, other small files and config.json (with the saved dtype) come from `source_dir`. Weights go to
    safetensors files of at most `max_shard_bytes` each (a single tensor may exceed it). The layers of multi-token
    prediction in `source_dir` are copied unchanged if the model has none. config.json is written last, so a directory
    with a config.json is complete. ValueError that names `flag` if the disk has no room.
    """
    source_dir, out_dir = Path(source_dir), Path(out_dir)
    tensors = _with_copies(last_part(model), export_hf(model), source_dir)
    if dist.get_rank() != 0:
        for _ in tensors:
            pass
    else:
        with Room(flag, out_dir, "a Hugging Face checkpoint"):
            out_dir.mkdir(parents=True, exist_ok=True)
            written = read_config_json(source_dir)  # it may be the file that goes away now
            (out_dir / "config.json").unlink(missing_ok=True)
            carried = _prediction_tensors(last_part(model), source_dir)
            write_shards(chain(tensors, carried), out_dir, max_shard_bytes)
            _copy_config(last_part(model), written, source_dir, out_dir)
    dist.barrier()


def _prediction_tensors(inner: HiddenGPTModel, source_dir: Path) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the layers of multi-token prediction in `source_dir`, if the model does not train them. This call
    opens the files, so they may be replaced before the tensors are read."""
    family = family_for(inner.hf_config)
    if inner.config.mtp_num_layers or not family.predicted(inner.hf_config):
        return iter(())
    files = Files(source_dir)
    stored = family.stored(files, inner.hf_config)
    names = family.prediction_names(sorted(stored.names()), inner.hf_config)
    files.open(family.prediction_names(files.names(), inner.hf_config))
    return ((name, stored.get(name)) for name in names)


def _with_copies(
    inner: HiddenGPTModel, tensors: Iterator[tuple[str, Tensor]], source_dir: Path
) -> Iterator[tuple[str, Tensor]]:
    """`tensors`, and where a checkpoint with trained layers of multi-token prediction has embedding or head again in
    them, these copies."""
    copies: dict[str, str] = {}
    if inner.config.mtp_num_layers:
        copies = family_for(inner.hf_config).prediction_copies(Files(source_dir).names(), inner.hf_config)
    for name, tensor in tensors:
        yield name, tensor
        yield from ((copy, tensor.clone()) for copy, source in copies.items() if source == name)


def _copy_config(inner: HiddenGPTModel, written: dict[str, Any], source_dir: Path, out_dir: Path) -> None:
    if source_dir.resolve() != out_dir.resolve():
        for file in source_dir.iterdir():
            if file.is_file() and not file.name.endswith(_NOT_COPIED) and file.name != "config.json":
                shutil.copyfile(file, out_dir / file.name)
    dtype = str(inner.config.params_dtype).removeprefix("torch.")
    for part in (written, written.get("text_config")):
        if part is not None:
            part.pop("quantization_config", None)
            part["torch_dtype" if "torch_dtype" in part else "dtype"] = dtype
    (out_dir / "config.json").write_text(json.dumps(written, indent=2) + "\n")


def _shard_group(row: Row) -> dist.ProcessGroup:
    """The group of ranks that have the shards of a row's parameter."""
    group: dist.ProcessGroup = (
        parallel_state.get_expert_tensor_parallel_group()
        if row.of_expert
        else parallel_state.get_tensor_model_parallel_group()
    )
    return group


def _rank_and_size(group: dist.ProcessGroup) -> tuple[int, int]:
    return group.rank(), group.size()
