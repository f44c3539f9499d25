"""Checks that the disks have space for the published weights and the checkpoints of a run, before anything starts."""

from __future__ import annotations

import shutil
from pathlib import Path

from slime.checkpoints.hf_config import read_hf_config
from slime.checkpoints.memory_files import SLOTS
from slime.config import Config
from slime.config.problems import require_value
from slime.plan.model_shape import Shape
from slime.plan.step_memory.optimizer_state import main_bytes, saved_state
from slime.plan.units import BYTES
from slime.records.errors import FlagError
from slime.roles.groups import on_one_host
from slime.system.disk_space import require_free_bytes
from slime.weight_sync.registry import CHANNELS
from vime.run.temporary import SHARED_MEMORY, left_weights


def require_disk_space(c: Config) -> None:
    """Raises ValueError unless the published weights of a run fit in --weight-dir, and a checkpoint fits in --save.

    The sizes come from config.json, so the check does not wait for the rest of the run. Each save repeats the check.
    """
    if c.debug.debug_rollout_only:
        return
    shape = Shape.of(read_hf_config(c.rollout.hf_checkpoint))
    params = shape.params
    weights_bytes = params * BYTES[c.megatron.params_dtype]
    copies = CHANNELS[c.weight_update.update_weight_transport].copies
    if c.data.num_rollout is not None:  # with --num-epoch, a plan has no number of rollouts
        copies = min(copies, c.rollouts + 1)
        if copies and c.weight_update.update_weight_disk_keep_files:
            copies = c.rollouts // c.weight_update.update_weights_interval + 1
    if c.weight_update.update_weight_mode == "delta":
        # two whole sets, and this host's copy unless it has a separate directory
        copies = max(copies, 2) + (c.weight_update.update_weight_local_checkpoint_dir is None)
    if c.num_engines and copies:
        weight_dir = require_value(c.weight_update.weight_dir)
        left = sum(file.stat().st_size for file in Path(weight_dir).glob("**/*.safetensors"))
        what = f"{copies} versions of the weights"
        require_free_bytes("--weight-dir", weight_dir, copies * weights_bytes - left, what)
    if c.megatron.stream_optimizer_state_to_disk:
        of_weight = 8 if c.megatron.stream_optimizer_state_moment_dtype == "bf16" else 12
        of_host = of_weight * params * c.megatron.optimizer_offload_fraction / c.cluster.actor_num_nodes
        folder = require_value(c.megatron.offload_train_disk_dir)
        require_free_bytes("--offload-train-disk-dir", folder, of_host, "Adam's main weights and moments")
    if c.checkpoint.save is not None:
        state_bytes = 0 if c.checkpoint.no_save_optim else saved_state(c, shape)
        require_free_bytes("--save", c.checkpoint.save, weights_bytes + state_bytes, "a checkpoint")
    if c.fault_tolerance.recover_from == "memory" and on_one_host(c) and not c.lora.lora_rank:
        states = SLOTS * (weights_bytes + saved_state(c, shape, main_bytes(c)))
        _require_shared_memory(states, Path(c.logging.run_dir))


def _require_shared_memory(needed: float, run_dir: Path) -> None:
    """Raises ValueError unless /dev/shm has room for the states of --recover-from memory. A new run removes those of a
    killed run in `run_dir`."""
    left = (file for folder in left_weights(SHARED_MEMORY, run_dir) for file in folder.rglob("*"))
    free = shutil.disk_usage(SHARED_MEMORY).free + sum(file.stat().st_size for file in left if file.is_file())
    if free < needed:
        raise FlagError(
            "--recover-from memory",
            f"have {needed / 2**30:.2f} GiB of room in {SHARED_MEMORY} for {SLOTS} states of the trainer",
            f"{free / 2**30:.2f} GiB free",
            "enlarge /dev/shm (docker run --shm-size, mount -o remount,size=), or set --recover-from disk",
        )
