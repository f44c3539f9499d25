"""Rules of the weight-update section."""

from __future__ import annotations

from slime.config.schema import Config
from slime.models.lora import sends_adapters
from slime.weight_sync.delta.registry import checksum


def check_weight_update(c: Config) -> None:
    """What deltas need, and what needs deltas."""
    w = c.weight_update
    if w.update_weight_mode == "full":
        if w.update_weight_local_checkpoint_dir is not None:
            raise ValueError(
                "--update-weight-mode must be delta with --update-weight-local-checkpoint-dir, got full with "
                f"{w.update_weight_local_checkpoint_dir}; add --update-weight-mode delta, or leave the directory out"
            )
        return
    if c.cluster.colocate:
        raise ValueError(
            "--update-weight-mode must be full with --colocate, got delta; such engines read the weights where the "
            "trainer has them: leave out one of the two"
        )
    if sends_adapters(c):
        raise ValueError(
            "--update-weight-mode must be full where adapters are sent, got delta with --lora-rank "
            f"{c.lora.lora_rank}; an adapter is smaller than a delta: leave the flag out, or add --lora-merge"
        )
    checksum(w.update_weight_delta_checksum, b"")  # ValueError without its package
