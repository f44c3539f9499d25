"""Implements --use-swanlab. Metrics keep their names and their step, in the unit of their name.

Without --swanlab-mode, SwanLab's own setting counts (SWANLAB_MODE, else its server, which requires SWANLAB_API_KEY).
`offline` needs no account and no network. Files go to `run_dir`/swanlab. SwanLab keeps everything that it has received.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from slime.config.secrets import mask_secrets
from slime.tracking.metrics import StepKey
from slime.tracking.trackers.record import State, TrackerKind, run_name

if TYPE_CHECKING:
    from slime.config.schema import Config

MODES = {"cloud": "online"}
"""Maps slime's name of a mode to SwanLab's name since 0.10."""
STATES: dict[State, Literal["success", "crashed", "aborted"]] = {
    "finished": "success",
    "interrupted": "aborted",
    "failed": "crashed",
}


class SwanlabTracker:
    def __init__(self, config: Config, run_dir: Path) -> None:
        import swanlab

        flags, folder = config.logging, run_dir / "swanlab"
        folder.mkdir(parents=True, exist_ok=True)
        mode = flags.swanlab_mode
        self._run = swanlab.init(
            project=flags.swanlab_project or flags.wandb_project or "vime",
            name=run_name(flags.swanlab_experiment_name, config, run_dir),
            mode=None if mode is None else MODES.get(mode, mode),
            log_dir=str(folder),
            config=mask_secrets(config.to_dict()),
        )

    def log(self, metrics: Mapping[str, float], step: int, step_key: StepKey) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, state: State) -> None:
        self._run.finish(state=STATES[state])


def _make(config: Config, run_dir: Path, resume: Mapping[str, int]) -> SwanlabTracker:
    return SwanlabTracker(config, run_dir)


SWANLAB = TrackerKind("--use-swanlab", lambda flags: flags.use_swanlab, "swanlab", "swanlab", _make)
