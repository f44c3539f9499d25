"""Import path of slime plug-ins: see slime.rollout.context and slime.plug_ins.rollouts."""

from slime.plug_ins.rollouts import get_async_loop
from slime.rollout.context import run_in_process as run

__all__ = ["get_async_loop", "run"]
