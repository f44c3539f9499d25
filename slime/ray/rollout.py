"""Import path of slime plug-ins: see slime.observability. The rollout manager is slime.rollout.manager."""

from slime.observability.metric_utils import (
    compute_pass_rate,
    compute_rollout_step,
    compute_statistics,
    dict_add_prefix,
    has_repetition,
)
from slime.observability.rollout_metrics import (
    compute_metrics_from_samples,
    compute_perf_metrics_from_samples,
)

__all__ = [
    "compute_metrics_from_samples",
    "compute_pass_rate",
    "compute_perf_metrics_from_samples",
    "compute_rollout_step",
    "compute_statistics",
    "dict_add_prefix",
    "has_repetition",
]
