"""Flags of the weight-update section: the transfer of trained weights to the engines."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import flag
from slime.config.ranges import BYTES, COUNT

EACH, NEVER = "1", "never"
"""Values of --flush-cache-interval: each update drops the engines' caches, or no update after the first one."""


@dataclass(frozen=True)
class WeightUpdateConfig:
    """The transfer of weights from the trainer to the engines."""

    update_weight_transport: str = flag(
        None,
        "how weights go to the engines",
    )
    update_weight_mode: str = flag(
        "full",
        "send all weights, or what changed since the last update (delta)",
        choices=("full", "delta"),
    )
    update_weight_delta_encoding: str = flag("xor", "what a delta has of the values that changed")
    update_weight_delta_checksum: str = flag(
        "xxh3-128", "checksum of every tensor, by which engines check a delta"
    )
    update_weight_local_checkpoint_dir: str | None = flag(
        None,
        "directory of each engine host for its copy of the weights, which deltas change (default: a folder in "
        "--weight-dir)",
    )
    custom_update_weight_post_write_path: str | None = flag(
        None, "fn(args, version_dir, rollout_engines), called when a version was written into --weight-dir"
    )
    custom_delta_pre_push_path: str | None = flag(
        None, "older name of --custom-update-weight-post-write-path"
    )
    update_weight_buffer_size: int = flag(
        512 * 2**20,
        "size in bytes of a bucket of weights, for the channels that send buckets",
        range=BYTES,
    )
    update_weights_interval: int = flag(
        1, "number of rollouts between two weight updates (more than 1 needs --max-staleness)", range=COUNT
    )
    flush_cache_interval: str = flag(
        EACH,
        "number of weight updates after which engines drop the keys and values of older weights; never: they keep them",
    )
    update_weight_disk_dir: str | None = flag(None, "older name of --weight-dir")
    update_weight_delta_dir: str | None = flag(None, "older name of --weight-dir")
    weight_dir: str | None = flag(
        None,
        "directory for published weights (default: a private one in /dev/shm, otherwise the run directory)",
    )
    """Filled in by a run if it is not given."""
    update_weight_disk_keep_files: bool = flag(
        False, "keep the files of all published versions in --weight-dir, in place of the newest two"
    )
    update_weight_delta_keep_files: bool = flag(False, "older name of --update-weight-disk-keep-files")
    check_weight_update_equal: bool = flag(
        False, "compare every engine tensor with the trainer's after each update"
    )

    @property
    def flush_interval(self) -> int | None:
        """Returns --flush-cache-interval as a number of updates, or None if engines never drop their caches."""
        return None if self.flush_cache_interval == NEVER else int(self.flush_cache_interval)
