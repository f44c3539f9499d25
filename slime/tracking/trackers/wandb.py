"""Implements --use-wandb, for Weights & Biases."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slime.config.secrets import mask_secrets
from slime.tracking.metrics import STEP_KEYS, StepKey
from slime.tracking.trackers.record import State, TrackerKind

if TYPE_CHECKING:
    from slime.config.schema import Config
    from slime.config.sections.logging import LoggingConfig


class WandbTracker:
    """Sends metrics to Weights & Biases, which only this file imports. A metric's x-axis is the step unit of its `log`
    call.

    `--wandb-always-use-train-step` converts rollout and eval steps to optimizer steps. A resumed run with the same
    `--wandb-run-id` continues its curves. W&B keeps everything that it has received, so replayed steps appear twice
    there. Keys and passwords in the uploaded config are masked. `--wandb-mode offline` needs no account and no network.
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        import wandb

        offline = config.logging.wandb_mode in ("offline", "disabled")
        if config.logging.wandb_key is not None and not offline:
            wandb.login(key=config.logging.wandb_key, host=config.logging.wandb_host)
        group = choose_group(config.logging, run_dir)
        directory = Path(config.logging.wandb_dir or run_dir)
        directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            entity=config.logging.wandb_team,
            project=config.logging.wandb_project,
            group=group,
            name=group,
            id=config.logging.wandb_run_id,
            resume="allow" if config.logging.wandb_run_id else None,
            mode=config.logging.wandb_mode,
            dir=str(directory),
            config=mask_secrets(config.to_dict()),
        )
        self._train_steps = (
            config.data.num_steps_per_rollout if config.logging.wandb_always_use_train_step else None
        )
        self._defined: set[str] = set()

    def log(self, metrics: Mapping[str, float], step: int, step_key: StepKey) -> None:
        axis: str = step_key
        if self._train_steps is not None and step_key != "train/step":
            axis, step = "train/step", step * self._train_steps
        for name in metrics.keys() - self._defined - set(STEP_KEYS):
            self._run.define_metric(name, step_metric=axis)
            self._defined.add(name)
        self._run.log({**metrics, axis: step})

    def close(self, state: State) -> None:
        self._run.finish(exit_code=0 if state == "finished" else 1)


def choose_group(flags: LoggingConfig, run_dir: Path) -> str | None:
    """Returns --wandb-group, with a suffix unless --disable-wandb-random-suffix is given.

    The suffix is the same for every start in a run directory, so that a resumed run keeps its name.
    """
    if flags.wandb_group is None or flags.disable_wandb_random_suffix:
        return flags.wandb_group
    return f"{flags.wandb_group}_{hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:8]}"


def _make(config: Config, run_dir: Path, resume: Mapping[str, int]) -> WandbTracker:
    return WandbTracker(config, run_dir)


WANDB = TrackerKind("--use-wandb", lambda flags: flags.use_wandb, "wandb", "wandb", _make, optional=True)
