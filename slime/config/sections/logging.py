"""Flags of the logging section: the destinations of a run's metrics and records."""

from __future__ import annotations

import datetime
import secrets
from dataclasses import dataclass
from pathlib import Path

from slime.config.fields import flag
from slime.config.ranges import COUNT_OR_ZERO, PORT_OR_ANY


@dataclass(frozen=True)
class LoggingConfig:
    """metrics.jsonl is always written. The trackers (slime.tracking.trackers) are optional."""

    run_dir: str = flag(None, "directory for the records of the run (default: runs/<model>-<time>-<number>)")
    save_samples: int = flag(
        16,
        "samples of each rollout that the run directory keeps in samples/, as whole groups, with the log-probs of "
        "engine and trainer",
        range=COUNT_OR_ZERO,
    )
    log_sample: bool | None = flag(
        None, "print a prompt and its response every 20 rollouts (default: on a terminal)"
    )
    verbose: bool = flag(False, "print the hash of each operator's contract; -v is the same")
    otlp_traces_endpoint: str | None = flag(
        None,
        "OpenTelemetry collector that gets a span of each sample, such as http://localhost:4317; with "
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf such as http://localhost:4318/v1/traces",
    )
    use_tensorboard: bool = flag(False, "write TensorBoard events")
    tb_project_name: str | None = flag(
        None, "TensorBoard directory (default: tensorboard/ in the run directory)"
    )
    tb_experiment_name: str | None = flag(None, "sub-directory of --tb-project-name")
    use_wandb: bool = flag(False, "log to Weights & Biases")
    wandb_mode: str | None = flag(None, "wandb mode", choices=("online", "offline", "disabled"))
    wandb_dir: str | None = flag(None, "wandb directory (default: the run directory)")
    wandb_key: str | None = flag(
        None, "wandb key; prefer the environment variable WANDB_API_KEY", secret=True
    )
    wandb_host: str | None = flag(None, "wandb server")
    wandb_team: str | None = flag(None, "wandb entity")
    wandb_group: str | None = flag(None, "wandb group")
    wandb_project: str | None = flag(None, "wandb project")
    wandb_run_id: str | None = flag(None, "id of the wandb run to continue")
    disable_wandb_random_suffix: bool = flag(
        False, "do not add a suffix, which depends on the run directory, to the name of the wandb run"
    )
    wandb_always_use_train_step: bool = flag(False, "use the training step as the x axis of all charts")
    use_mlflow: bool = flag(False, "log to MLflow")
    mlflow_tracking_uri: str | None = flag(
        None, "MLflow server or database (default: MLFLOW_TRACKING_URI, else mlflow.db in the run directory)"
    )
    mlflow_experiment_name: str = flag("vime", "MLflow experiment; a new name makes a new one")
    mlflow_run_name: str | None = flag(
        None, "name of the MLflow run (default: --wandb-group, else the run directory's)"
    )
    mlflow_run_id: str | None = flag(None, "id of the MLflow run to continue")
    use_swanlab: bool = flag(False, "log to SwanLab")
    swanlab_project: str | None = flag(None, "SwanLab project (default: --wandb-project, else vime)")
    swanlab_experiment_name: str | None = flag(
        None, "name of the SwanLab experiment (default: --wandb-group, else the run directory's)"
    )
    swanlab_mode: str | None = flag(
        None,
        "SwanLab mode; cloud and online are the same",
        choices=("cloud", "online", "local", "offline", "disabled"),
    )
    use_trackio: bool = flag(False, "log to Trackio")
    trackio_project: str | None = flag(None, "Trackio project (default: --wandb-project, else vime)")
    trackio_run_name: str | None = flag(
        None, "name of the Trackio run (default: --wandb-group, else the run directory's)"
    )
    use_prometheus: bool = flag(False, "serve the newest metrics to Prometheus, at /metrics")
    prometheus_host: str = flag(
        "127.0.0.1", "address of this host that serves Prometheus; whoever reaches it reads without a key"
    )
    prometheus_port: int = flag(9090, "port that serves Prometheus; 0 for any free one", range=PORT_OR_ANY)
    prometheus_run_name: str | None = flag(
        None, "label run_name of all metrics (default: --wandb-group, else the run directory's)"
    )
    log_multi_turn: bool = flag(False, "report multi_turn/* metrics")
    log_passrate: bool = flag(False, "report pass@k of the training samples")
    log_reward_category: str | None = flag(None, "field of the reward object whose values are counted")
    log_correct_samples: bool = flag(False, "report the lengths of correct samples separately")


def new_run_dir(checkpoint: str | None) -> str:
    """Returns the run directory of a run without --run-dir.

    With the random number, two runs with the same model that start in the same second have different directories.
    """
    model = Path(checkpoint).name if checkpoint else "run"
    started = f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    return str(Path("runs") / f"{model}-{started}")
