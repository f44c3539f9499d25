"""Where metrics go: `metrics.jsonl` always, TensorBoard and Weights & Biases on request.

metrics.jsonl has one flat JSON object per `log` call, one per line, so
`pandas.read_json(path, lines=True)` returns one column per metric:

    {"step_key": "train/step", "step": 3, "time": 1767225600.0, "train/loss": 0.01, "train/grad_norm": 0.5}

`step` counts in the unit of `step_key` (rollouts for rollout/step and eval/step, optimizer steps for
train/step). `time` is Unix seconds. JSON has no NaN, so a value that is not finite is null, and the extra entry
`"nonfinite": {"train/loss": "nan"}` has the value.
"""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat

from slime.config import Config
from slime.disk_space import Room
from slime.imports import is_installed

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

from slime.config.secrets import mask_secrets

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

from slime.tracking.metrics import STEP_KEYS, StepKey, as_floats

METRICS_FILE = "metrics.jsonl"
DROPPED_FILE = "metrics.dropped.jsonl"
RESERVED = frozenset({"step_key", "step", "time", "nonfinite"})


class Tracker(Protocol):
    """Receives metrics. `log` accepts floats that are not finite. Steps of one key never decrease."""

    def log(self, metrics: Mapping[str, float], step: int, step_key: StepKey) -> None: ...

    def close(self) -> None: ...


class JsonlTracker:
    """Appends to `path` and flushes each line, so a killed run loses at most the line that it was writing.

    `resume` maps a step key to the first step that will be logged again. Lines from that step on move to
    `metrics.dropped.jsonl` in the same directory, and the file is replaced atomically. An incomplete last line (the
    run was killed while writing) is removed. Any other unreadable line is a ValueError with its number.
    """

    def __init__(self, path: Path, resume: Mapping[str, int]) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            self._drop_replayed(resume)
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close())

    def log(self, metrics: Mapping[str, float], step: int, step_key: StepKey) -> None:
        taken = RESERVED.intersection(metrics)
        if taken:
            raise ValueError(f"metric names must not be {sorted(RESERVED)}, got {sorted(taken)}; rename them")
        line: dict[str, object] = {"step_key": step_key, "step": step, "time": time.time()}
        line |= {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        nonfinite = {name: str(value) for name, value in metrics.items() if not math.isfinite(value)}
        if nonfinite:
            line["nonfinite"] = nonfinite
        with Room("--run-dir", self._path.parent, self._path.name):
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        with Room("--run-dir", self._path.parent, self._path.name):
            self._file.close()

    def _drop_replayed(self, resume: Mapping[str, int]) -> None:
        text = self._path.read_text(encoding="utf-8", errors="replace")
        kept: list[str] = []
        dropped: list[str] = []
        for line, row in read_metric_lines(text, self._path):
            replayed = row["step_key"] in resume and row["step"] >= resume[row["step_key"]]
            (dropped if replayed else kept).append(line + "\n")
        if "".join(kept) == text:
            return
        if dropped:
            with open(self._path.with_name(DROPPED_FILE), "a", encoding="utf-8") as file:
                file.writelines(dropped)
        temporary = self._path.with_name(self._path.name + ".tmp")
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)


def read_metric_lines(text: str, path: Path, first: int = 1) -> list[tuple[str, dict[str, Any]]]:
    """(line, parsed line) of each line of a metrics.jsonl; `text` begins with its line `first`. A last line without its
    newline is left out unless it parses. Any other line that is not a metric record raises ValueError with its number.
    """
    lines = text.split("\n")
    torn = lines.pop()
    out = []
    for number, line in enumerate([*lines, torn] if torn else lines, start=first):
        try:
            row = json.loads(line)
            if not isinstance(row["step"], int) or row["step_key"] not in STEP_KEYS:
                raise ValueError("no step")
        except (ValueError, KeyError, TypeError) as error:
            if number >= first + len(lines):
                break
            raise ValueError(
                f"{path} line {number} must be a JSON object with step and step_key, got {line[:80]!r}; "
                "move the file away or remove the line"
            ) from error
        out.append((line, row))
    return out


class TensorBoardTracker:
    """Scalars under their own names, in one sub-directory per step unit (rollout, train, eval).

    The directories are separate because TensorBoard removes replayed steps per directory and by one number, but a
    resumed run has a different first step in each unit.
    """

    def __init__(self, log_dir: Path, resume: Mapping[str, int]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make_writer = SummaryWriter
        self._log_dir = Path(log_dir)
        self._resume = dict(resume)
        self._writers: dict[str, SummaryWriter] = {}
        for step_key in STEP_KEYS:
            if self._directory(
                step_key
            ).is_dir():  # remove steps that will be replayed, even if none is logged again
                self._writer(step_key)

    def log(self, metrics: Mapping[str, float], step: int, step_key: StepKey) -> None:
        writer = self._writer(step_key)
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _directory(self, step_key: str) -> Path:
        return self._log_dir / step_key.split("/")[0]

    def _writer(self, step_key: str) -> SummaryWriter:
        if step_key not in self._writers:
            directory = self._directory(step_key)
            purge_step = self._resume.get(step_key) if directory.is_dir() else None
            self._writers[step_key] = self._make_writer(str(directory), purge_step=purge_step)
        return self._writers[step_key]


class WandbTracker:
    """Weights & Biases, imported here only. The x-axis of each metric is the step unit of its `log` call.

    `--wandb-always-use-train-step` converts rollout and eval steps to optimizer steps. A resumed run with the same
    `--wandb-run-id` continues its curves. W&B keeps everything that it has received, so replayed steps appear twice
    there. Keys and passwords in the uploaded config are masked. `--wandb-mode offline` needs no account and no
    network.
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        import wandb

        offline = config.logging.wandb_mode in ("offline", "disabled")
        if config.logging.wandb_key is not None and not offline:
            wandb.login(key=config.logging.wandb_key, host=config.logging.wandb_host)
        group = config.logging.wandb_group
        if group is not None and not config.logging.disable_wandb_random_suffix:
            group = f"{group}_{uuid.uuid4().hex[:8]}"
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

    def close(self) -> None:
        self._run.finish()


class Trackers:
    """All trackers of a run. The loop calls one `log`, which checks names and numbers once."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers = trackers

    def log(self, metrics: Mapping[str, SupportsFloat], step: int, step_key: StepKey) -> None:
        """Send `metrics` to every tracker. ValueError for an unknown step key or a value that is not a number."""
        if step_key not in STEP_KEYS:
            raise ValueError(
                f"step_key must be one of {', '.join(STEP_KEYS)}, got {step_key!r}; use one of them"
            )
        numbers = as_floats(metrics)
        for tracker in self._trackers:
            tracker.log(numbers, int(step), step_key)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def make_trackers(config: Config, run_dir: Path, resume_step: int) -> Trackers:
    """The trackers that `config` selects, ready to log from rollout `resume_step` on (0 for a new run).

    Records that an earlier process logged in this run directory for rollout `resume_step` and later are removed,
    because they will be logged again. The first such optimizer step is resume_step * --num-steps-per-rollout.
    TensorBoard files go to `run_dir`/tensorboard[/--tb-project-name][/--tb-experiment-name].
    """
    run_dir = Path(run_dir)
    resume = dict.fromkeys(STEP_KEYS, resume_step)
    resume["train/step"] = resume_step * config.data.num_steps_per_rollout
    trackers: list[Tracker] = [JsonlTracker(run_dir / METRICS_FILE, resume)]
    if config.logging.use_tensorboard:
        parts = [part for part in (config.logging.tb_project_name, config.logging.tb_experiment_name) if part]
        trackers.append(TensorBoardTracker(run_dir.joinpath("tensorboard", *parts), resume))
    if config.logging.use_wandb and is_installed("wandb"):
        trackers.append(WandbTracker(config, run_dir))
    return Trackers(trackers)
