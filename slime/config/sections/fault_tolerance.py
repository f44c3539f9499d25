"""Flags of the fault-tolerance section. Times are seconds."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import flag
from slime.config.ranges import SECONDS, SECONDS_OR_ZERO


@dataclass(frozen=True)
class FaultToleranceConfig:
    """Health of the engines, and snapshots for a run that is killed."""

    rollout_health_check_interval: float = flag(30.0, "seconds between health checks", range=SECONDS)
    rollout_health_check_timeout: float = flag(
        30.0, "maximum seconds until an engine answers a health check", range=SECONDS
    )
    rollout_health_check_first_wait: float = flag(
        0.0, "seconds until the first health check", range=SECONDS_OR_ZERO
    )
    engine_start_timeout_s: float = flag(600.0, "maximum seconds until an engine is ready", range=SECONDS)
    rollout_snapshot_s: float = flag(
        60.0,
        "seconds between two snapshots of the unfinished groups in the run directory, from which a run that resumes "
        "takes their tokens; 0 takes none",
        range=SECONDS_OR_ZERO,
    )
