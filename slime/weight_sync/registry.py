"""The channels by which weights reach engines, one entry per channel. To add a channel, write its file and its entry
here.

The flags, the memory estimate and the planner read the entries, so this file imports no torch.
slime.weight_sync.channel defines the interface of a channel.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from slime.weight_sync.channel import WeightChannel


@dataclass(frozen=True)
class ChannelRecord:
    """A value of --update-weight-transport."""

    path: str
    """Class of the channel, "module:name"."""
    help: str
    """Text about the channel in the flag's help."""
    plan: str
    """Text that `vime plan` prints, where {weight_dir} is the directory of published files."""
    gpus: Literal["shared", "apart"] | None = None
    """"shared" if trainer and engines must share GPUs, "apart" if they must not. On such GPUs the channel is the
    default. None means that the channel works everywhere."""
    buckets: bool = False
    """The trainer keeps two buckets on its device."""
    sliced: bool = False
    """Each trainer rank sends its own slices. Otherwise every rank has all weights."""
    collective: bool = False
    """All engines receive a part at the same time. If an engine dies, the update starts again for the others."""
    tensor_parallel_only: bool = False
    """The channel does not reach data-parallel copies and pipeline stages."""
    needs_gpus: bool = False
    """The channel does not run on CPUs."""
    copies: int = 0
    """Largest number of full versions that are in {weight_dir} at the same time."""

    def load(self) -> type[WeightChannel]:
        """Returns the channel's class (imports torch)."""
        found: type[WeightChannel] = pkgutil.resolve_name(self.path)
        return found


_HERE = "slime.weight_sync."
CHANNELS = {
    "ipc": ChannelRecord(
        _HERE + "ipc_channel:IpcChannel",
        help="through the memory of shared GPUs (default with --colocate on GPUs)",
        plan="the memory of the GPUs that both are on",
        gpus="shared",
        buckets=True,
    ),
    "nccl": ChannelRecord(
        _HERE + "broadcast_channel:BroadcastChannel",
        help="through a process group (default if trainer and engines have their own GPUs; gloo on CPUs)",
        plan="broadcast",
        gpus="apart",
        buckets=True,
        sliced=True,
        collective=True,
        tensor_parallel_only=True,
    ),
    "disk": ChannelRecord(
        _HERE + "file_channel:FileChannel",
        help="through files that trainer and engines can read (default otherwise)",
        plan="files in {weight_dir}",
        sliced=True,
        copies=3,
    ),
    "vllm-nccl": ChannelRecord(
        "vime.vllm.packed_channel:PackedNcclChannel",
        help="through vLLM's own packed broadcast, from one trainer rank to engines on other GPUs",
        plan="vLLM's packed broadcast",
        gpus="apart",
        buckets=True,
        collective=True,
        tensor_parallel_only=True,
        needs_gpus=True,
    ),
}


def default_channel(gpus: Literal["shared", "apart"] | None) -> str:
    """Returns the default channel for GPUs that trainer and engines share ("shared"), for separate GPUs ("apart"), or
    for CPUs (None)."""
    return next(name for name, channel in CHANNELS.items() if channel.gpus == gpus)
