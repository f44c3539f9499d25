"""Converts between PEFT directories and the adapters of the live model, without loss. Owns reading, gathering and
writing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from slime.checkpoints.hf_files import write_tensors
from slime.megatron_backend.checkpoint.gathering import gathered
from slime.megatron_backend.checkpoint.weights import Named, Read, live, over_stages
from slime.megatron_backend.lora.adapters import ExpertAdapter, Slot
from slime.megatron_backend.lora.install import AnyAdapter, find_adapters, find_lora
from slime.megatron_backend.model.gpt import unwrapped
from slime.models.lora import CONFIG_FILE, PEFT_PREFIX, WEIGHTS_FILE
from slime.system.disk_space import DiskSpaceGuard

FOLDER = "adapter"
"""Name of the PEFT directory in the folder of a checkpoint."""


def tensor_names(module: str) -> tuple[str, str]:
    """Returns the names of a module's A and B in a PEFT file."""
    return f"{PEFT_PREFIX}{module}.lora_A.weight", f"{PEFT_PREFIX}{module}.lora_B.weight"


def export_adapters(model: nn.Module, read: Read = live) -> Iterator[Named]:
    """Yields all adapters by PEFT's names: full tensors on every rank, in the model's dtype. Collective over tensor-,
    expert- and pipeline-parallel ranks: every rank must exhaust the iterator. `read` is as in `export_hf`."""
    group = parallel_state.get_pipeline_model_parallel_group()
    for inner in unwrapped(model):
        yield from over_stages(partial(_read_stage, inner, read), partial(_shapes, inner), group)


def _read_stage(inner: object, read: Read) -> Iterator[Named]:
    for _, adapter in find_adapters(inner):
        for slot, *pair in adapter.matrices():
            full = [_full(adapter, parameter, read) for parameter in pair]
            for e, module in enumerate(_modules(adapter, slot)):
                for name, tensor in zip(tensor_names(module), full, strict=True):
                    yield name, tensor[e] if isinstance(adapter, ExpertAdapter) else tensor


def _full(adapter: AnyAdapter, parameter: Any, read: Read) -> Tensor:
    """Returns the matrix over all ranks. For experts, it is the stack over all experts."""
    values = read(parameter)
    if isinstance(adapter, ExpertAdapter):
        group = parallel_state.get_expert_model_parallel_group()
        return torch.cat(gathered(values, group)) if group.size() > 1 else values
    group = parallel_state.get_tensor_model_parallel_group()
    if parameter.axis is None or group.size() == 1:
        return values
    return torch.cat(gathered(values, group), parameter.axis)


def _shapes(inner: object) -> list[tuple[str, torch.Size, torch.dtype]]:
    """Returns names, shapes and dtypes of `_read_stage`."""
    found = []
    for _, adapter in find_adapters(inner):
        for slot, a, b in adapter.matrices():
            rank, sizes = adapter.lora.rank, (slot.inputs, slot.outputs)
            shapes = torch.Size((rank, sizes[0])), torch.Size((sizes[1], rank))
            for module in _modules(adapter, slot):
                names = tensor_names(module)
                found += [(n, s, p.dtype) for n, s, p in zip(names, shapes, (a, b), strict=True)]
    return found


def _modules(adapter: AnyAdapter, slot: Slot) -> list[str]:
    """Returns the Hugging Face modules of a slot: one, or one per expert on all ranks."""
    if not isinstance(adapter, ExpertAdapter):
        return [slot.module]
    ranks = parallel_state.get_expert_model_parallel_world_size()
    return [slot.module.replace("{e}", str(e)) for e in range(ranks * adapter.experts)]


def peft_config(model: nn.Module, base: str) -> dict[str, Any]:
    """Returns adapter_config.json for the model's adapters. Collective over the pipeline."""
    lora = find_lora(unwrapped(model)[0])
    assert lora is not None
    mine = {
        slot.module
        for inner in unwrapped(model)
        for _, x in find_adapters(inner)
        for slot, *_ in x.matrices()
    }
    return lora.peft(base, set().union(*_gather_stages(mine)))


def _gather_stages(mine: set[str]) -> list[set[str]]:
    group = parallel_state.get_pipeline_model_parallel_group()
    stages: list[set[str]] = [set()] * group.size()
    dist.all_gather_object(stages, mine, group=group)
    return stages


def save_peft(
    model: nn.Module, out_dir: str | Path, base: str, *, flag: str = "--save", read: Read = live
) -> None:
    """Writes a directory that `peft` loads over the checkpoint `base` with the same logits. Collective. Rank 0 writes,
    and holds the adapters on the host. Raises ValueError, which names `flag`, if the disk has no room."""
    out_dir, settings = Path(out_dir), peft_config(model, base)
    tensors = {}
    for name, tensor in export_adapters(model, read):
        if dist.get_rank() == 0:
            tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
    if dist.get_rank() == 0:
        with DiskSpaceGuard(flag, out_dir, "an adapter"):
            out_dir.mkdir(parents=True, exist_ok=True)
            write_tensors(tensors, out_dir / WEIGHTS_FILE)
            (out_dir / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    dist.barrier()


@torch.no_grad()
def load_peft(model: nn.Module, directory: str | Path) -> None:
    """Fills the adapters from a PEFT directory. Collective over the stages of a pipeline. Each rank reads its own rows
    or columns. Raises ValueError with missing or unexpected tensors, and tensors of another shape: these belong to an
    adapter of another base."""
    path = Path(directory) / WEIGHTS_FILE
    try:
        with safe_open(path, framework="pt") as file:
            _check_names(model, set(file.keys()), path)
            for adapter in (x for inner in unwrapped(model) for _, x in find_adapters(inner)):
                for slot, a, b in adapter.matrices():
                    _fill(file, adapter, slot, a, b, path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"--lora-load must hold a readable {WEIGHTS_FILE}, got {path}: {error}") from error


def _check_names(model: nn.Module, found: set[str], path: Path) -> None:
    mine = {
        name
        for inner in unwrapped(model)
        for _, adapter in find_adapters(inner)
        for slot, *_ in adapter.matrices()
        for module in _modules(adapter, slot)
        for name in tensor_names(module)
    }
    expected = set().union(*_gather_stages(mine))
    for names, kind in ((expected - found, "missing from"), (found - expected, "unexpected in")):
        if names:
            raise ValueError(
                f"--lora-load must hold the adapters of this model's modules, got {len(names)} tensors {kind} {path}: "
                f"{', '.join(sorted(names)[:4])}; is it an adapter of another base, or are --target-modules others?"
            )


def _fill(file: Any, adapter: AnyAdapter, slot: Slot, a: Tensor, b: Tensor, path: Path) -> None:
    rank = adapter.lora.rank
    if isinstance(adapter, ExpertAdapter):
        first = parallel_state.get_expert_model_parallel_rank() * adapter.experts
        for e in range(adapter.experts):
            names = tensor_names(slot.module.replace("{e}", str(first + e)))
            a[e].copy_(_stored(file, names[0], (rank, slot.inputs), path)[:])
            b[e].copy_(_stored(file, names[1], (slot.outputs, rank), path)[:])
        return
    names = tensor_names(slot.module)
    column = parallel_state.get_tensor_model_parallel_rank() * a.shape[1] if adapter.axis == 1 else 0
    a.copy_(_stored(file, names[0], (rank, slot.inputs), path)[:, column : column + a.shape[1]])
    b.copy_(_stored(file, names[1], (slot.outputs, rank), path)[slot.first : slot.first + slot.rows])


def _stored(file: Any, name: str, shape: tuple[int, int], path: Path) -> Any:
    stored = file.get_slice(name)
    if tuple(stored.get_shape()) != shape:
        raise ValueError(
            f"{name} must have shape {list(shape)} as this model and --lora-rank need, got {stored.get_shape()} in "
            f"{path}; it is an adapter of another base or another rank"
        )
    return stored
