"""Megatron distributed checkpoints: model, optimizer, schedule, random generators and a record of the caller.

Layout (Megatron's own): DIR/iter_0000010/ and DIR/latest_checkpointed_iteration.txt. A checkpoint is written under a
temporary name, renamed when complete, and only then recorded as the latest. So the latest checkpoint always loads, even
if the process is killed. Tensors have global shapes, so another layout of ranks (tensor, context, data or pipeline
parallel) can load them.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor, nn

from slime.checkpoints.checkpoint_dir import COMPLETE, LATEST, existing, hidden, iteration_path, latest
from slime.megatron_backend.checkpoint.adapter_records import check_record, filter_state, make_base_record
from slime.megatron_backend.checkpoint.background import BackgroundSaves
from slime.megatron_backend.checkpoint.checkpoint_io import DirectSave, explained_reading, verify
from slime.megatron_backend.checkpoint.random_state import rng_object, rng_state, set_rng_state
from slime.megatron_backend.checkpoint.safe_reading import MetadataReader, read_common
from slime.megatron_backend.checkpoint.torch_dist import (
    StoredParts,
    is_foreign,
    load_torch_dist,
    sharding,
)
from slime.megatron_backend.model.gpt import HiddenGPTModel, unwrapped
from slime.megatron_backend.model.optimizer import fuse_adam, reload_weights
from slime.megatron_backend.model.value_head import PARAMETER as VALUE_HEAD
from slime.system.disk_space import DiskSpaceGuard

logger = logging.getLogger(__name__)

_OPTIMIZER = "optimizer."
"""Prefix of the optimizer's tensors. A distributed optimizer gathers its state in new tensors on the host."""

_SHAPE = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
    "moe_intermediate_size",
    "num_experts_per_tok",
    "norm_topk_prob",
    "routed_scaling_factor",
)


def save_checkpoint(
    directory: str | Path,
    iteration: int,
    model: nn.Module,
    optimizer: MegatronOptimizer | None = None,
    scheduler: OptimizerParamScheduler | None = None,
    *,
    extra: dict[str, Any] | None = None,
    flag: str = "--save",
    background: BackgroundSaves | None = None,
    published: Callable[[], None] | None = None,
    write_more: Callable[[Path], None] | None = None,
) -> Path:
    """Writes a checkpoint, makes it the latest and returns its path. Collective over all ranks.

    With `background`, the values are copied, and a thread writes the files and makes the checkpoint the latest;
    `BackgroundSaves.wait` then raises the errors. Rank 0 calls `published` when the checkpoint is the latest. Without
    `optimizer` (--no-save-optim), the next run starts with new moments and main weights. `extra` is a record of plain
    values that `load_checkpoint` returns; rank 0's record is saved. For a model with adapters, only the trained part
    is saved. `write_more` writes more files into the checkpoint's folder. Raises ValueError, which names `flag`, if the
    disk has no room. Earlier checkpoints are then untouched, and the written files are removed.
    """
    path = iteration_path(Path(directory), iteration)
    partial = hidden(path, "partial")
    parts = unwrapped(model)
    group = None if background is None else background.group
    fresh = _OPTIMIZER if optimizer is not None and _is_distributed(optimizer) else None
    writer = DirectSave(flag, group, fresh)
    try:
        with DiskSpaceGuard(flag, directory, f"checkpoint {iteration}"):
            _make(partial)
            state = _sharded_state(parts, optimizer, is_loading=False)
            state |= _records(parts[0], scheduler, optimizer is not None)
            state |= {"iteration": iteration, "extra": extra or {}}
            dist_checkpointing.save(state, str(partial), sharded_strategy=writer)
            if write_more is not None:
                write_more(partial)
    except BaseException:
        _remove(partial)
        raise

    def finish() -> None:
        try:
            with DiskSpaceGuard(flag, directory, f"checkpoint {iteration}"):
                writer.finish(partial)
                if dist.get_rank() == 0:
                    _publish(partial, path)
                    _write_text(path.parent / LATEST, str(iteration))
                    if published is not None:
                        published()
                dist.barrier(group=group)
        finally:
            _remove(partial)

    finish() if background is None else background.start(finish)
    return path


def _records(
    inner: HiddenGPTModel, scheduler: OptimizerParamScheduler | None, has_optimizer: bool
) -> dict[str, Any]:
    """Returns the records of a checkpoint in addition to its tensors."""
    return {
        "shape": _shape(inner),
        "lora": make_base_record(inner),
        "ranks": _ranks(),
        "scheduler": scheduler.state_dict() if scheduler else None,
        "has_optimizer": has_optimizer,
        "rng": rng_object(rng_state()),
    }


def _remove(partial: Path) -> None:
    """Removes the files of a failed save."""
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)


def _is_distributed(optimizer: MegatronOptimizer) -> bool:
    return all(isinstance(part, DistributedOptimizer) for part in optimizer.chained_optimizers)


def _make(partial: Path) -> None:
    """Creates the folder of a new checkpoint, and removes the files of killed saves. Collective."""
    if dist.get_rank() == 0:
        for left in partial.parent.glob(hidden(Path("iter_*"), "partial").name):
            shutil.rmtree(left)
        partial.mkdir(parents=True)
    dist.barrier()


def _publish(partial: Path, path: Path) -> None:
    old = hidden(path, "old")
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    partial.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _write_text(path: Path, text: str) -> None:
    staged = hidden(path, "partial")
    staged.write_text(text, encoding="utf-8")
    os.replace(staged, path)


@torch.no_grad()
def stored_parts(
    directory: str | Path, model: nn.Module, *, iteration: int | None = None, choose: str = "--ckpt-step {}"
) -> StoredParts:
    """Returns the weights of a checkpoint for reading by parameter. Checks and errors are those of
    `load_checkpoint`."""
    iteration, path = _complete(Path(directory), iteration)
    if not is_foreign(path):
        verify(Path(directory), iteration, choose)
        with explained_reading(Path(directory), iteration, choose):
            common = read_common(path)
        _check_shape(common["shape"], _shape(unwrapped(model)[0]), path)
    return StoredParts(model, path)


def load_checkpoint(
    directory: str | Path,
    model: nn.Module,
    optimizer: MegatronOptimizer | None = None,
    scheduler: OptimizerParamScheduler | None = None,
    *,
    iteration: int | None = None,
    choose: str = "--ckpt-step {}",
    optim: bool = True,
    rng: bool = True,
    adapters: bool = False,
) -> dict[str, Any]:
    """Loads the latest checkpoint under `directory`, or checkpoint `iteration`, in place. Returns its `extra`.

    Collective over all ranks. Settings such as learning rate and decay stay as the optimizer and scheduler were built.
    The checkpoint supplies moments, step counts and the position in the schedule. On the same layout of ranks, training
    continues bitwise, with the random generators. On another layout, the generators keep their seeds. Raises ValueError
    if the checkpoint is missing, damaged, or belongs to a model of another shape. `choose` is the way to name an
    iteration; the error for a damaged iteration names an older undamaged one. From a checkpoint that slime or Megatron
    saved, only weights and iteration are loaded. With `adapters`, the checkpoint has adapters, and the base is already
    loaded; otherwise it has whole weights, and adapters of the model stay as they are. Without `optim`, optimizer and
    schedule start anew; without `rng`, the random generators stay as they are.
    """
    directory = Path(directory)
    iteration, path = _complete(directory, iteration)
    if is_foreign(path):
        return _load_foreign(path, iteration, model, optimizer)
    verify(directory, iteration, choose)
    parts = unwrapped(model)
    with explained_reading(directory, iteration, choose):
        common = read_common(path)
    _check_shape(common["shape"], _shape(parts[0]), path)
    check_record(common.get("lora"), make_base_record(parts[0]) if adapters else None, path)
    if not optim:
        scheduler = None
    elif optimizer is not None and not common["has_optimizer"]:
        logger.warning(
            "%s holds no optimizer (--no-save-optim): moments and step counts start from zero", path
        )
    loads_optimizer = optim and optimizer is not None and common["has_optimizer"]
    same_ranks = rng and common["ranks"] == _ranks()
    wanted = _sharded_state(parts, optimizer if loads_optimizer else None, is_loading=True, adapters=adapters)
    if same_ranks:
        wanted["rng"] = rng_object(None)
    with explained_reading(directory, iteration, choose):
        new = _new_heads(wanted, path)
        state = dist_checkpointing.load(wanted, str(path), TorchDistLoadShardedStrategy())
    for i, inner in enumerate(parts):
        values = state[_part(i)] | new.get(_part(i), {})
        inner.load_state_dict(values, strict=make_base_record(inner) is None)  # its base or its adapters
    if loads_optimizer:
        _load_optimizer(optimizer, state["optimizer"])
    elif optimizer is not None:
        reload_weights(optimizer)
    if scheduler is not None and common["scheduler"] is not None:
        scheduler.load_state_dict(common["scheduler"])
    if same_ranks:
        set_rng_state(state["rng"])
    extra: dict[str, Any] = common["extra"]
    return extra


def _complete(directory: Path, iteration: int | None) -> tuple[int, Path]:
    """Returns the iteration to load (None: the latest) and its folder. Raises ValueError if it is not complete."""
    iteration = latest(directory) if iteration is None else iteration
    if iteration is None:
        raise ValueError(
            f"--load must hold {LATEST}, got {directory} without it; nothing was ever saved there"
        )
    path = existing(directory, iteration)
    if not (path / COMPLETE).is_file():
        raise ValueError(f"iteration {iteration} must be a complete checkpoint, but {path} is not one")
    return iteration, path


def _load_foreign(
    path: Path, iteration: int, model: nn.Module, optimizer: MegatronOptimizer | None
) -> dict[str, Any]:
    """Loads weights of an iteration that slime or Megatron saved. Its optimizer depends on its layout of ranks."""
    load_torch_dist(model, path)
    if optimizer is not None:
        reload_weights(optimizer)
        if dist.get_rank() == 0:
            logger.warning(
                "%s was saved by slime or Megatron: its weights are taken. Moments, step counts, the learning rate "
                "schedule and the random generators start anew",
                path,
            )
    return {"rollout_id": iteration}


def _sharded_state(
    parts: list[HiddenGPTModel],
    optimizer: MegatronOptimizer | None,
    *,
    is_loading: bool,
    adapters: bool = True,
) -> dict[str, Any]:
    """Returns the state. For a model with adapters: the trained part if `adapters`, otherwise only the base."""
    metadata = sharding() | {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
    }
    models = {
        _part(i): filter_state(inner, inner.sharded_state_dict(metadata=metadata), adapters)
        for i, inner in enumerate(parts)
    }
    state: dict[str, Any] = dict(models)
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=metadata)
    return state


def _new_heads(wanted: dict[str, Any], path: Path) -> dict[str, dict[str, Tensor]]:
    """Removes the value head from `wanted` if the checkpoint is a policy's and has no head. Returns its live values by
    part of the model; they stay."""
    having = [key for key, part in wanted.items() if key.startswith("model") and VALUE_HEAD in part]
    if not having or VALUE_HEAD in MetadataReader(path).read_metadata().state_dict_metadata:
        return {}
    return {key: {VALUE_HEAD: wanted[key].pop(VALUE_HEAD).data} for key in having}


def _part(number: int) -> str:
    """Returns the key of a part of the model in a rank's state. Tensors are named after their layers, with any key."""
    return f"model{number or ''}"


def _load_optimizer(optimizer: MegatronOptimizer, state: dict[Any, Any]) -> None:
    """Loads moments, main weights and step counts from `state`. Other settings of the groups stay as they were built.

    Experts that are split over ranks have a separate optimizer. Then `state` has a numbered record per optimizer. The
    step count is not sharded, so it is loaded as it was saved.
    """
    settings = [
        {k: v for k, v in group.items() if k not in ("params", "step")} for group in optimizer.param_groups
    ]
    parts = optimizer.chained_optimizers
    other_count = len({isinstance(key, int) for key in state}) > 1  # records of both kinds: saved and wanted
    states = [state] if len(parts) == 1 else [state[i] for i in range(len(parts))]
    for part, of_part in zip(parts, states, strict=True):
        if isinstance(part, DistributedOptimizer):
            _load_distributed(part, of_part["param_state"], _saved_step(state))
        elif other_count:
            raise ValueError(
                "--expert-model-parallel-size must be above 1 where it was when the optimizer of --load was saved, and "
                f"only there, got {len(parts)} optimizers a rank; use that layout or --no-load-optim. The state of "
                "Adam with --use-distributed-optimizer fits any layout"
            )
        else:
            part.load_state_dict(of_part)
    for group, setting in zip(optimizer.param_groups, settings, strict=True):
        group.update(setting)
    fuse_adam(optimizer)


def _saved_step(state: dict[Any, Any]) -> float:
    """Returns the number of optimizer steps. All groups of a distributed optimizer's state have the same count."""
    part = state if "optimizer" in state else state[0]
    step: float = part["optimizer"]["param_groups"][0]["step"]
    return step


def _load_distributed(optimizer: DistributedOptimizer, tensors: dict[str, Any], step: float) -> None:
    """Loads a distributed optimizer in two parts, because of torch's step count per parameter.

    megatron-core looks for this count among the tensors of the reshardable format. That format has no count,
    because Megatron's own fused optimizers count per group. megatron-core also gives all parameters one shared tensor
    as their count.
    """
    own = optimizer.state_dict()
    for group in own["optimizer"]["param_groups"]:
        group["step"] = step
    optimizer.load_state_dict(own)
    inner = optimizer.optimizer
    if isinstance(inner, torch.optim.Adam):
        for values in inner.state.values():
            values.pop("step", None)
    optimizer.load_parameter_state_from_fully_reshardable(tensors)
    if isinstance(inner, torch.optim.Adam):
        for group in inner.param_groups:
            for p in group["params"]:
                inner.state[p]["step"] = torch.tensor(float(step))


def _shape(inner: HiddenGPTModel) -> dict[str, object]:
    return {key: inner.hf_config.get(key) for key in _SHAPE}


def _check_shape(saved: dict[str, object], wanted: dict[str, object], path: Path) -> None:
    for key, value in wanted.items():
        if saved.get(key) != value:
            raise ValueError(
                f"{key} of the checkpoint must be {value} as in --hf-checkpoint, got {saved.get(key)} in {path}; "
                "load the checkpoint with the model it was saved from"
            )


def _ranks() -> list[int]:
    sizes = [
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    ]
    experts = parallel_state.get_expert_model_parallel_world_size()
    return sizes if experts == 1 else [*sizes, experts]
