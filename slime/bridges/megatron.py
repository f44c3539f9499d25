"""Every symbol of Megatron that this project replaces."""

from __future__ import annotations

from slime.bridges import Patch

_STRATEGIES = "megatron.core.dist_checkpointing.strategies.torch"
SAFE_READING = (
    Patch(
        symbol=f"{_STRATEGIES}:_get_filesystem_reader",
        replacement="slime.megatron_backend.checkpoint.safe_reading:metadata_reader",
        condition="while a checkpoint is read",
        why="Megatron unpickles the metadata of a checkpoint, and a pickle can run code",
        removed_when="Megatron reads metadata with weights_only=True",
    ),
    Patch(
        symbol=f"{_STRATEGIES}:MCoreLoadPlanner",
        replacement="slime.megatron_backend.checkpoint.safe_reading:safe_planner",
        condition="while a checkpoint is read",
        why="Megatron unpickles the objects of a checkpoint, and a pickle can run code",
        removed_when="Megatron reads objects with weights_only=True",
    ),
)
GRADIENT_NORM = Patch(
    symbol="megatron.core.optimizer.clip_grads:l2_norm_impl",
    replacement="slime.megatron_backend.model.optimizer:norm_at_once",
    condition="in a trainer",
    why="without Transformer Engine and Apex, Megatron waits for the norm of each weight's gradient on the GPU",
    removed_when="Megatron's own norm does not wait for each weight",
)
PATCHES = (*SAFE_READING, GRADIENT_NORM)


def forget_groups() -> None:
    """Drops the process groups that `destroy_model_parallel` does not drop."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    for name, value in vars(parallel_state).items():
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)
