"""Flags of the checkpoint section: what is loaded at the start and saved on the way."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import flag


@dataclass(frozen=True)
class CheckpointConfig:
    """Directories are Megatron distributed checkpoints unless the help says otherwise."""

    load: str | None = flag(None, "checkpoint to resume from; the run starts afresh while it holds none")
    save: str | None = flag(None, "where checkpoints go")
    save_interval: int | None = flag(None, "save after every so many rollouts, and at the end")
    no_save_optim: bool = flag(
        False, "leave the optimizer out of checkpoints: they cannot be resumed exactly"
    )
    save_hf: str | None = flag(None, "also write a Hugging Face directory here, {rollout_id} is filled in")
    ref_load: str | None = flag(None, "weights of the reference model (default: --hf-checkpoint)")
