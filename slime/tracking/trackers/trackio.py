"""Implements --use-trackio. Metrics keep their names and their step, in the unit of their name.

Trackio keeps its data in TRACKIO_DIR (default: below the cache of Hugging Face) and `trackio show` draws them. It keeps
everything that it has received, so replayed steps of a resumed run are in a separate run or appear twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slime.config.secrets import mask_secrets
from slime.tracking.metrics import StepKey
from slime.tracking.trackers.record import State, TrackerKind, run_name

if TYPE_CHECKING:
    from slime.config.schema import Config


class TrackioTracker:
    def __init__(self, config: Config, run_dir: Path) -> None:
        import trackio

        flags = config.logging
        self._run = trackio.init(
            project=flags.trackio_project or flags.wandb_project or "vime",
            name=run_name(flags.trackio_run_name, config, run_dir),
            config=mask_secrets(config.to_dict()),
            resume="allow",
            embed=False,
        )

    def log(self, metrics: Mapping[str, float], step: int, step_key: StepKey) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, state: State) -> None:
        self._run.finish()


def _make(config: Config, run_dir: Path, resume: Mapping[str, int]) -> TrackioTracker:
    return TrackioTracker(config, run_dir)


TRACKIO = TrackerKind("--use-trackio", lambda flags: flags.use_trackio, "trackio", "trackio", _make)
