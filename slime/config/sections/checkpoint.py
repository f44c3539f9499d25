"""Flags of the checkpoint section: the checkpoints that a run loads at its start and saves later."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from slime.config.fields import flag
from slime.config.ranges import COUNT, COUNT_OR_ZERO

HfFormat = Literal["bf16", "checkpoint"]
"""The form in which a Hugging Face directory stores weights: in bfloat16, or as the checkpoint from which training
started. Without a format, the dtype is the trainer's."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Directories are Megatron distributed checkpoints, unless the help text names another kind. --load and --ref-load
    also accept checkpoints that slime or Megatron saved or converted, and Hugging Face directories."""

    load: str | None = flag(None, "folder of checkpoints to resume from; if it holds none, a new run starts")
    ckpt_step: int | None = flag(
        None,
        "the iteration of --load to resume from (default: the newest); later iterations are replaced as the run saves",
        range=COUNT_OR_ZERO,
    )
    overwrite: bool = flag(
        False, "let a run that does not resume replace the checkpoints in --save and the metrics in --run-dir"
    )
    no_load_optim: bool = flag(
        False, "take neither the optimizer nor the learning rate schedule of --load; both start anew"
    )
    no_load_rng: bool = flag(False, "do not take the random generators of --load")
    finetune: bool = flag(False, "take only the weights of --load; a new run starts from rollout 0")
    save: str | None = flag(None, "folder for checkpoints")
    save_interval: int | None = flag(
        None, "number of rollouts between two checkpoints; the last rollout is always saved", range=COUNT
    )
    no_save_optim: bool = flag(
        False, "do not save the optimizer; such a checkpoint cannot be resumed exactly"
    )
    async_save: bool = flag(
        False,
        "write checkpoints while the next steps train; the next save and the end of the run wait for the files",
    )
    max_actor_ckpt_to_keep: int | None = flag(
        None,
        "number of checkpoints of each trained model that stay in its folder (default: all)",
        range=COUNT,
    )
    exit_signal_handler: bool = flag(
        False,
        "at SIGTERM, finish a training step that has begun, save a checkpoint and end with exit code 143; a rollout or "
        "an evaluation that is being made is given up",
    )
    save_hf: str | None = flag(
        None, "folder for Hugging Face checkpoints in addition; {rollout_id} in its name is replaced"
    )
    save_hf_format: str | None = flag(
        None,
        "how --save-hf stores weights: in bfloat16, or as --hf-checkpoint does, in its quantisation and dtypes "
        "(default: in the trainer's dtype)",
        choices=get_args(HfFormat),
    )
    ref_load: str = flag(
        None,
        "weights of the reference model (default: --hf-checkpoint), and the first weights of the policy where --load "
        "names none",
    )
    ref_ckpt_step: int | None = flag(
        None, "the iteration of --ref-load to take (default: the newest)", range=COUNT_OR_ZERO
    )
    memory_dir: str | None = field(default=None)
    """The folder of --recover-from memory, with one folder per role; no flag sets it."""
    restart_iteration: int | None = field(default=None)
    """The iteration from which trainer ranks continue that the run has started again (`slime.recovery`); no flag sets
    it."""
    restart_dir: str | None = field(default=None)
    """The folder of that iteration in host memory, with one folder per role. None for the folders of --save."""
