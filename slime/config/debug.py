"""Flags of the debug section: run one half alone, save and replay the records between the halves."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import flag


@dataclass(frozen=True)
class DebugConfig:
    """Paths are templates: {rollout_id} is filled in."""

    debug_rollout_only: bool = flag(False, "engines only, no trainer")
    debug_train_only: bool = flag(False, "trainer only, no engines")
    save_debug_rollout_data: str | None = flag(None, "save the samples of each rollout here")
    load_debug_rollout_data: str | None = flag(None, "train on saved samples; implies --debug-train-only")
    load_debug_rollout_data_subsample: float | None = flag(
        None, "use only this fraction of the loaded samples"
    )
    dump_details: str | None = flag(None, "save the samples of each rollout in this directory")
