"""Import path of slime plug-ins: see slime.hooks and slime.rollout.metrics."""

from slime.hooks import SingletonMeta, load_function
from slime.rollout.metrics import group_by

__all__ = ["SingletonMeta", "group_by", "load_function"]
