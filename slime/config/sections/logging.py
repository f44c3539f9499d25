"""Flags of the logging section: where a run writes its metrics and records."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import flag
from slime.config.ranges import COUNT_OR_ZERO


@dataclass(frozen=True)
class LoggingConfig:
    """metrics.jsonl is always written. TensorBoard and wandb are optional."""

    run_dir: str = flag(None, "directory for the records of the run (default: runs/<model>-<time>)")
    save_samples: int = flag(
        4,
        "samples of each rollout that the run directory keeps in samples/, with the log-probs of engine and trainer",
        range=COUNT_OR_ZERO,
    )
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
    disable_wandb_random_suffix: bool = flag(False, "do not add a random suffix to the name of the wandb run")
    wandb_always_use_train_step: bool = flag(False, "use the training step as the x axis of all charts")
    log_multi_turn: bool = flag(False, "report multi_turn/* metrics")
    log_passrate: bool = flag(False, "report pass@k of the training samples")
    log_reward_category: str | None = flag(None, "field of the reward object whose values are counted")
    log_correct_samples: bool = flag(False, "report the lengths of correct samples separately")
