"""Implements --use-mlflow. Metrics keep their step, in the unit of their name (train/, rollout/, eval/).

Metrics are sent in the background. Metrics that a server refused give a warning at the end and do not end the run,
because metrics.jsonl has them. MLflow keeps everything that it has received, so with --mlflow-run-id replayed steps
appear twice.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slime.config.secrets import mask_secrets
from slime.tracking.metrics import StepKey
from slime.tracking.trackers.record import State, TrackerKind, TrackerNames, run_name

if TYPE_CHECKING:
    from mlflow.utils.async_logging.run_operations import RunOperations

    from slime.config.schema import Config

LOG = logging.getLogger(__name__)
REFUSED = re.compile(r"[^/\w.\- :]")
"""Characters that MLflow's names may not contain. A tag's value has at most MOST_OF_TAG characters, and a request at
most MOST_TAGS tags."""
MOST_OF_TAG, MOST_TAGS = 5000, 100
STATES: dict[State, str] = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MlflowTracker:
    def __init__(self, config: Config, run_dir: Path) -> None:
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        flags, self._metric, self._error = config.logging, Metric, MlflowException
        self._names = TrackerNames(REFUSED)
        self._sent: list[tuple[int, RunOperations]] = []
        where = (
            flags.mlflow_tracking_uri
            or os.environ.get("MLFLOW_TRACKING_URI")
            or f"sqlite:///{run_dir.resolve()}/mlflow.db"
        )
        try:
            self._client = MlflowClient(tracking_uri=where)
            self.run_id = flags.mlflow_run_id or self._new_run(config, run_dir)
            self._client.update_run(self.run_id, status="RUNNING")
            self._tag(config)
        except MlflowException as error:
            raise ValueError(
                f"--mlflow-tracking-uri must be a server or database that takes a run, got {mask_secrets(where)}: "
                f"{error}; start it, or leave --use-mlflow out"
            ) from error

    def log(self, metrics: Mapping[str, float], step: int, step_key: StepKey) -> None:
        now = int(1000 * time.time())
        batch = [self._metric(self._names.of(name), value, now, step) for name, value in metrics.items()]
        self._sent.append((step, self._client.log_batch(self.run_id, metrics=batch, synchronous=False)))

    def close(self, state: State) -> None:
        lost = []
        for step, operation in self._sent:
            try:
                operation.wait()
            except self._error as error:
                lost.append(f"{step} ({error})")
        try:
            self._client.set_terminated(self.run_id, status=STATES[state])
        except self._error as error:
            lost.append(f"the end ({error})")
        if lost:
            LOG.warning("MLflow did not take step %s; metrics.jsonl has every step", ", ".join(lost))

    def _new_run(self, config: Config, run_dir: Path) -> str:
        experiment = config.logging.mlflow_experiment_name
        known = self._client.get_experiment_by_name(experiment)
        if known is None:
            artifacts = (
                None if config.logging.mlflow_tracking_uri else (run_dir.resolve() / "mlflow").as_uri()
            )
            of = self._client.create_experiment(experiment, artifact_location=artifacts)
        else:
            of = known.experiment_id
        name = run_name(config.logging.mlflow_run_name, config, run_dir)
        created: str = self._client.create_run(of, run_name=name).info.run_id
        return created

    def _tag(self, config: Config) -> None:
        """Sends the configuration as tags, because a parameter of MLflow refuses another value when a run is
        continued."""
        from mlflow.entities import RunTag

        settings = mask_secrets(config.to_dict())
        assert isinstance(settings, dict)
        tags = [
            RunTag(f"{section}.{name}", str(value)[:MOST_OF_TAG])
            for section, values in settings.items()
            if isinstance(values, dict)
            for name, value in values.items()
        ]
        for first in range(0, len(tags), MOST_TAGS):
            self._client.log_batch(self.run_id, tags=tags[first : first + MOST_TAGS])


def _make(config: Config, run_dir: Path, resume: Mapping[str, int]) -> MlflowTracker:
    return MlflowTracker(config, run_dir)


MLFLOW = TrackerKind("--use-mlflow", lambda flags: flags.use_mlflow, "mlflow", "mlflow", _make)
