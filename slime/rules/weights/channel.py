"""Chooses the weight channel (--update-weight-transport) of a run."""

from __future__ import annotations

import argparse
from typing import Literal

from slime.weight_sync.registry import CHANNELS, default_channel


def choose_channel(c: argparse.Namespace) -> None:
    """Sets the channel where none is given. Replaces a channel that does not work on shared GPUs."""
    gpus: Literal["shared", "apart"] | None = None
    if c.device == "cuda":
        gpus = "shared" if c.colocate else "apart"
    queued = c.rollout_data_transport == "straw"  # rollout hosts read files
    set_value, usual = c.update_weight_transport, default_channel(None if queued else gpus)
    if set_value is None:
        if why := _missed_engines(c, usual):
            c.notes.append(f"--update-weight-transport is {default_channel(None)}, not {usual}: {why}")
            usual = default_channel(None)
        c.update_weight_transport = usual
    elif gpus == "shared" and CHANNELS[set_value].gpus == "apart":
        c.notes.append(
            f"--update-weight-transport {set_value} is {usual} with --colocate: trainer and engines share their GPUs"
        )
        c.update_weight_transport = usual


def _missed_engines(c: argparse.Namespace, channel: str) -> str | None:
    """Returns the reason why a channel does not reach all workers of the engines, or None."""
    if not c.rollout_num_gpus:
        return None
    names = ("data_parallel_size", "pipeline_parallel_size")
    sizes = {name: getattr(c.engine_facts, name) for name in names}
    if CHANNELS[channel].tensor_parallel_only and max(sizes.values()) > 1:
        remarks = ", ".join(f"{c.engine_facts.flag(name)} {size}" for name, size in sizes.items())
        return f"{remarks}, and a broadcast reaches tensor-parallel workers alone"
    if CHANNELS[channel].collective and c.device == "cuda" and c.rollout_engines_per_gpu > 1:
        return f"--rollout-engines-per-gpu {c.rollout_engines_per_gpu}, and NCCL reaches one engine per GPU"
    return None
