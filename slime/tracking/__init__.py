"""Observes a run: timers, metrics, trackers, one console line per step, and a record of the environment."""

from slime.config.secrets import mask_secrets
from slime.tracking.console import StepLine, progress
from slime.tracking.environment import collect_environment, write_environment
from slime.tracking.metrics import LOGPROB_DIFF, LOGPROB_DIFF_MAX
from slime.tracking.timers import Timers
from slime.tracking.trackers import Tracker, Trackers, check_trackers, make_trackers

__all__ = [
    "LOGPROB_DIFF",
    "LOGPROB_DIFF_MAX",
    "StepLine",
    "Timers",
    "Tracker",
    "Trackers",
    "check_trackers",
    "collect_environment",
    "make_trackers",
    "mask_secrets",
    "progress",
    "write_environment",
]
