"""Flags of the weight-update section: how trained weights reach the engines."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import flag


@dataclass(frozen=True)
class WeightUpdateConfig:
    """Trainer to engine. `weight_dir` is filled in per run when it is not given."""

    update_weight_transport: str | None = flag(
        None,
        "how weights travel to the engines: ipc through the memory of shared GPUs (default with --colocate on GPUs), "
        "nccl over a process group (default with GPUs of their own; gloo on CPUs), disk through files that both see "
        "(default otherwise)",
        choices=("disk", "ipc", "nccl"),
    )
    update_weight_buffer_size: int = flag(
        512 * 2**20, "bytes of a bucket that ipc and nccl pack weights into"
    )
    update_weights_interval: int = flag(
        1, "push weights after every so many rollouts (above 1 needs --max-staleness)"
    )
    update_weight_disk_dir: str | None = flag(None, "older name of --weight-dir")
    weight_dir: str | None = flag(
        None,
        "directory for published weights (default: a private one under /dev/shm, else the run directory)",
    )
    check_weight_update_equal: bool = flag(
        False, "after each update compare checksums of every live engine tensor"
    )
