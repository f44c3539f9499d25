"""Converts between HF safetensors and the live Megatron model, through the family's table. Owns reading, writing and
gathering.

A tensor of a checkpoint that is missing, unexpected or of the wrong shape is an error that names the tensor. Loading
and export are bitwise inverses if the dtypes agree. Layers of multi-token prediction and the vision tower are loaded
and exported if the model has them. Otherwise, a written directory has a copy from the source directory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from slime.checkpoints.checkpoint_dir import latest, released
from slime.checkpoints.checkpoint_files import WRITE_LATEST
from slime.checkpoints.hf_config import read_config_json, with_own_quantization
from slime.checkpoints.hf_files import Files, write_shards
from slime.config.sections.checkpoint import HfFormat
from slime.megatron_backend.checkpoint.distributed import load_checkpoint
from slime.megatron_backend.checkpoint.gathering import batch_experts, gather_together, merge_shards
from slime.megatron_backend.checkpoint.live_table import (
    exported,
    hf_parts,
    parameters,
    rank_and_size,
    shard_group,
    with_all_experts,
)
from slime.megatron_backend.checkpoint.torch_dist import load_torch_dist
from slime.megatron_backend.model.gpt import HiddenGPTModel, last_part, unwrapped
from slime.models import family_for
from slime.models.layouts import Row
from slime.models.quantized.quantization import DITHERS
from slime.models.quantized.quantized_checkpoint import StoredForm
from slime.models.slices import Piece, Tensors, pieces
from slime.system.disk_space import DiskSpaceGuard

_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")

MAX_SHARD_BYTES = 2 * 2**30
"""Bytes of a written file, which rank 0 holds in host memory."""

Read = Callable[[Tensor], Tensor]
Named = tuple[str, Tensor]


def live(parameter: Tensor) -> Tensor:
    """Returns the values of a parameter that is on its own device. This is the default `Read`."""
    return parameter.data


def _check_names(expected: set[str], found: set[str], inner: HiddenGPTModel, checkpoint_dir: Path) -> None:
    family = family_for(inner.hf_config)
    extra = {name for name in found - expected if not family.ignores(name)}
    if inner.config.mtp_num_layers:
        extra -= family.prediction_copies(found, inner.hf_config).keys()
    else:
        extra -= set(family.prediction_names(found, inner.hf_config))
    if not inner.has_tower:
        extra -= set(family.tower_names(found, inner.hf_config))
    if inner.share_embeddings_and_output_weights:
        # Some tied checkpoints store the head again. HF ignores that tensor too.
        extra.discard("lm_head.weight")
    if inner.value:
        extra -= set(family.find("output_layer.weight")[1])
    for names, kind in ((expected - found, "missing from"), (extra, "unexpected in")):
        if names:
            listed = ", ".join(sorted(names)[:8]) + (", ..." if len(names) > 8 else "")
            raise ValueError(
                f"the tensors of a checkpoint must match its config.json, got {len(names)} {kind} {checkpoint_dir}: "
                f"{listed}; check model_type, num_hidden_layers and tie_word_embeddings"
            )


def _gather_names(parts: list[HiddenGPTModel]) -> set[str]:
    """Returns all stages' HF names. Collective over the pipeline."""
    group = parallel_state.get_pipeline_model_parallel_group()
    stages: list[list[str]] = [[]] * group.size()
    mine = [
        name
        for inner in parts
        for _, _, of_ranks in with_all_experts(inner)
        for names in of_ranks
        for name in names
    ]
    dist.all_gather_object(stages, mine, group=group)
    return {name for stage in stages for name in stage}


@torch.no_grad()
def load_hf(model: nn.Module, checkpoint_dir: str | Path, *, dithers: bool = False) -> int:
    """Fills the model's parameters in place from a single-file or sharded safetensors checkpoint. Returns the number of
    bytes that were read. Collective over the stages of a pipeline.

    Each rank reads only its tensor-parallel slices, its experts and its layers. It dequantises only the blocks that its
    slices touch. The checkpoint's own config.json names their quantisation. With `dithers`, quantised weights become
    other values that round to the same ones (slime.models.quantized.dither). Host memory beyond the parameters is at
    most one tensor's slices and 64 MiB. Values are cast to the model's dtype. Vocabulary padding is zero. Call it
    before `build_optimizer`, which copies its fp32 main weights from the parameters (or call `reload_weights` later).
    Raises ValueError with the tensors that are missing, unexpected or have another shape than in config.json, or with
    the damaged file.
    """
    parts, files = unwrapped(model), Files(Path(checkpoint_dir))
    described = with_own_quantization(parts[0].hf_config, checkpoint_dir)
    if dithers and (own := described.get("quantization_config")):
        described = {**described, "quantization_config": own | {DITHERS: True}}
    tensors = family_for(described).open(files, described)
    _check_names(_gather_names(parts), tensors.names(), parts[0], Path(checkpoint_dir))
    for inner in parts:
        for parameter, row, names in parameters(inner):
            _fill(parameter, row, names, inner, tensors)
    return files.read_bytes


def _fill(
    parameter: Tensor, row: Row, names: tuple[str, ...], inner: HiddenGPTModel, tensors: Tensors
) -> None:
    """Copies this rank's slices of the HF tensors `names` to `parameter`."""
    shapes = tuple(tuple(part.shape) for part in hf_parts(parameter, row, inner))
    wanted = pieces(row.layout, shapes, inner.sizes, *rank_and_size(shard_group(row)))
    for part in range(len(names)):
        _fill_from(tensors, names[part], shapes[part], [x for x in wanted if x.part == part], parameter, row)
    for padding in (piece for piece in wanted if piece.part is None):
        padding.of(parameter.data).zero_()


def _fill_from(
    tensors: Tensors,
    name: str,
    shape: tuple[int, ...],
    wanted: list[Piece],
    parameter: Tensor,
    row: Row,
) -> None:
    stored = tensors.get(name)
    if tuple(stored.shape) != shape:
        raise ValueError(
            f"{name} must have shape {list(shape)} as in config.json, got {list(stored.shape)} in "
            f"{tensors.find_file(name)}"
        )
    for piece in wanted:
        mine = piece.of(parameter.data)
        mine.copy_(row.layout.columns(stored[piece.where]).reshape(mine.shape))


def load_weights(model: Any, directory: str, iteration: int | None = None, *, dithers: bool = False) -> None:
    """Loads weights from an HF directory, a Megatron checkpoint or a converted checkpoint. The files in the directory
    select the kind. `iteration` selects an iteration of a Megatron checkpoint. None means the newest. `dithers` is as
    in `load_hf`."""
    if iteration is not None or latest(directory) is not None:
        load_checkpoint(directory, model, iteration=iteration, choose=WRITE_LATEST)
    elif (path := released(directory)) is not None:
        load_torch_dist(model, path)
    else:
        load_hf(model, directory, dithers=dithers)


def export_hf(model: nn.Module, read: Read = live) -> Iterator[tuple[str, Tensor]]:
    """Yields all weights under their HF names: full tensors on every rank, in the model's dtype (a router's bias in
    fp32).

    `read` returns the values of a parameter on any device (slime.megatron_backend.step.residence). With one rank, the
    tensors stay on that device. Several ranks exchange them on their own devices.

    Collective over tensor- and pipeline-parallel ranks: every rank must exhaust the iterator. A tied head is left out.
    Tensors may share memory with the live parameters, so copy a tensor that is needed after the next optimizer step.
    """
    described = unwrapped(model)[0].hf_config
    yield from family_for(described).exported(_export_parts(model, read), described)


def _export_parts(model: nn.Module, read: Read) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of the weight table, from all stages."""
    group = parallel_state.get_pipeline_model_parallel_group()
    for inner in unwrapped(model):  # virtual stage by virtual stage, in the order of the layers
        yield from over_stages(partial(_export_stage, inner, read), partial(_read_stage_shapes, inner), group)


def over_stages(
    export: Callable[[], Iterator[Named]],
    shapes: Callable[[], list[tuple[str, torch.Size, torch.dtype]]],
    group: dist.ProcessGroup,
) -> Iterator[Named]:
    """Yields, on all ranks of the pipeline `group`, the tensors that `export` yields on each rank, in rank order.
    `shapes` returns the names, shapes and dtypes of this rank's tensors."""
    if group.size() == 1:
        yield from export()
        return
    for stage in range(group.size()):
        mine = export() if stage == group.rank() else None
        box = [shapes() if mine else []]
        dist.broadcast_object_list(box, group=group, group_src=stage)
        for name, shape, dtype in box[0]:
            if mine:
                tensor = next(mine)[1].contiguous().to(torch.cuda.current_device())
            else:
                tensor = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())
            dist.broadcast(tensor, group=group, group_src=stage)
            yield name, tensor


def _export_stage(inner: HiddenGPTModel, read: Read) -> Iterator[tuple[str, Tensor]]:
    """Yields HF names and full tensors of this stage. Collective over tensor- and expert-parallel ranks."""
    group = parallel_state.get_expert_model_parallel_group()
    for batch in batch_experts(exported(inner), group.size()):
        with torch.no_grad():
            tensors = [merge_shards(read(parameter), parameter, row) for parameter, row, _ in batch]
            gathers = len(batch[0][2]) > 1
            of_ranks = gather_together(tensors, group) if gathers else [(tensor,) for tensor in tensors]
            wholes = [
                [row.layout.split(tensor, inner.sizes) for tensor in found]
                for (_, row, _), found in zip(batch, of_ranks, strict=True)
            ]
        for (_, _, names_of_ranks), parts in zip(batch, wholes, strict=True):
            for names, tensors in zip(names_of_ranks, parts, strict=True):
                yield from zip(names, tensors, strict=True)


def _read_stage_shapes(inner: HiddenGPTModel) -> list[tuple[str, torch.Size, torch.dtype]]:
    """Returns names, shapes and dtypes of the tensors of `_export_stage`."""
    return [
        (name, part.shape, part.dtype)
        for parameter, row, names_of_ranks in exported(inner)
        for names in names_of_ranks
        for name, part in zip(names, hf_parts(parameter, row, inner), strict=True)
    ]


def save_hf(
    model: nn.Module,
    source_dir: str | Path,
    out_dir: str | Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    flag: str = "--save-hf",
    read: Read = live,
    form: HfFormat | None = None,
) -> None:
    """Writes an HF directory that transformers loads with the same logits. Collective. Rank 0 writes. A model with a
    value head becomes a model for sequence classification with one label.

    The tokenizer, other small files and config.json (with the saved dtype) come from `source_dir`. Weights go to
    safetensors files of at most `max_shard_bytes` (a single tensor may exceed this). Rank 0 holds one file in host
    memory; the other ranks hold one tensor beyond their shard. `read` is as in `export_hf`. With the form "checkpoint",
    weights are stored as in `source_dir`: quantised by its scheme, or in its dtypes. The layers of multi-token
    prediction and the vision tower in `source_dir` are copied unchanged if the model lacks them. config.json is written
    last, so a directory with a config.json is complete. Raises ValueError, which names `flag`, if the disk has no
    room.
    """
    source_dir, out_dir = Path(source_dir), Path(out_dir)
    tensors = chain(_with_copies(last_part(model), export_hf(model, read), source_dir), _score(model, read))
    if dist.get_rank() != 0:
        for _ in tensors:
            pass
    else:
        with DiskSpaceGuard(flag, out_dir, "a Hugging Face checkpoint"):
            out_dir.mkdir(parents=True, exist_ok=True)
            written = read_config_json(source_dir)  # the next line may remove this file
            (out_dir / "config.json").unlink(missing_ok=True)
            inner = last_part(model)
            shaped = _in_form(form, inner, tensors, source_dir)
            carried = _carried_tensors(inner, source_dir, raw=form == "checkpoint")
            write_shards(chain(shaped, carried), out_dir, max_shard_bytes)
            _copy_config(inner, written, source_dir, out_dir, form)
    dist.barrier()


def _in_form(
    form: HfFormat | None, inner: HiddenGPTModel, tensors: Iterator[Named], source_dir: Path
) -> Iterator[Named]:
    """Yields `tensors` in `form`. This call opens the files of `source_dir`, so they may be replaced before the tensors
    are read."""
    if form is None:
        return tensors
    if form == "checkpoint":
        family = family_for(inner.hf_config)
        stored = StoredForm(family.renamed(Files(source_dir)), family.scheme(inner.hf_config))
        return (part for name, tensor in tensors for part in stored.convert(name, tensor).items())
    own = inner.config.params_dtype
    return ((n, t.to(torch.bfloat16) if t.dtype == own else t) for n, t in tensors)


def _score(model: nn.Module, read: Read) -> Iterator[tuple[str, Tensor]]:
    """Yields the value head of the last stage, if the model has one, under transformers' name. Collective over the
    stages."""
    inner = last_part(model)
    if not inner.value:
        return
    group = parallel_state.get_pipeline_model_parallel_group()
    head = getattr(inner, "value_head", None)
    device = torch.device(torch.cuda.current_device())
    weight = torch.empty(1, inner.config.hidden_size, dtype=inner.config.params_dtype, device=device)
    if head is not None:
        weight = read(head.weight).to(device)
    if group.size() > 1:
        dist.broadcast(weight, group=group, group_src=group.size() - 1)
    yield "score.weight", weight


def _carried_tensors(inner: HiddenGPTModel, source_dir: Path, *, raw: bool) -> Iterator[tuple[str, Tensor]]:
    """Returns the tensors in `source_dir` of the parts that the model does not build: layers of multi-token prediction
    and the vision tower. This call opens the files, so they may be replaced before the tensors are read. With `raw`,
    the tensors are as the files store them."""
    hf, family = inner.hf_config, family_for(inner.hf_config)

    def carried(names: set[str]) -> list[str]:
        predicting = [] if inner.config.mtp_num_layers else family.prediction_names(names, hf)
        return sorted(predicting + ([] if inner.has_tower else family.tower_names(names, hf)))

    files = Files(source_dir)
    stored = family.renamed(files) if raw else family.open(files, hf)
    names = carried(stored.names())
    files.open(carried(files.names()))
    return ((name, stored.get(name)[...]) for name in names)


def _with_copies(
    inner: HiddenGPTModel, tensors: Iterator[tuple[str, Tensor]], source_dir: Path
) -> Iterator[tuple[str, Tensor]]:
    """Yields `tensors`, and their copies: a checkpoint with trained layers of multi-token prediction may repeat
    embedding or head in these layers."""
    copies: dict[str, str] = {}
    if inner.config.mtp_num_layers:
        copies = family_for(inner.hf_config).prediction_copies(Files(source_dir).names(), inner.hf_config)
    for name, tensor in tensors:
        yield name, tensor
        yield from ((copy, tensor.clone()) for copy, source in copies.items() if source == name)


def _copy_config(
    inner: HiddenGPTModel, written: dict[str, Any], source_dir: Path, out_dir: Path, form: HfFormat | None
) -> None:
    if source_dir.resolve() != out_dir.resolve():
        for file in source_dir.iterdir():
            if file.is_file() and not file.name.endswith(_NOT_COPIED) and file.name != "config.json":
                shutil.copyfile(file, out_dir / file.name)
    dtype = "bfloat16" if form == "bf16" else str(inner.config.params_dtype).removeprefix("torch.")
    for part in (written, written.get("text_config")):
        if part is not None and form != "checkpoint":
            part.pop("quantization_config", None)
            part["torch_dtype" if "torch_dtype" in part else "dtype"] = dtype
    if inner.value:
        names = [
            name.replace("ForCausalLM", "ForSequenceClassification")
            for name in written.get("architectures") or []
        ]
        written |= {"architectures": names, "id2label": {"0": "REWARD"}, "label2id": {"REWARD": 0}}
    (out_dir / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
