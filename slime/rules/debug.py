"""Rules of --profile-steps."""

from __future__ import annotations

from slime.config.schema import Config
from slime.config.sections.debug import profiled_steps


def check_profile_steps(c: Config) -> None:
    """The range of --profile-steps must contain a training step of the run."""
    steps = profiled_steps(c.debug.profile_steps)
    if steps and c.debug.debug_rollout_only:
        raise ValueError(
            f"--profile-steps must not be combined with --debug-rollout-only, got {c.debug.profile_steps}; "
            "it traces training"
        )
    if steps and c.data.num_rollout is not None and steps.start >= c.data.num_rollout:
        raise ValueError(
            f"--profile-steps must begin below --num-rollout, got {c.debug.profile_steps} and "
            f"{c.data.num_rollout}; rollouts "
            "count from 0"
        )
