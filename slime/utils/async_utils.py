"""Import path of slime plug-ins: see slime.rollout.state."""

from slime.rollout.context import run_in_process as run

__all__ = ["run"]
